"""A budget refuses before, not after: planned events pass unpriced, others are priced with everything spent."""

from __future__ import annotations

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent

from sordino import Budget, BudgetExhausted
from sordino.accounting import pricing
from sordino.accounting.allowance import Planned

STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
BUDGET = Budget(pricing.epsilon([(STEP, 10)], 1e-5) * 1.0001, 1e-5)


def allowed(allowance: Planned, event: object) -> int:
    """How many times in a row `event` may be charged."""
    count = 0
    while count < 50:
        try:
            allowance.require(event)
        except BudgetExhausted:
            break
        count += 1
    return count


def test_exactly_the_affordable_part_of_the_plan_passes() -> None:
    assert allowed(Planned(BUDGET, [], [(STEP, 30)]), STEP) == 10
    assert allowed(Planned(BUDGET, [(STEP, 4)], [(STEP, 30)]), STEP) == 6
    assert allowed(Planned(BUDGET, [(STEP, 11)], [(STEP, 30)]), STEP) == 0


def test_events_without_a_plan_are_priced_one_by_one() -> None:
    assert allowed(Planned(BUDGET, [], []), STEP) == 10


def test_an_unplanned_event_takes_its_share_of_what_was_planned() -> None:
    allowance = Planned(BUDGET, [], [(STEP, 10)])
    allowance.require(GaussianDpEvent(8.0))
    rest = allowed(allowance, STEP)
    assert rest < 10
    assert BUDGET.allows([(GaussianDpEvent(8.0), 1), (STEP, rest)])
    assert not BUDGET.allows([(GaussianDpEvent(8.0), 1), (STEP, rest + 1)])


def test_events_that_cannot_be_hashed_are_told_apart() -> None:
    pair = ComposedDpEvent([GaussianDpEvent(30.0), GaussianDpEvent(40.0)])
    allowance = Planned(BUDGET, [], [(pair, 3)])
    allowance.require(pair)
    allowance.require(pair)
    with pytest.raises(BudgetExhausted, match="2 events are spent"):
        allowance.require(GaussianDpEvent(0.05))
