"""Budgets: what they refuse to be, how much of a plan they pay, and that they refuse before a release, not after."""

from __future__ import annotations

import math

import pytest
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import pricing
from sordino.accounting.budget import Budget, Prepaid, affordable
from sordino.accounting.pricing import epsilon
from sordino.errors import BudgetExhausted, InvalidInput

STEP = PoissonSampledDpEvent(0.02, GaussianDpEvent(2.0))
TEST = GaussianDpEvent(30.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": -1e-5},
        {"delta": math.nan},
        {"accountant": "guess"},
        {"adjacency": "replace-all"},
    ],
)
def test_refuses_what_is_no_budget(bad: dict[str, float | str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Budget(**{"epsilon": 1.0, "delta": 1e-5, **bad})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert next(iter(bad)) in str(caught.value)


def test_prices_with_its_own_accountant_and_adjacency() -> None:
    events = [(STEP, 100)]
    assert Budget(1.0, 1e-5).price(events) == epsilon(events, 1e-5)
    assert Budget(1.0, 1e-5, "rdp").price(events) == epsilon(events, 1e-5, "rdp")
    assert Budget(1.0, 1e-5, "pld", "replace-one").price(events) == epsilon(events, 1e-5, adjacency="replace-one")


@pytest.mark.parametrize("limit", [0.15, 0.5, 1.0])
def test_affordable_is_the_largest_prefix(limit: float) -> None:
    budget, spent = Budget(limit, 1e-5), [(TEST, 1)]
    fits = affordable(budget, spent, [(STEP, 5_000)])
    assert 0 < fits < 5_000
    assert budget.allows([*spent, (STEP, fits)])
    assert not budget.allows([*spent, (STEP, fits + 1)])


def test_affordable_respects_the_order_and_mixes_runs_with_single_events() -> None:
    budget = Budget(0.8, 1e-5)
    plan: list[DpEvent | tuple[DpEvent, int]] = [TEST, (STEP, 300), TEST, NonPrivateDpEvent(), (STEP, 10)]
    assert affordable(budget, [], plan) == 302
    assert affordable(budget, [], [*plan[:3], (STEP, 10)]) == 312
    assert affordable(budget, [], [NonPrivateDpEvent(), STEP]) == 0


def test_affordable_at_the_edges() -> None:
    budget = Budget(0.5, 1e-5)
    assert affordable(budget, [], []) == 0
    assert affordable(budget, [], [(STEP, 0)]) == 0
    assert affordable(budget, [(NonPrivateDpEvent(), 1)], [STEP]) == 0
    assert affordable(budget, [(STEP, 100_000)], [(STEP, 5)]) == 0


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([STEP, TEST]), st.integers(0, 60)), max_size=5), st.floats(0.05, 0.6))
def test_affordable_equals_counting_one_by_one(runs: list[tuple[DpEvent, int]], limit: float) -> None:
    budget = Budget(limit, 1e-5, "rdp")
    singles = [event for event, count in runs for _ in range(count)]
    expected = 0
    while expected < len(singles) and budget.allows([(event, 1) for event in singles[: expected + 1]]):
        expected += 1
    assert affordable(budget, [], runs) == expected
    assert affordable(budget, [], singles) == expected


def test_one_pricing_when_everything_fits() -> None:
    asked = []

    class Counting(Budget):
        def allows(self, events):  # type: ignore[no-untyped-def]
            asked.append(events)
            return super().allows(events)

    assert affordable(Counting(3.0, 1e-5), [], [(STEP, 1_000)]) == 1_000
    assert len(asked) == 1
    assert affordable(Counting(0.5, 1e-5), [], [(STEP, 10_000)]) < 10_000
    assert len(asked) <= 17


ONE_OF_TEN = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
BUDGET = Budget(pricing.epsilon([(ONE_OF_TEN, 10)], 1e-5) * 1.0001, 1e-5)


def allowed(allowance: Prepaid, event: object) -> int:
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
    assert allowed(Prepaid(BUDGET, [], [(ONE_OF_TEN, 30)]), ONE_OF_TEN) == 10
    assert allowed(Prepaid(BUDGET, [(ONE_OF_TEN, 4)], [(ONE_OF_TEN, 30)]), ONE_OF_TEN) == 6
    assert allowed(Prepaid(BUDGET, [(ONE_OF_TEN, 11)], [(ONE_OF_TEN, 30)]), ONE_OF_TEN) == 0


def test_events_without_a_plan_are_priced_one_by_one() -> None:
    assert allowed(Prepaid(BUDGET, [], []), ONE_OF_TEN) == 10


def test_an_unplanned_event_takes_its_share_of_what_was_planned() -> None:
    allowance = Prepaid(BUDGET, [], [(ONE_OF_TEN, 10)])
    allowance.require(GaussianDpEvent(8.0))
    rest = allowed(allowance, ONE_OF_TEN)
    assert rest < 10
    assert BUDGET.allows([(GaussianDpEvent(8.0), 1), (ONE_OF_TEN, rest)])
    assert not BUDGET.allows([(GaussianDpEvent(8.0), 1), (ONE_OF_TEN, rest + 1)])


def test_events_that_cannot_be_hashed_are_told_apart() -> None:
    pair = ComposedDpEvent([GaussianDpEvent(30.0), GaussianDpEvent(40.0)])
    allowance = Prepaid(BUDGET, [], [(pair, 3)])
    allowance.require(pair)
    allowance.require(pair)
    with pytest.raises(BudgetExhausted, match="2 events are spent"):
        allowance.require(GaussianDpEvent(0.05))
