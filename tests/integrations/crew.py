"""Trainers in processes of their own: killed in the middle, or two as one. Imports once and forks the rest."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from sordino import Budget, recipes
from sordino.integrations.accelerate import load, prepare
from sordino.integrations.transformers import PrivateTrainer
from tests.finetuning.models import KINDS, Texts, adapt, build, collate

STEPS = 6
BUDGET = Budget(epsilon=3, delta=1e-3)


class KillAfter(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the process as a power cut would, after a step and before anything is saved about it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make(folder: Path, kind: str = "gpt2", *callbacks: Any, **settings: Any) -> PrivateTrainer:
    plain = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "optim": "sgd", "learning_rate": 0.5}
    ours = {name: settings.pop(name) for name in ("recipe", "budget", "options") if name in settings}
    way = settings.pop("way", "lora")
    args = transformers.TrainingArguments(
        str(folder), **{**plain, "per_device_train_batch_size": 4, "save_strategy": "no", **settings}
    )
    model = build(kind) if way == "full" else adapt(build(kind), kind, way)
    return PrivateTrainer(
        model=model, args=args, train_dataset=Texts(kind), data_collator=collate, callbacks=list(callbacks), **ours
    )


KILLED = {"gpt2": "lora", "bert": "lora", "llama": "full", "t5": "full"}
"""What is trained of each kind in the runs that are killed."""


def make_budgeted(folder: Path, *callbacks: Any, kind: str = "gpt2") -> PrivateTrainer:
    saved = {"save_strategy": "steps", "save_steps": 2, "way": KILLED[kind]}
    return make(folder, kind, *callbacks, budget=BUDGET, max_steps=STEPS, **saved)


def killed_gpt2(folder: Path) -> None:
    make_budgeted(folder, KillAfter(4)).train()


def killed_bert(folder: Path) -> None:
    make_budgeted(folder, KillAfter(4), kind="bert").train()


def killed_llama(folder: Path) -> None:
    make_budgeted(folder, KillAfter(4), kind="llama").train()


def killed_t5(folder: Path) -> None:
    make_budgeted(folder, KillAfter(4), kind="t5").train()


def killed_before_any_checkpoint(folder: Path) -> None:
    make_budgeted(folder, KillAfter(1)).train()


def trained(folder: Path) -> Any:
    """What is trained of every kind after two steps with hardly any noise, and the price."""
    recipe = recipes.dpsgd(batch_size=12, steps=2, noise_multiplier=1e-6)
    found = []
    for kind, way in product(KINDS, ("full", "lora")):
        trainer = make(folder / kind / way, kind, way=way, recipe=recipe, options={"seed": 7}, eval_strategy="no")
        trainer.train()
        weights = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert trainer.private is not None
        assert trainer.private.run.team.size == int(os.environ.get("WORLD_SIZE", "1"))
        found.append((weights, trainer.guarantee().epsilon, len(trainer.private.run.ledger)))
    return found


def accelerated(folder: Path) -> Any:
    """The weights after an Accelerate loop with accumulation, and what kind of model came out of `prepare`."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    x = torch.randn(40, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    recipe = recipes.dpsgd(batch_size=16, steps=4, noise_multiplier=1e-6).for_records(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, private = prepare(accelerator, model, optimizer, (x, (x.sum(1) > 0).long()), loss, recipe, seed=7)
    for batch in load(accelerator, private):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            private.backward(loss(model, batch))
            optimizer.step()
    assert private.run.team.size == accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1"))
    return [p.detach() for p in model.parameters()], type(model).__name__, private.position


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def fork(folder: Path, work: Callable[[Path], Any], rank: int = 0, size: int = 1, port: int = 0) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if size > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
            os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        result = work(folder / work.__name__ / str(size))
        (folder / f"{work.__name__}-{size}-{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever ended this process, the test must say so
        (folder / f"error-{work.__name__}-{size}-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def main(folder: Path) -> None:
    killed = (killed_gpt2, killed_bert, killed_llama, killed_t5, killed_before_any_checkpoint)
    children = [fork(folder, work) for work in killed]
    for work in (trained, accelerated):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children += [fork(folder, work), *(fork(folder, work, rank, 2, port) for rank in range(2))]
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
