"""Small models, data and oracles that many tests share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Budget, Private, Recipe, recipes, validation
from sordino.gradients import Batch, Objective
from sordino.validation import require_valid


def classification(records: int = 64, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, features, generator=generator)
    return x, (x @ torch.randn(features, classes, generator=generator)).argmax(1)


def mlp(features: int = 6, classes: int = 3, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def calibrated(records: int = 64, **changes: Any) -> Recipe:
    options = {"batch_size": 16, "steps": 10, "noise_multiplier": 1.0, **changes}
    return recipes.dpsgd(**options).for_records(records)


def budgeted(records: int = 64, epsilon: float = 2.0, **changes: Any) -> Recipe:
    options = {"batch_size": 16, "steps": 10, **changes}
    return recipes.dpsgd(**options).calibrate(Budget(epsilon=epsilon, delta=1e-5), records=records)


def private(recipe: Recipe | None = None, *, lr: float = 0.1, **options: Any) -> Private:
    plain = options.keys() <= {"optimizer", "run", "seed", "source", "engine", "validate", "ledger", "vault"}
    model = options.pop("model", None) or mlp()
    dataset = options.pop("dataset") if "dataset" in options else classification()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    options.setdefault("loss", cross_entropy)
    options.setdefault("seed", 1 if options.get("vault") is None else None)  # a vault refuses repeatable noise
    with patch.object(validation, "require_valid", require_valid_once) if plain else nullcontext():
        return Private(model, optimizer, dataset, recipe=recipe or calibrated(), **options)


def require_valid_once(objective: Objective, *rest: Any) -> Any:
    """What the probe says of the model, data and loss that most tests have, asked once in a process for each mode.

    A probe takes a tenth of a second, and hundreds of tests bind them only to look at something else.
    """
    modes = tuple(module.training for module in objective.model.modules())
    if modes not in _PROBED:
        _PROBED[modes] = require_valid(objective, *rest)
    return _PROBED[modes]


_PROBED: dict[tuple[bool, ...], Any] = {}


def batch_of(*tensors: Tensor) -> Batch:
    data = tensors if len(tensors) > 1 else tensors[0]
    return Batch(data, len(tensors[0]), lambda i: tuple(t[i : i + 1] for t in tensors))


def loop_oracle(objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[list[Tensor]]:
    """Per-example gradients by the plainest possible loop, independent of every engine."""
    rows = []
    for i in range(batch.size):
        single = tuple(t[i : i + 1] for t in batch.data)
        gradients = torch.autograd.grad(objective.loss(objective.model, single).sum(), parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)])
    return rows


def oracle_norms(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.sqrt(sum(g.double().square().sum() for g in row)) for row in rows])


def oracle_sum(rows: list[list[Tensor]], weights: Tensor) -> list[Tensor]:
    return [
        sum(w * row[k].double() for w, row in zip(weights.double(), rows, strict=True)) for k in range(len(rows[0]))
    ]


def train_in_both_loops(recipe: Recipe) -> list[Tensor]:
    """All weights after `private.steps()`, and after a loop of the user's own, with the same seed."""
    trained = []
    for own in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with private(recipe, model=model, optimizer=optimizer, seed=4) as run:
            if own:
                for batch in run.loader():
                    optimizer.zero_grad()
                    run.backward(cross_entropy(model, batch))
                    optimizer.step()
            else:
                list(run.steps())
            assert run.position == recipe.steps
        trained.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return trained
