"""Losses on a grid: curves against dp_accounting and quadrature; composition against convolution and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import integrate, stats

from sordino.accounting.grids import (
    INTERVAL,
    LossGrid,
    addition_delta,
    compose,
    connect_the_dots,
    gaussian_curve,
    removal_delta,
    sampled_gaussian,
)

SETTINGS = [(256 / 60_000, 1.3), (0.01, 0.7), (0.5, 1.0), (0.999, 2.0), (1e-4, 1.0), (0.02, 20.0)]


def _quadrature(epsilon: float, rate: float, noise: float, removal: bool) -> float:
    x = np.linspace(-12 * noise, 1 + 12 * noise, 400_001)
    without = stats.norm.pdf(x, 0, noise)
    with_record = (1 - rate) * without + rate * stats.norm.pdf(x, 1, noise)
    first, second = (with_record, without) if removal else (without, with_record)
    return float(integrate.trapezoid(np.maximum(first - np.exp(epsilon) * second, 0.0), x))


@pytest.mark.parametrize("epsilon", [-0.5, -0.001, 0.0, 0.002, 0.3, 1.5])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.7), (0.5, 1.0), (0.9, 2.0)])
def test_curves_are_the_divergence_itself(rate: float, noise: float, epsilon: float) -> None:
    grid = np.array([epsilon])
    assert removal_delta(grid, rate, noise)[0] == pytest.approx(_quadrature(epsilon, rate, noise, True), abs=1e-9)
    assert addition_delta(grid, rate, noise)[0] == pytest.approx(_quadrature(epsilon, rate, noise, False), abs=1e-9)


def test_full_rate_is_the_plain_gaussian() -> None:
    grid = np.linspace(-3, 3, 50)
    assert removal_delta(grid, 1.0, 1.5) == pytest.approx(gaussian_curve(grid, 1.5), abs=1e-15)
    assert addition_delta(grid, 1.0, 1.5) == pytest.approx(gaussian_curve(grid, 1.5), abs=1e-14)


@pytest.mark.parametrize(("rate", "noise"), SETTINGS)
def test_distribution_agrees_with_dp_accounting(rate: float, noise: float) -> None:
    ours = sampled_gaussian(noise, rate)
    theirs = oracle.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-4)
    for epsilon in (0.0, 1e-4, 0.00123, 0.05, 0.4, 2.0, 9.0):
        assert ours.get_delta_for_epsilon(epsilon) == pytest.approx(theirs.get_delta_for_epsilon(epsilon), abs=1e-13)


@pytest.mark.parametrize("interval", [1e-4, 1e-6])
@pytest.mark.parametrize(("rate", "noise"), [(1e-4, 1.5), (1e-3, 5.0)])
def test_masses_sum_to_one_and_never_fall_below_the_curve(rate: float, noise: float, interval: float) -> None:
    ours = sampled_gaussian(noise, rate, interval)
    for pmf, curve in ((ours._pmf_remove, removal_delta), (ours._pmf_add, addition_delta)):
        assert pmf._probs.sum() + pmf._infinity_mass == pytest.approx(1.0, abs=1e-11)
        for epsilon in np.linspace(0, 3e-3, 40):
            true = curve(np.array([epsilon]), rate, noise)[0]
            assert pmf.get_delta_for_epsilon(float(epsilon)) >= true - 1e-15


def test_connecting_without_the_surplus_gives_the_same_masses() -> None:
    def curve(grid: np.ndarray) -> np.ndarray:
        return gaussian_curve(grid, 2.0)

    loose = connect_the_dots(curve, -5.0, 6.0)
    fine = connect_the_dots(curve, -5.0, 6.0, surplus=lambda grid: np.exp(grid) * curve(-grid))
    assert loose._probs == pytest.approx(fine._probs, abs=1e-11)
    assert loose._infinity_mass == fine._infinity_mass


@pytest.mark.parametrize(("lower", "upper"), [(-0.01, 0.3), (0.05, 0.2), (-0.3, -0.1), (0.0, 0.0)])
def test_any_bounds_are_safe(lower: float, upper: float) -> None:
    pmf = connect_the_dots(lambda grid: gaussian_curve(grid, 3.0), lower, upper)
    assert pmf._probs.sum() + pmf._infinity_mass == pytest.approx(1.0, abs=1e-10)
    for epsilon in (0.0, 0.02, 0.1, 0.5, 2.0):
        assert pmf.get_delta_for_epsilon(epsilon) >= gaussian_curve(np.array([epsilon]), 3.0)[0] - 1e-13


def _grid(values: dict[int, float], infinity: float = 0.0) -> LossGrid:
    lower, upper = min(values), max(values)
    return LossGrid(lower, np.array([values.get(k, 0.0) for k in range(lower, upper + 1)]), infinity)


def _dense(pmf: object) -> LossGrid:
    return LossGrid(pmf._lower_loss, pmf._probs, pmf._infinity_mass, pmf._discretization)  # type: ignore[attr-defined]


def test_equals_direct_convolution_of_different_parts() -> None:
    first, second = _grid({-2: 0.3, 0: 0.4, 5: 0.3}), _grid({1: 0.5, 3: 0.49}, infinity=0.01)
    direct = np.array([1.0])
    for part, count in ((first, 3), (second, 2)):
        for _ in range(count):
            direct = np.convolve(direct, part.probabilities)
    composed = compose([(first, 3), (second, 2)])
    assert composed.lower == -6 + 2
    assert composed.probabilities == pytest.approx(direct, abs=1e-14)
    assert composed.infinity == pytest.approx(1 - 0.99**2, abs=1e-13)
    assert composed.infinity > 1 - 0.99**2


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2, 0.3])
@pytest.mark.parametrize("count", [1, 7, 400])
def test_gaussians_compose_to_the_closed_form(count: int, delta: float) -> None:
    sigma = 1.7
    grid = _dense(sampled_gaussian(sigma * math.sqrt(count), 1.0)._pmf_remove)
    found, exact = compose([(grid, count)]).epsilon(delta), get_epsilon_gaussian(sigma, delta)
    assert exact <= found <= exact + 2e-5


def test_epsilon_and_delta_invert_each_other() -> None:
    composed = compose([(_dense(sampled_gaussian(0.8, 0.02)._pmf_remove), 900)])
    for delta in (1e-12, 1e-7, 1e-3, 0.1):
        epsilon = composed.epsilon(delta)
        assert epsilon > 0
        assert composed.delta(epsilon) == pytest.approx(delta, rel=1e-6)
        assert composed.delta(epsilon * 0.99) > delta
    assert composed.epsilon(0.5) == 0
    assert composed.delta(0.0) <= 0.5


def test_epsilon_where_every_loss_is_far_above_zero() -> None:
    grid = _grid({40_000: 0.6, 50_000: 0.4})
    for delta in (0.1, 0.4, 0.9, 0.98):
        assert grid.delta(grid.epsilon(delta)) == pytest.approx(delta, rel=1e-9)


def test_edges() -> None:
    nothing, everything = compose([]), compose([(_grid({0: 0.0}, infinity=1.0), 5)])
    assert nothing.epsilon(1e-9) == 0
    assert nothing.delta(0.0) == 0
    assert math.isinf(everything.epsilon(0.5))
    assert everything.delta(100.0) == 1
    assert compose([(_grid({-3: 1.0}), 4)]).epsilon(1e-9) == 0
    assert compose([(_grid({3: 1.0}), 0)]).delta(0.0) == 0


def test_wrapping_is_charged_not_lost() -> None:
    """A transform shorter than the support wraps; the mass that may have wrapped must be in the mass at infinity."""
    composed = compose([(_dense(sampled_gaussian(1.3, 0.004)._pmf_remove), 20_000)])
    assert len(composed.probabilities) < 20_000 * 1_000  # the support would be far longer
    assert composed.infinity >= 1e-15
    assert composed.probabilities.sum() + composed.infinity >= 1 - 1e-12


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.004, 1.3, 20_000), (0.02, 1.0, 3_000), (0.3, 4.0, 100)])
def test_agrees_with_dp_accounting(rate: float, noise: float, steps: int) -> None:
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    sides = sampled_gaussian(noise, rate)
    ours = max(compose([(_dense(pmf), steps)]).epsilon(1e-5) for pmf in (sides._pmf_remove, sides._pmf_add))
    theirs = PLDAccountant(value_discretization_interval=INTERVAL).compose(event, steps).get_epsilon(1e-5)
    assert ours == pytest.approx(theirs, abs=1e-6)
