"""What the rules claim of people who look and then choose, computed: the filter holds, other prices do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from sordino import Budget
from sordino.accounting.events import GaussianDpEvent, count_alike
from sordino.errors import InvalidInput
from sordino.vault.composing import BudgetRule

DELTA = 1e-5
FIRST = 2.0
SECOND = np.geomspace(1_000, 0.3, 40)
"""The noise of the first run, and those among which the second run's is chosen after looking at the first."""


def attain(epsilon_of: dict[float, float]) -> float:
    """The largest Σ(P − e^ε̂·Q)₊ when the second noise is chosen for each outcome of the first to attain most.

    The loss of a Gaussian release with noise σ is normal, with variance 1/σ² and half of that as its mean.
    """
    spread = 1 / FIRST
    losses = np.linspace(spread**2 / 2 - 12 * spread, spread**2 / 2 + 12 * spread, 40_001)
    density = norm.pdf(losses, spread**2 / 2, spread)
    best = np.zeros_like(losses)
    for sigma, epsilon in epsilon_of.items():
        gap, s = epsilon - losses, 1 / sigma
        excess = norm.cdf((s**2 / 2 - gap) / s) - np.exp(gap + norm.logcdf((-gap - s**2 / 2) / s))
        best = np.maximum(best, excess)
    return float(np.trapezoid(density * best, losses))


def test_the_filter_holds_against_who_chooses_after_looking_and_the_price_of_what_happened_does_not() -> None:
    rule = BudgetRule.choose(Budget(8, DELTA))
    held = {sigma: count_alike([(GaussianDpEvent(FIRST), 1), (GaussianDpEvent(sigma), 1)]) for sigma in SECOND}
    assert attain({sigma: rule.price(events) for sigma, events in held.items()}) <= DELTA
    assert attain({sigma: rule.price_if_planned(events) for sigma, events in held.items()}) > 1.5 * DELTA


def test_a_conversion_that_is_too_small_would_be_caught() -> None:
    """The same computation with half of what the conversion adds: the check can fail."""
    rule = BudgetRule.choose(Budget(8, DELTA))
    assert rule.limit is not None
    added = rule.budget.epsilon - rule.limit
    wrong = {
        sigma: rule.price(count_alike([(GaussianDpEvent(FIRST), 1), (GaussianDpEvent(sigma), 1)])) - added / 2
        for sigma in SECOND
    }
    assert attain(wrong) > DELTA


def test_what_fills_the_limit_costs_the_budget() -> None:
    rule = BudgetRule.choose(Budget(3, DELTA))
    assert rule.limit is not None
    assert rule.order is not None
    noise = math.sqrt(rule.order / 2 / rule.limit)
    full, over = count_alike([(GaussianDpEvent(noise * 1.0001), 1)]), count_alike([(GaussianDpEvent(noise * 0.99), 1)])
    assert rule.allows(full)
    assert rule.price(full) == pytest.approx(3, rel=1e-3)
    assert not rule.allows(over)


@pytest.mark.parametrize(
    ("composition", "order"), [("sum", None), ("planned", 4.0), ("adaptive", 1.0), ("adaptive", 1.01)]
)
def test_rules_that_cannot_be_are_refused(composition: str, order: float | None) -> None:
    with pytest.raises(InvalidInput):
        BudgetRule.choose(Budget(1, DELTA), composition, order)
