"""Whether there are enough records: the estimate against runs that really learn, or do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import TensorDataset

from sordino import Budget, Private, recipes
from sordino.cli.session import compute_losses, measure
from sordino.tables import defaults

FEATURES = 20


def recipe(records: int, epsilon: float):
    shaped = recipes.dpsgd(batch_size=records // 4, steps=60)
    return shaped.calibrate(Budget(epsilon=epsilon, delta=1e-5), records=records)


def learnt(records: int, epsilon: float) -> tuple[float, str | None]:
    """Accuracy on two clouds of points that any model can tell apart, and the verdict beforehand."""
    torch.manual_seed(0)
    shift = torch.ones(FEATURES) / math.sqrt(FEATURES)
    y = torch.arange(records + 500) % 2
    x = torch.randn(records + 500, FEATURES) + 2 * shift * (2 * y[:, None] - 1)
    model = torch.nn.Linear(FEATURES, 2)
    chosen = recipe(records, epsilon)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(x[:records], y[:records])
    with Private(model, optimizer, data, compute_losses, chosen, seed=1) as private:
        for _ in private.steps():
            pass
    said = defaults.judge_size(chosen, sum(p.numel() for p in model.parameters()))
    return measure(model, (x[records:], y[records:]))[0], said


def test_enough_records_learn_and_are_not_warned_about():
    reached, said = learnt(1000, 2.0)
    assert said is None
    assert reached > 0.9


def test_too_few_records_do_not_learn_and_are_warned_about():
    reached, said = learnt(100, 0.05)
    assert reached < 0.8
    assert said.startswith("100 records are too few for epsilon 0.05 with 42 parameters: the noise will be about")


def test_the_way_out_is_a_way_out():
    """At the number of records that the sentence names, and at its ε, the estimate is 1 or more."""
    few = recipe(100, 0.2)
    said = defaults.judge_size(few, 42)
    words = said.split()
    records = int(words[words.index("records", 5) - 1].replace(",", ""))
    epsilon = float(said.split(" or epsilon ")[1].split(",")[0])
    assert defaults.estimate_signal_to_noise(recipe(records, 0.2), 42) == pytest.approx(1, rel=0.2)
    assert defaults.estimate_signal_to_noise(recipe(100, epsilon), 42) == pytest.approx(1, rel=0.2)
    assert defaults.estimate_signal_to_noise(few, 42) < 0.8


def test_without_a_budget_there_is_nothing_to_say():
    free = recipes.dpsgd(batch_size=2, steps=3, noise_multiplier=50.0).for_records(10)
    assert defaults.judge_size(free, 1000) is None
