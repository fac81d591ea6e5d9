"""Membership inference against private and ordinary models: Tables 3 and 4 of DPSUR, with stronger attacks beside.

python -m benchmarks.audit one --task fashion --method dpsgd --epsilon 3 --seed 0
python -m benchmarks.audit every                # all of them; finished ones are skipped
python -m benchmarks.audit table                # what is finished, as Markdown

Every model is kept in the folder --models as soon as it is trained, so that a run that was killed goes on with the next
model. Results are in benchmarks/results/audit, a line per target. A run that --records shortens leaves none.

Data: training and test records together, divided at random 2:1:2:1. The shadow and all reference models are trained in
the way of the target, privately where it is private, which helps the attacker more than the ordinary shadow model of
the paper's code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Budget, Private, Recipe, recipes
from sordino.audit.membership import (
    Membership,
    Partition,
    black_box,
    lira,
    loss_threshold,
    references,
    rmia,
    signals,
    white_box,
)
from sordino.audit.membership.training import Train
from sordino.lab import data, networks
from sordino.lab.experiments.results import keep_lines, read_lines

app = typer.Typer(add_completion=False)
RESULTS = Path(__file__).parent / "results" / "audit"
EPSILONS, DELTA, SEEDS = (1.0, 2.0, 3.0, 4.0), 1e-5, (0, 1, 2)
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Records, network and settings of DPSUR; `noise` holds σ_t and σ_v by ε (docs/papers.md)."""

    source: str
    network: Callable[[str], nn.Module]
    batch_size: int
    lr: float
    noise: dict[float, tuple[float, float]]
    epochs: int = 100

    def examples(self, records: int | None) -> Split:
        """Training and test records together, in random order before they are shortened."""
        loaded = data.load(self.source)
        x, y = (torch.cat(pair) for pair in zip(loaded.train, loaded.test, strict=True))
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:records]
        return x[order], y[order]

    def recipe(self, method: str, epsilon: float, records: int) -> Recipe:
        """As many steps as ε pays for, with the paper's noise."""
        sigma, test_sigma = self.noise[epsilon]
        size = min(self.batch_size, records // 2)
        if method == "dpsur":
            recipe = recipes.dpsur(
                batch_size=size, noise_multiplier=sigma, validation_noise=test_sigma, validation_size=min(256, size)
            )
        else:
            recipe = recipes.dpsgd(batch_size=size, clip=0.1, noise_multiplier=sigma)
        return recipe.calibrate(Budget(epsilon, DELTA), records=records)


TASKS = {
    "fashion": Task(
        "fashion-mnist",
        networks.mnist_cnn,
        2048,
        4.0,
        {1.0: (4.0, 1.3), 2.0: (2.15, 1.3), 3.0: (2.15, 0.8), 4.0: (2.15, 0.8)},
    ),
    "cifar": Task(
        "cifar10",
        networks.cifar_cnn,
        8192,
        4.0,
        {1.0: (11.0, 1.3), 2.0: (9.0, 1.3), 3.0: (5.67, 1.1), 4.0: (5.67, 1.1)},
    ),
}


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainer(task: Task, method: str, epsilon: float) -> Train:
    """How the target, the shadow and the references are trained."""

    def train(examples: Split, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = task.network("tanh" if method == "dpsur" else "relu")
        if method == "none":
            _ordinary(model, examples, task.epochs)
            return model
        recipe = task.recipe(method, epsilon, len(examples[1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
        for _ in Private(model, optimizer, examples, losses, recipe).steps():
            pass
        return model

    return train


def _ordinary(model: nn.Module, examples: Split, epochs: int) -> None:
    """SGD without protection, by the settings of the paper's code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs // 2])
    for _ in range(epochs):
        for part in torch.randperm(len(examples[1])).split(128):
            optimizer.zero_grad()
            losses(model, (examples[0][part], examples[1][part])).mean().backward()
            optimizer.step()
        schedule.step()


def kept(train: Train, folder: Path) -> Train:
    """The same training, but a model that was trained before is read from `folder`."""

    def cached(examples: Split, seed: int) -> nn.Module:
        path = folder / f"{seed}.pt"
        if path.exists():
            model: nn.Module = torch.load(path, weights_only=False)
            return model
        started = time.monotonic()
        model = train(examples, seed)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
        print(f"{path}: {time.monotonic() - started:.0f} s", flush=True)
        return model

    return cached


def attacks(train: Train, examples: Split, seed: int, count: int) -> list[Membership]:
    """Every attack on one target; LiRA and RMIA by `count` reference models, without them where that is 0."""
    partition = Partition.of(len(examples[1]), seed)
    target = train(_rows(examples, partition.target_members), 10 * seed)
    shadow = train(_rows(examples, partition.shadow_members), 10 * seed + 1)
    found = [
        black_box(target, shadow, examples, partition),
        white_box(target, examples, partition, seed=seed),
        loss_threshold(target, examples, partition),
    ]
    return found + (_by_references(train, target, examples, partition, seed, count) if count else [])


def _by_references(
    train: Train, target: nn.Module, examples: Split, partition: Partition, seed: int, count: int
) -> list[Membership]:
    ours = torch.cat([partition.target_members, partition.target_others])
    members = (torch.arange(len(ours)) < len(partition.target_members)).numpy()
    known, strangers = _rows(examples, ours), _rows(examples, partition.shadow_others)
    found, trained = references(train, known, count, seed=seed + 1000)
    own = signals(target, known).confidences.numpy()
    apart = (
        signals(target, strangers).confidences.numpy(),
        np.stack([signals(model, strangers).confidences.numpy() for model in trained]),
    )
    made = []
    for online in (True, False):
        made.append(lira(own, members, found, online=online))
        made.append(rmia(own, members, found, apart, online=online))
    return made


def _rows(examples: Split, part: Tensor) -> Split:
    return examples[0][part], examples[1][part]


_Task = Annotated[str, typer.Option(help=", ".join(TASKS))]
_References = Annotated[int, typer.Option(help="Reference models for LiRA and RMIA; 0 leaves them out.")]
_Models = Annotated[Path, typer.Option("--models", help="Where trained models are kept.")]
KEPT = Path("/tmp/sordino-audit")


@app.command()
def one(
    task: _Task,
    method: Annotated[str, typer.Option(help="none, dpsgd or dpsur")],
    epsilon: float = 3.0,
    seed: int = 0,
    references: _References = 8,
    folder: _Models = KEPT,
    records: int | None = None,
) -> None:
    """One target model and every attack on it."""
    label = f"{task}-{method}" + ("" if method == "none" else f"-eps{epsilon:g}") + f"-seed{seed}"
    if any(result["label"] == label for result in read_lines(RESULTS / f"{task}.jsonl")):
        return
    chosen = TASKS[task]
    place = folder / (label + (f"-{records}-records" if records else ""))
    train = kept(trainer(chosen, method, epsilon), place)
    found = attacks(train, chosen.examples(records), seed, references)
    for attack in found:
        print(f"{label} {attack}", flush=True)
    if records is None:
        result: dict[str, Any] = {"label": label, "task": task, "method": method, "epsilon": epsilon, "seed": seed}
        result["attacks"] = [attack.to_dict() for attack in found]
        keep_lines(RESULTS / f"{task}.jsonl", result)


@app.command()
def every(task: _Task = "fashion", references: _References = 8, folder: _Models = KEPT) -> None:
    """Every method, ε and seed; finished ones are skipped."""
    targets = [("none", 0.0), *product(("dpsgd", "dpsur"), EPSILONS)]
    for seed, (method, epsilon) in product(SEEDS, targets):
        one(task, method, epsilon, seed, references, folder)


@app.command()
def table(task: _Task = "fashion") -> None:
    """Accuracy, AUC and true positives at 0.1 % false ones, the mean over seeds, as Markdown."""
    rows: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for result in read_lines(RESULTS / f"{task}.jsonl"):
        for attack in result["attacks"]:
            rows.setdefault((attack["attack"], result["method"], result["epsilon"]), []).append(attack)
    print("| attack | method | ε | seeds | accuracy | AUC | TPR at 0.1 % FPR |\n|---|---|---|---|---|---|---|")
    for (attack, method, epsilon), found in sorted(rows.items()):
        spent = "∞" if method == "none" else f"{epsilon:g}"
        cells = [_mean(found, "accuracy"), _mean(found, "auc"), _mean([f["caught"] for f in found], "0.001")]
        print(f"| {attack} | {method} | {spent} | {len(found)} | {' | '.join(cells)} |")


def _mean(found: list[dict[str, Any]], key: str) -> str:
    """The mean over seeds, and half the widest interval of one of them."""
    reach = max((one[key]["high"] - one[key]["low"]) / 2 for one in found)
    return f"{np.mean([one[key]['value'] for one in found]):.3f} ± {reach:.3f}"


if __name__ == "__main__":
    app()
