"""Every recipe that Sordino has can be searched, or is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from sordino import Budget, Private, recipes, tune
from sordino.errors import InvalidInput
from sordino.searching import Candidate, search

RECORDS, HELD = 64, 16
INPUTS = torch.randn(RECORDS + HELD, 3, generator=torch.Generator().manual_seed(1))
CLASSES = (INPUTS[:, 0] > 0).long()
BUDGET = Budget(8.0, 1e-3)
REFUSED: dict[str, str] = {}
"""Recipes that no search takes, and the words that say why."""


WISHES: dict[str, dict[str, Any]] = {
    "banded": {"bands": 2},
    "dpagd": {"choice_epsilon": 1.0, "validation_size": 8},
    "dpsur": {"validation_size": 8},
    "jl": {"projections": 24},
    "noise_decay": {"epochs": 0.5, "steps": None},
    "screening": {"public": (INPUTS[:2], CLASSES[:2]), "public_name": "two of them"},
}
"""What a recipe needs beside its defaults on so few records."""


def make_recipe(name: str) -> Any:
    wishes = {"batch_size": 16, "steps": 2, **WISHES.get(name, {})}
    return getattr(recipes, name)(**{key: value for key, value in wishes.items() if value is not None})


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_count", lambda cost, source: 2)


LONG = ("dpagd", "dynamic", "jl")
"""Recipes whose prices take seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in recipes.__all__]
)
def test_every_recipe_is_searched_or_refused_with_a_reason(name: str) -> None:
    like = make_recipe(name)

    def objective(trial: Candidate) -> Private:
        model = nn.Linear(3, 2)
        wanted = replace(like, optimizer=replace(like.optimizer, lr=trial["lr"]))
        recipe = trial.calibrate(wanted, records=RECORDS)
        private = Private(
            *(model, recipe.optimizer.build(model.parameters()), TensorDataset(INPUTS[:RECORDS], CLASSES[:RECORDS])),
            lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
            recipe,
        )
        for _ in private.steps():
            pass
        with torch.no_grad():
            trial.score(model(INPUTS[RECORDS:]).argmax(1) == CLASSES[RECORDS:])
        return private

    def run() -> Any:
        return tune(
            *(objective, {"lr": [0.1, 0.2]}, BUDGET), expected_trials=3, like=like, records=RECORDS, way="selection"
        )

    if name in REFUSED:
        with pytest.raises(InvalidInput, match=REFUSED[name]):
            run()
        return
    winner = run()
    assert 7.9 < winner.guarantee.epsilon <= 8.0
    assert winner.guarantee.basis == "proven"
    assert winner.settings["lr"] in (0.1, 0.2)
