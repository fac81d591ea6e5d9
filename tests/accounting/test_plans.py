"""Stopping after a look, and runs chosen after earlier ones: what is claimed, and what somebody attains."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from scipy.special import log_ndtr, ndtr

from sordino.accounting import plans
from sordino.accounting.budget import Budget
from sordino.accounting.filtered import Filter
from sordino.accounting.gaussian import gaussian_epsilon
from sordino.accounting.grids import Array
from sordino.accounting.ledger import Ledger
from sordino.accounting.plans import Plan
from sordino.accounting.pricing import epsilon
from sordino.errors import LedgerError

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
OTHER = PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0))


def _spend(ledger: Ledger, event: DpEvent, times: int) -> None:
    for _ in range(times):
        ledger.charge(event)


def _bill(ledger: Ledger, *, in_advance: bool = False) -> plans.Bill:
    return plans.bill_ledger(ledger, stopped_in_advance=in_advance)


# -- stopping -------------------------------------------------------------------------------------------------------


def _attained(claims: Array, noise: float) -> float:
    """The most that somebody attains of ∫(P − e^claim Q)₊ by choosing when to stop: claims[t] is printed then.

    With the record the loss is a walk of steps N(s²/2, s²), s = 1/σ; stopping at loss l is worth (1 − e^(claim − l))₊.
    Backwards from the last step: the better of stopping and of what going on is worth, on a grid of losses.
    """
    drift, width = 1 / (2 * noise**2), 0.01
    spread = math.sqrt(noise**-2 - width**2 / 12)  # the grid adds the rest of the variance
    losses = np.arange(-6.0, 14.0, width)
    reach = np.arange(-round(6 * spread / width), round(6 * spread / width) + 1) * width
    kernel = np.diff(ndtr((np.append(reach - width / 2, reach[-1] + width / 2) - drift) / spread))
    worth = np.zeros(len(losses))
    for claim in claims[::-1]:
        stopped = -np.expm1(np.minimum(claim - losses, 0.0))
        worth = np.maximum(stopped, np.convolve(worth, kernel[::-1], mode="same"))
    return float(worth[np.argmin(np.abs(losses))])


def test_stopping_when_it_pays_breaks_the_price_of_the_prefix_and_not_that_of_the_plan() -> None:
    """q = 1, σ = 30, at most 2,000 steps: the ε of the prefix is exceeded many times as often as δ allows."""
    noise, steps = 30.0, 2_000
    prefixes = np.array([gaussian_epsilon(math.sqrt(t) / noise, DELTA) for t in range(1, steps + 1)])
    event, ledger = GaussianDpEvent(noise), Ledger.in_memory()
    plans.declare(ledger, Plan(((event, steps),)))
    _spend(ledger, event, 20)
    planned, so_far = _bill(ledger).epsilon(DELTA), _bill(ledger, in_advance=True).epsilon(DELTA)
    assert so_far == pytest.approx(prefixes[19], rel=1e-3)
    assert planned == pytest.approx(prefixes[-1], rel=1e-3)
    assert _attained(prefixes, noise) > 10 * DELTA
    assert _attained(np.full(steps, planned), noise) <= 1.01 * DELTA  # the grid is right to a per cent


def test_a_run_is_priced_by_its_plan_from_the_first_event_to_the_last() -> None:
    ledger = Ledger.in_memory()
    assert _bill(ledger).epsilon(DELTA) == 0
    plans.announce(ledger, "recipe", [(STEP, 100)])
    assert _bill(ledger).epsilon(DELTA) == 0, "nothing was released"
    whole = epsilon([(STEP, 100)], DELTA)
    _spend(ledger, STEP, 40)
    assert _bill(ledger).epsilon(DELTA) == whole
    assert "40 of 100" in _bill(ledger).notes[0]
    assert _bill(ledger, in_advance=True).epsilon(DELTA) == epsilon([(STEP, 40)], DELTA)
    assert _bill(ledger, in_advance=True).notes == (plans.IN_ADVANCE,)
    _spend(ledger, STEP, 60)
    assert _bill(ledger).epsilon(DELTA) == whole
    assert _bill(ledger).notes == ()
    _spend(ledger, OTHER, 5)
    assert _bill(ledger).epsilon(DELTA) == epsilon([(STEP, 100), (OTHER, 5)], DELTA), "what was not planned is added"
    assert "5 events were charged beyond" in _bill(ledger).notes[-1]


def test_a_ledger_without_a_plan_says_so() -> None:
    ledger = Ledger.in_memory()
    _spend(ledger, STEP, 3)
    assert _bill(ledger).notes == (plans.UNPLANNED,)


def test_work_repeated_after_a_crash_replaces_the_plan_and_stays_within_the_budget() -> None:
    budget = Budget(epsilon([(STEP, 100), (OTHER, 10)], DELTA) * 1.001, DELTA)
    ledger = Ledger.in_memory()
    plans.announce(ledger, "recipe", [(STEP, 100), (OTHER, 10)], budget=budget)
    _spend(ledger, STEP, 60)  # 10 of them were lost
    plans.announce(ledger, "recipe", [(STEP, 41)], budget=budget, resumed=True)
    assert _bill(ledger).epsilon(DELTA) == budget.epsilon, (
        "how often it crashes may react to releases: all that the budget lets pass is priced"
    )
    assert "1 events were charged beyond" in _bill(ledger).notes[-1]
    plans.announce(ledger, "recipe", [(STEP, 41)], budget=budget, resumed=True)
    assert len(ledger.declared("plan")) == 2, "the same again is no new plan"


def test_an_unreadable_plan_is_one_line() -> None:
    for text in (
        "{",
        "[]",
        '{"events": 3}',
        '{"after":-1,"before":0,"budget":null,"events":[],"recipe":"","replaces":0}',
    ):
        ledger = Ledger.in_memory()
        ledger.declare("plan", text)
        with pytest.raises(LedgerError, match="unreadable plan"):
            plans.declared(ledger)


# -- several runs ---------------------------------------------------------------------------------------------------


def test_plans_declared_before_the_first_event_are_one_and_later_ones_are_stages() -> None:
    together, apart = Ledger.in_memory(), Ledger.in_memory()
    for ledger in (together, apart):
        plans.announce(ledger, "first", [(STEP, 100)])
    plans.announce(together, "second", [(OTHER, 100)])
    for ledger in (together, apart):
        _spend(ledger, STEP, 100)
    plans.announce(apart, "second", [(OTHER, 100)])
    for ledger in (together, apart):
        _spend(ledger, OTHER, 100)
    assert _bill(together).epsilon(DELTA) == epsilon([(STEP, 100), (OTHER, 100)], DELTA)
    staged = epsilon([(STEP, 100)], DELTA / 2) + epsilon([(OTHER, 100)], DELTA / 4)
    assert _bill(apart).epsilon(DELTA) == pytest.approx(staged)
    assert "2 stages" in _bill(apart).notes[-1]
    assert not _bill(together).notes


def test_the_same_run_twice_is_two_plans() -> None:
    ledger = Ledger.in_memory()
    for _ in range(2):
        plans.announce(ledger, "recipe", [(STEP, 10)])
        _spend(ledger, STEP, 10)
    expected = epsilon([(STEP, 10)], DELTA / 2) + epsilon([(STEP, 10)], DELTA / 4)
    assert _bill(ledger).epsilon(DELTA) == pytest.approx(expected)


def test_releases_and_training_declared_together_are_one_plan() -> None:
    ledger, before = Ledger.in_memory(), GaussianDpEvent(20.0)
    plans.declare(ledger, Plan(((before, 3), (STEP, 10)), 0, "recipe", before=3))
    _spend(ledger, before, 1)  # the others turned out not to be needed: an outcome of the first
    plans.announce(ledger, "recipe", [(STEP, 10)])
    _spend(ledger, STEP, 10)
    assert len(plans.declared(ledger)) == 1
    assert _bill(ledger).epsilon(DELTA) == epsilon([(before, 3), (STEP, 10)], DELTA)


def test_a_later_run_gets_what_the_budget_leaves() -> None:
    budget, ledger = Budget(2.0, DELTA), Ledger.in_memory()
    _spend(ledger, GaussianDpEvent(8.0), 1)
    left, spent = plans.room(ledger, "recipe", budget)
    assert spent == ()
    assert left.delta == DELTA / 4
    assert left.epsilon == pytest.approx(2.0 - epsilon([(GaussianDpEvent(8.0), 1)], DELTA / 2))
    plans.announce(ledger, "recipe", [(STEP, 7)], budget=budget)
    _spend(ledger, STEP, 5)
    again, spent = plans.room(ledger, "recipe", budget, resumed=True)
    assert (again, list(spent)) == (left, [(STEP, 5)])


def _two_runs(first: float, menu: tuple[float, ...]) -> tuple[float, float]:
    """What an analyst attains against the price of the union of what happened, and against that of stages.

    The first run releases N(0 or 1, σ²). After its loss is known the analyst picks the noise of the second from `menu`:
    hardly any second run where the first has found the record, a large one where a large one still may.
    """

    def price(*noises: float, delta: float = DELTA) -> float:
        return gaussian_epsilon(math.sqrt(sum(noise**-2 for noise in noises)), delta)

    union = {noise: price(first, noise) for noise in menu}
    stages = {noise: price(first, delta=DELTA / 2) + price(noise, delta=DELTA / 4) for noise in menu}
    mean, spread = 1 / (2 * first**2), 1 / first
    losses = mean + spread * np.linspace(-9, 9, 20_001)
    weights = np.diff(ndtr((np.append(losses, 2 * losses[-1] - losses[-2]) - mean) / spread))

    def attained(claim: dict[float, float]) -> float:
        return float(np.dot(weights, np.maximum.reduce([_after(losses, noise, claim[noise]) for noise in menu])))

    return attained(union), attained(stages)


def _after(losses: Array, noise: float, claim: float) -> Array:
    """E[(1 − e^(claim − loss − L))₊] over the loss L of a Gaussian release: its curve at claim − loss."""
    left, half = claim - losses, 1 / (2 * noise)
    paid = np.exp(np.minimum(left + log_ndtr(-half - left * noise), 0.0))
    return np.asarray(np.clip(ndtr(half - left * noise) - paid, 0.0, 1.0))


def test_choosing_the_second_run_by_the_first_breaks_the_union_and_not_the_stages() -> None:
    union, stages = _two_runs(2.0, (100.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5))
    assert union > 2 * DELTA
    assert stages <= DELTA


def test_going_on_with_a_run_does_not_move_earlier_releases_into_its_stage() -> None:
    with Ledger.in_memory() as ledger:
        _spend(ledger, GaussianDpEvent(1.0), 1)  # a statistic, seen before the training was chosen
        plans.announce(ledger, "run", [(GaussianDpEvent(9.0), 10)])
        _spend(ledger, GaussianDpEvent(9.0), 8)
        before = _bill(ledger)
        plans.announce(ledger, "run", [(GaussianDpEvent(9.0), 2)], resumed=True)
        assert _bill(ledger) == before
        plans.announce(ledger, "run", [(GaussianDpEvent(9.0), 5)], resumed=True)  # three steps are repeated
        after = _bill(ledger)
        assert [sum(count for _, count in stage) for stage in after.stages] == [1, 13]
        assert after.epsilon(1e-5) > before.epsilon(1e-5)
        assert any("beyond the first plan" in note for note in after.notes)


def test_what_came_before_any_plan_is_a_stage_also_where_it_looks_like_what_was_planned() -> None:
    """A plan chosen after a look has no room for what was looked at: at the whole delta its price would be no bound."""
    event, budget = GaussianDpEvent(9.0), Budget(8.0, DELTA)
    with Ledger.in_memory() as ledger:
        _spend(ledger, event, 3)
        room = plans.room(ledger, "run", budget)[0]
        plans.announce(ledger, "run", [(event, 10)], budget=budget)
        expected = epsilon([(event, 3)], DELTA / 2) + epsilon([(event, 10)], DELTA / 4)
        for more in (1, 4, 5):
            _spend(ledger, event, more)
            assert _bill(ledger).epsilon(DELTA) == pytest.approx(expected)
            assert _bill(ledger, in_advance=True).epsilon(DELTA) <= expected
            assert plans.room(ledger, "run", budget, resumed=True)[0] == room
        assert list(plans.room(ledger, "run", budget, resumed=True)[1]) == [(event, 10)]


def test_what_came_before_any_plan_stays_a_stage_whatever_is_charged_by_hand_afterwards() -> None:
    """Otherwise events of another kind would be taken for the early ones, which would hide in the plan."""
    event, budget = GaussianDpEvent(9.0), Budget(8.0, DELTA)
    with Ledger.in_memory() as ledger:
        _spend(ledger, event, 3)
        plans.announce(ledger, "run", [(event, 10)], budget=budget)
        _spend(ledger, event, 5)
        before = _bill(ledger).epsilon(DELTA)
        _spend(ledger, GaussianDpEvent(50.0), 3)
        bill = _bill(ledger)
        assert dict(bill.stages[0]) == {event: 3, GaussianDpEvent(50.0): 3}
        assert dict(bill.stages[1]) == {event: 10}
        assert bill.epsilon(DELTA) > before
        assert "3 events were charged beyond" in bill.notes[-2]


def test_a_run_killed_before_its_plan_was_declared_does_not_own_the_releases_of_a_ledger_it_was_given() -> None:
    budget = Budget(8.0, 1e-5)
    with Ledger.in_memory() as ledger:
        _spend(ledger, GaussianDpEvent(1.0), 1)
        assert plans.room(ledger, "run", budget, resumed=True)[0].delta == budget.delta / 4
        plans.announce(ledger, "run", [(GaussianDpEvent(9.0), 10)], resumed=True)
        _spend(ledger, GaussianDpEvent(9.0), 1)
        assert len(_bill(ledger).stages) == 2


def test_stopped_in_advance_prices_earlier_stages_whole_and_keeps_the_split_of_delta() -> None:
    event = GaussianDpEvent(9.0)
    with Ledger.in_memory() as ledger:
        plans.announce(ledger, "first", [(event, 10)])
        _spend(ledger, event, 1)
        plans.announce(ledger, "second", [(event, 10)])  # chosen after a look at the first
        _spend(ledger, event, 9)
        assert _bill(ledger, in_advance=True).epsilon(1e-5) >= epsilon([(event, 10)], 5e-6)
        _spend(ledger, event, 3)
        stages = _bill(ledger, in_advance=True).stages
        assert [sum(count for _, count in stage) for stage in stages] == [10, 3]


def test_repeated_work_is_announced_also_beside_a_run_under_a_filter() -> None:
    event = GaussianDpEvent(9.0)
    with Ledger.in_memory() as ledger:
        plans.announce(ledger, "filtered", [])
        _spend(ledger, Filter(8.0, 2.0).event(GaussianDpEvent(20.0)), 2)
        plans.announce(ledger, "filtered", [], resumed=True)
        assert len(plans.declared(ledger)) == 1
        plans.announce(ledger, "run", [(event, 10)])
        _spend(ledger, event, 8)
        plans.announce(ledger, "run", [(event, 5)], resumed=True)
        assert [plan.events for plan in plans.declared(ledger)] == [(), ((event, 13),)]


def test_repeated_work_costs_the_budget_by_every_accountant_and_at_every_delta() -> None:
    event, budget = GaussianDpEvent(20.0), Budget(3.0, DELTA)
    with Ledger.in_memory() as ledger:
        plans.announce(ledger, "run", [(event, 10)], budget=budget)
        _spend(ledger, event, 8)
        plans.announce(ledger, "run", [(event, 5)], budget=budget, resumed=True)
        bill = _bill(ledger)
        for accountant in ("pld", "rdp", "zcdp"):
            assert [bill.epsilon(delta, accountant) for delta in (DELTA, 1.1 * DELTA, DELTA / 10)] == [3.0] * 3
        plans.announce(ledger, "other", [(event, 1)], budget=Budget(2.0, DELTA))
        assert _bill(ledger).epsilon(DELTA) == 3.0


def test_a_plan_that_waits_for_its_training_serves_one_run_alone() -> None:
    statistic, step = GaussianDpEvent(3.0), GaussianDpEvent(9.0)
    with Ledger.in_memory() as ledger:
        plans.declare(ledger, Plan(((statistic, 2), (step, 10)), 0, "run", before=2))
        _spend(ledger, statistic, 2)
        plans.announce(ledger, "run", [(step, 10)])
        assert len(plans.declared(ledger)) == 1
        plans.announce(ledger, "run", [(step, 10)])  # the same recipe again, before the first took a step
        assert [plan.after for plan in plans.declared(ledger)] == [0, 2]
        assert len(_bill(ledger).stages) == 2
