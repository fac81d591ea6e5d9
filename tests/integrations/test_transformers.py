"""PrivateTrainer, against the real transformers and PEFT: steps, prices, refusals, checkpoints, logs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino import Budget, recipes
from sordino.recipe import Recipe

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
from sordino.integrations.transformers import PrivateTrainer  # noqa: E402
from tests.finetuning.models import KINDS, RECORDS, Texts, adapt, build, collate  # noqa: E402

CLIP, RATE = 0.5, 0.8
BUDGET = Budget(epsilon=3, delta=1e-3)


def arguments(folder: Path, **settings: Any) -> Any:
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    return transformers.TrainingArguments(str(folder), **{**quiet, **settings})


def whole_batch(**settings: Any) -> Recipe:
    """Everybody joins, and the noise is too small to be seen."""
    return recipes.dpsgd(**{"batch_size": RECORDS, "steps": 1, "clip": CLIP, "noise_multiplier": 1e-9, **settings})


def make(model: nn.Module, kind: str, folder: Path, **settings: Any) -> Any:
    ours = {name: settings.pop(name) for name in ("recipe", "budget", "options", "loss", "unit") if name in settings}
    dataset = settings.pop("train_dataset", None) or Texts(kind)
    more = {name: settings.pop(name) for name in ("optimizers", "eval_dataset", "callbacks") if name in settings}
    plain = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "per_device_train_batch_size": 5}
    args = arguments(folder, **{**plain, **settings})
    return PrivateTrainer(model=model, args=args, train_dataset=dataset, data_collator=collate, **ours, **more)


def loop(model: nn.Module, kind: str, clip: float = CLIP) -> dict[str, Tensor]:
    """A step over single examples by the model's own loss, each clipped by itself; what the parameters are then."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for item in Texts(kind):
        loss = model(**collate([item])).loss
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        found = {name: g for name, g in zip(trained, grads, strict=True) if g is not None}
        norm = torch.stack([g.norm() for g in found.values()]).norm()
        for name, grad in found.items():
            sums[name] += grad * (clip / norm).clamp(max=1.0)
    return {name: p.detach() - RATE * sums[name] / RECORDS for name, p in trained.items()}


WAYS = [(kind, way) for kind in KINDS for way in ("full", "lora")]
WAYS += [("gpt2", way) for way in ("dora", "ia3", "prompt", "prefix")] + [("t5", "prompt"), ("bert", "prompt")]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_a_step_is_that_of_a_loop_over_single_examples(kind: str, way: str, tmp_path: Path) -> None:
    model = build(kind) if way == "full" else adapt(build(kind), kind, way)
    if way == "lora":  # the second factor begins at zero, and with it the first one's gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    twin = copy.deepcopy(model)
    make(model, kind, tmp_path, recipe=whole_batch()).train()
    wanted = loop(twin, kind)
    moves = []
    for name, parameter in model.named_parameters():
        before = twin.get_parameter(name)
        expected = wanted.get(name, before)
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        moves.append(float((expected - before).abs().max().detach()))
    assert max(moves) > 1e-3
    assert sum(move > 0 for move in moves) == len(wanted)
