"""The filter never lets its limit be passed, whatever is asked of it, and nothing else prices what it let pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.accounting import Budget, pricing
from sordino.accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, from_json, to_json
from sordino.accounting.filtered import Filter, Filtered, find_least_noise
from sordino.accounting.ledger import Ledger
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.errors import BudgetExhausted, InvalidInput

BUDGET = Budget(epsilon=2.0, delta=1e-5)


def sgm(rate: float, noise: float) -> PoissonSampledDpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


def price(events: list[tuple[DpEvent, int]], accountant: str = "rdp-filter") -> float:
    return pricing.epsilon(events, BUDGET.delta, accountant=accountant)


releases = st.one_of(
    st.builds(GaussianDpEvent, st.floats(0.5, 50)), st.builds(sgm, st.floats(0.001, 0.5), st.floats(0.4, 10))
)


@given(st.lists(releases, max_size=40), st.sampled_from([6.0, 8.0, 20.0]))
def test_no_sequence_of_requests_passes_the_limit_at_any_stopping_time(asked: list[DpEvent], order: float) -> None:
    chosen = Filter.within(BUDGET, order)
    allowance, passed = chosen.allowance(), []
    for event in asked:
        before = allowance.left
        try:
            allowance.require(event)
        except BudgetExhausted:
            assert allowance.left == before  # a refusal costs nothing
            assert chosen.cost(event) > before * (1 - 1e-9)
            continue
        passed.append((chosen.event(event), 1))
        assert sum(chosen.cost(e) for e, _ in passed) <= chosen.limit * (1 + 1e-12)
        assert price(passed) <= BUDGET.epsilon * (1 + 1e-9)


def test_the_limit_is_what_one_order_converts_to_epsilon() -> None:
    """Canonne, Kamath & Steinke 2020, Prop. 12, by hand."""
    chosen = Filter.within(BUDGET, 8.0)
    by_hand = chosen.limit + math.log(7 / 8) - math.log(BUDGET.delta * 8) / 7
    assert by_hand == pytest.approx(BUDGET.epsilon, rel=1e-12)
    assert chosen.epsilon(BUDGET.delta) == pytest.approx(BUDGET.epsilon, rel=1e-12)
    assert chosen.epsilon(1e-7) > chosen.epsilon(1e-5)


def joint_divergence(order: float, first_noise: float, second_cost: Callable[[float], float]) -> float:
    """The exact Rényi divergence of a Gaussian release y and a second Gaussian whose cost depends on y."""
    y = np.linspace(-60, 60, 400_001)
    log_q, log_p = -(y**2) / (2 * first_noise**2), -((y - 1) ** 2) / (2 * first_noise**2)
    costs = np.array([second_cost(-1.0), second_cost(1.0)])[(y > 0.5).astype(int)]
    logs = order * log_p + (1 - order) * log_q + (order - 1) * costs - math.log(first_noise * math.sqrt(2 * math.pi))
    return float(np.log(np.exp(logs).sum() * (y[1] - y[0])) / (order - 1))


def test_adaptive_noise_stays_within_the_limit_and_a_limit_on_the_average_does_not() -> None:
    """The second release is louder where the first looked like the record; only a limit on every path holds."""
    order, noise, limit = 4.0, 2.0, 2.0
    left = limit - Filter(order, limit).cost(GaussianDpEvent(noise))
    assert joint_divergence(order, noise, lambda y: left if y > 0.5 else left / 4) <= limit
    assert joint_divergence(order, noise, lambda y: 1.6 * left if y > 0.5 else 0.4 * left) > limit  # left on average


def test_the_best_order_afterwards_and_a_pld_are_refused() -> None:
    chosen = Filter.within(BUDGET, 8.0)
    events = [(chosen.event(sgm(0.01, 1.0)), 100)]
    for accountant in ("pld", "rdp"):
        with pytest.raises(InvalidInput, match=r"order 8, fixed in advance.*rdp-filter"):
            price(events, accountant)
    with pytest.raises(InvalidInput, match="another filter"):
        Filter.within(BUDGET, 9.0).allowance(events)
    with pytest.raises(InvalidInput, match="under a filter only"):
        price([(GaussianDpEvent(5.0), 1)])


def test_the_price_is_the_limit_even_where_less_was_used() -> None:
    chosen = Filter.within(BUDGET, 8.0)
    assert price([(chosen.event(GaussianDpEvent(100.0)), 1)]) == pytest.approx(BUDGET.epsilon)
    assert price([]) == 0
    used, chance = (chosen.event(GaussianDpEvent(100.0)), 1), GaussianDpEvent(100.0)
    assert price([used, (chance, 1)]) == pytest.approx(BUDGET.epsilon)  # what else was released counts at that order
    assert price([used, (chance, 10_000)]) == math.inf
    assert price([(chosen.event(GaussianDpEvent(0.1)), 1)]) == math.inf  # no filter let that pass
    budget = Budget(BUDGET.epsilon, BUDGET.delta, accountant="rdp-filter")
    assert budget.allows([(chosen.event(GaussianDpEvent(100.0)), 1)])


def test_delta_is_consistent_with_epsilon() -> None:
    events = [(Filter.within(BUDGET, 8.0).event(GaussianDpEvent(5.0)), 2)]
    assert pricing.delta(events, BUDGET.epsilon, accountant="rdp-filter") <= BUDGET.delta * (1 + 1e-6)
    assert pricing.delta(events, BUDGET.epsilon / 2, accountant="rdp-filter") > BUDGET.delta


def test_the_order_for_a_plan_needs_the_least_noise() -> None:
    def plan(noise: float) -> list[tuple[DpEvent, int]]:
        return [(sgm(0.02, noise), 500), (GaussianDpEvent(40.0), 10)]

    chosen = Filter.for_plan(BUDGET, plan)

    def needed(order: float) -> float:
        at = Filter.within(BUDGET, order)
        return find_least_noise(lambda noise: sum(n * at.cost(event) for event, n in plan(noise)), at.limit)

    best = needed(chosen.order)
    for order in [order for order in ORDERS if 6 < order < 40][::6]:
        assert best <= needed(order) * 1.005
    assert pricing.epsilon(plan(best), BUDGET.delta, accountant="rdp") == pytest.approx(BUDGET.epsilon, rel=5e-3)


def test_least_noise_is_enough_and_nearly_the_least() -> None:
    assert find_least_noise(lambda noise: 3 / noise**2, 0.5) == pytest.approx(math.sqrt(6), rel=2e-6)
    assert 3 / find_least_noise(lambda noise: 3 / noise**2, 0.5) ** 2 <= 0.5
    with pytest.raises(BudgetExhausted, match="no noise"):
        find_least_noise(lambda noise: 1.0, 0.5)


def test_a_resumed_allowance_continues_where_the_ledger_stands() -> None:
    chosen = Filter.within(BUDGET, 8.0)
    event, ledger = chosen.event(sgm(0.01, 2.0)), Ledger.in_memory(run_id="r", header={})
    through = chosen.allowance()
    for _ in range(5):
        through.require(event)
        ledger.charge(event)
    assert chosen.allowance(ledger.events()).left == pytest.approx(through.left, rel=1e-12)


def test_events_survive_their_text_and_bad_filters_are_refused() -> None:
    event = Filter(8.0, 1.5).event(sgm(0.1, 2.0))
    assert from_json(to_json(event)) == event
    assert Filter(8.0, 1.5).event(event) is event
    assert isinstance(event, Filtered)
    assert Filter(8.0, 1.5).cost(event) == pytest.approx(rdp_curve(sgm(0.1, 2.0), "add-or-remove-one", [8.0])[0])
    for order, limit in ((1.0, 1.0), (math.inf, 1.0), (2.0, 0.0), (2.0, math.nan)):
        with pytest.raises(InvalidInput, match="must be >"):
            Filter(order, limit)
    with pytest.raises(InvalidInput, match="too small"):
        Filter.within(Budget(0.1, 1e-8), 2.0)
    with pytest.raises(InvalidInput, match="add-or-remove-one adjacency"):
        pricing.epsilon([(event, 1)], 1e-5, accountant="rdp-filter", adjacency="replace-one")


@pytest.mark.parametrize("accountant", ["gdp", "zcdp", "zcdp-epoch", "tcdp"])
def test_accountants_of_gaussians_point_to_the_filter(accountant: str) -> None:
    event = Filter(6.0, 1.2).event(GaussianDpEvent(2.0))
    with pytest.raises(InvalidInput, match="rdp-filter"):
        price([(event, 3)], accountant)
