"""Calibration: never above the target, within 0.1 % below it, equal to dp_accounting's, and quick."""

from __future__ import annotations

import math
import time

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting.budget import Budget
from sordino.accounting.calibration import (
    LEAST_NOISE,
    MOST_NOISE,
    calibrate_noise,
    calibrate_steps,
    noise_for,
    steps_for,
)
from sordino.errors import InvalidInput


def _sampled(rate: float, noise: float) -> PoissonSampledDpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


@settings(max_examples=4, deadline=None)
@given(st.floats(0.2, 10.0), st.floats(1e-3, 0.1), st.integers(1, 5_000), st.sampled_from(["pld", "rdp"]))
def test_never_above_the_target_and_within_a_thousandth(
    target: float, rate: float, steps: int, accountant: str
) -> None:
    budget = Budget(target, 1e-5, accountant)
    found = calibrate_noise(budget, rate, steps)
    assert found.epsilon == budget.price([(_sampled(rate, found.noise_multiplier), steps)])
    assert target * (1 - 1e-3) <= found.epsilon <= target
    assert budget.price([(_sampled(rate, found.noise_multiplier * 0.995), steps)]) > target


def test_equals_dp_accounting() -> None:
    """Their price of a thousandth less noise is above the target, of a thousandth more below it: so is their noise."""
    budget, rate, steps = Budget(2.0, 1e-5), 0.01, 1_000
    noise = calibrate_noise(budget, rate, steps).noise_multiplier

    def theirs(noise: float) -> float:
        priced = PLDAccountant().compose(_sampled(rate, noise), steps)
        return float(priced.get_epsilon(budget.delta))

    assert theirs(noise * 1.001) < budget.epsilon < theirs(noise * 0.999)


def test_plain_gaussian_equals_the_closed_form() -> None:
    found = noise_for(Budget(1.0, 1e-6), lambda noise: [(GaussianDpEvent(noise), 1)])
    exact = get_sigma_gaussian(1.0, 1e-6)
    assert exact <= found.noise_multiplier <= exact * 1.001


def test_takes_seconds_not_minutes() -> None:
    start = time.process_time()
    found = calibrate_noise(Budget(3.0, 1e-5), 256 / 60_000, 14_000)
    assert time.process_time() - start < 5
    assert 2.997 <= found.epsilon <= 3.0


def test_any_start_leads_to_the_same_noise() -> None:
    budget = Budget(1.0, 1e-5, "rdp")
    wanted = calibrate_noise(budget, 0.01, 400).noise_multiplier
    for start in (LEAST_NOISE / 10, 0.3, 1.0, 50.0, 1e9):
        found = noise_for(budget, lambda noise: [(_sampled(0.01, noise), 400)], start=start)
        assert found.noise_multiplier == pytest.approx(wanted, rel=2e-3), start


def test_several_kinds_of_events_share_one_noise() -> None:
    def plan(noise: float) -> list[tuple[DpEvent, int]]:
        return [(_sampled(0.02, noise), 200), (GaussianDpEvent(10 * noise), 3)]

    budget = Budget(1.5, 1e-5)
    found = noise_for(budget, plan)
    assert 1.4985 <= budget.price(plan(found.noise_multiplier)) <= 1.5


def test_a_price_that_jumps_is_never_exceeded() -> None:
    def plan(noise: float) -> list[tuple[DpEvent, int]]:
        return [(GaussianDpEvent(2.0 if noise < 1.7 else 9.0), 1)]

    found = noise_for(Budget(1.0, 1e-5), plan)
    assert found.epsilon <= 1.0
    assert found.noise_multiplier == pytest.approx(1.7, rel=1e-6)


def test_impossible_noise_says_what_would_be_possible() -> None:
    def plan(noise: float) -> list[tuple[DpEvent, int]]:
        return [(_sampled(0.01, noise), 100), (GaussianDpEvent(2.0), 1)]

    fixed = Budget(1.0, 1e-5).price([(GaussianDpEvent(2.0), 1)])
    with pytest.raises(InvalidInput, match=f"{fixed:.3g}") as caught:
        noise_for(Budget(1.0, 1e-5), plan)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInput, match="inf"):
        noise_for(Budget(1.0, 1e-5), lambda _: [(NonPrivateDpEvent(), 1)])


def test_a_budget_that_needs_no_noise_gets_the_least() -> None:
    found = noise_for(Budget(1.0, 0.5), lambda noise: [(_sampled(1e-3, noise), 1)])
    assert found.noise_multiplier == LEAST_NOISE
    assert found.epsilon == 0
    assert noise_for(Budget(1.0, 1e-5), lambda _: []).noise_multiplier == LEAST_NOISE
    assert MOST_NOISE > LEAST_NOISE


@settings(max_examples=6, deadline=None)
@given(st.floats(0.3, 4.0), st.floats(5e-3, 0.1), st.floats(0.8, 4.0))
def test_steps_are_the_largest_number(target: float, rate: float, noise: float) -> None:
    budget = Budget(target, 1e-5)
    if not budget.allows([(_sampled(rate, noise), 1)]):
        with pytest.raises(InvalidInput, match="one step needs at least"):
            calibrate_steps(budget, rate, noise)
        return
    steps = calibrate_steps(budget, rate, noise)
    assert budget.allows([(_sampled(rate, noise), steps)])
    assert not budget.allows([(_sampled(rate, noise), steps + 1)])


def test_noise_and_steps_invert_each_other() -> None:
    budget = Budget(1.0, 1e-5)
    found = calibrate_noise(budget, 0.01, 1_000)
    assert 1_000 <= calibrate_steps(budget, 0.01, found.noise_multiplier) <= 1_005


def test_the_noise_that_one_step_needs_is_enough() -> None:
    with pytest.raises(InvalidInput, match="one step needs at least") as caught:
        calibrate_steps(Budget(0.1, 1e-5), 0.5, 1.0)
    needed = float(str(caught.value).split()[-1])
    assert calibrate_steps(Budget(0.1, 1e-5), 0.5, needed * 1.001) >= 1


def test_steps_beside_what_was_spent() -> None:
    budget, step = Budget(1.0, 1e-5), _sampled(0.02, 1.5)
    free = steps_for(budget, step)
    assert steps_for(budget, step, spent=[(step, 40)]) == free - 40
    with pytest.raises(InvalidInput, match="does not pay for one step"):
        steps_for(budget, step, spent=[(step, free)])


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_refuses_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(InvalidInput, match="rate="):
        calibrate_noise(Budget(1.0, 1e-5), rate, 10)
    with pytest.raises(InvalidInput, match="rate="):
        calibrate_steps(Budget(1.0, 1e-5), rate, 1.0)


def test_refuses_no_steps_no_noise_and_endless_budgets() -> None:
    with pytest.raises(InvalidInput, match="steps=0"):
        calibrate_noise(Budget(1.0, 1e-5), 0.1, 0)
    for noise in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidInput, match="noise_multiplier="):
            calibrate_steps(Budget(1.0, 1e-5), 0.1, noise)
    with pytest.raises(InvalidInput, match="not used up"):
        steps_for(Budget(1.0, 1e-5), _sampled(0.0, 1.0))
