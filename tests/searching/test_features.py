"""A search on features: made once, before the search, and the same for every trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from sordino import Budget, Private, recipes, tune
from sordino.lab.features import scatter
from sordino.lab.features.synthetic import scale_to_unit
from sordino.searching import Candidate, search

RECORDS = 48


def test_a_linear_head_is_searched_on_scattering_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_count", lambda cost, source: 2)
    chance = torch.Generator().manual_seed(0)
    classes = torch.arange(64) % 2
    images = torch.rand(64, 1, 8, 8, generator=chance) + classes[:, None, None, None] * torch.linspace(0, 2, 8)
    rows = scale_to_unit(scatter(images, groups=27, folder=tmp_path, quiet=True).flatten(1))
    train_set = TensorDataset(rows[:RECORDS], classes[:RECORDS])

    def objective(trial: Candidate) -> Private:
        model = nn.Linear(rows.shape[1], 2)
        recipe = trial.calibrate(recipes.dpsgd(batch_size=16, steps=2, lr=trial["lr"]))
        private = Private(
            *(model, recipe.optimizer.build(model.parameters()), train_set),
            lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
            recipe,
        )
        for _ in private.steps():
            pass
        with torch.no_grad():
            trial.score(model(rows[RECORDS:]).argmax(1) == classes[RECORDS:])
        return private

    like = recipes.dpsgd(batch_size=16, steps=2)
    winner = tune(
        objective, {"lr": [1.0, 4.0]}, Budget(8, 1e-3), expected_trials=3, way="selection", like=like, records=RECORDS
    )
    assert 7.9 < winner.guarantee.epsilon <= 8
    nn.Linear(rows.shape[1], 2).load_state_dict(winner.model)
    assert len(list(tmp_path.glob("*.npy"))) == 1
