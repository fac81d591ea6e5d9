"""Small trainings as users write them, each of which goes on from its run folder when it is started again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino import Budget, Private, Recipe, recipes
from sordino.errors import BudgetExhausted
from tests.faults.child import Said, sordino
from tests.helpers import classification, cross_entropy, mlp

BUDGET = Budget(epsilon=4, delta=1e-5)
STEPS = 24
SAVE_EVERY = 3


class Refused(Exception):
    """A training that could not be started or gone on with."""


@cache
def recipe(name: str) -> Recipe:
    if name == "dpis":
        return recipes.dpis(batch_size=16, epochs=2).calibrate(BUDGET, records=192)
    tested = {} if name == "dpsgd" else {"validation_size": 16}
    chosen: Recipe = getattr(recipes, name)(batch_size=16, steps=STEPS, **tested)
    return chosen.calibrate(BUDGET, records=192)


def bind(name: str, **options: Any) -> Private:
    """A small model and its records, bound to one of the recipes."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Private(model, optimizer, classification(192), cross_entropy, recipe(name), validate=False, **options)


def steps(name: str) -> Callable[[Path], None]:
    """The loop of the README."""

    def train(folder: Path) -> None:
        private = bind(name)
        private.resume(folder / "run")
        for step in private.steps():
            if step.number % SAVE_EVERY == 0:
                private.save()
        private.save()
        private.close()

    return train


def loader(folder: Path) -> None:
    """A loop of the user's own."""
    private = bind("dpsgd")
    private.resume(folder / "run")
    model, optimizer = private.bench.objective.model, private.bench.optimizer
    try:
        for number, batch in enumerate(private.loader()):
            optimizer.zero_grad()
            private.backward(cross_entropy(model, batch))
            optimizer.step()
            if number % SAVE_EVERY == 0:
                private.save()
    except BudgetExhausted:
        pass
    private.save()
    private.close()


def command(*start: object) -> Callable[[Path], None]:
    """`sordino train`, and `sordino resume` where there is a run; then `train` again, should `resume` refuse."""

    def train(folder: Path) -> None:
        run = folder / "run"
        begin = ["train", *start, "--run", run, "--save-every", SAVE_EVERY, "--json"]
        tries = [["resume", run, "--json"], begin] if (run / "ledger.sqlite").exists() else [begin]
        said: list[Said] = []
        for words in tries:
            said.append(sordino(*words))
            if said[-1].traceback:
                raise RuntimeError(said[-1].traceback)
            if said[-1].code == 0:
                return
        raise Refused("; ".join(answer.complaint for answer in said))

    return train


def table(path: Path) -> Path:
    """Records whose ranges and classes have to be released before training."""
    generator = np.random.default_rng(0)
    age, dose = generator.uniform(0, 90, 1500), generator.uniform(0, 5, 1500)
    outcome = np.where(age + 10 * dose > 70, "yes", "no")
    rows = [f"{a:.1f},{d:.2f},{o}" for a, d, o in zip(age, dose, outcome, strict=True)]
    path.write_text("\n".join(["age,dose,outcome", *rows]) + "\n")
    return path


def trainings(place: Path) -> dict[str, Callable[[Path], None]]:
    """Every training, by a name that says what it is; `place` is where its records lie."""
    records = table(place / "patients.csv")
    small = ["--steps", STEPS, "--epsilon", BUDGET.epsilon, "--delta", BUDGET.delta]
    return {
        "Python loop, DP-SGD": steps("dpsgd"),
        "`sordino train`, table with preparation": command(
            *("--data", records, "--target", "outcome", "--batch-size", 128), *small
        ),
        "Python loop, DPSUR": steps("dpsur"),
        "Python loop, DPIS": steps("dpis"),
        "`sordino train`, digits": command("--data", "digits", "--batch-size", 64, *small),
        "Python loop, own optimizer steps": loader,
        "Python loop, DPAGD": steps("dpagd"),
    }
