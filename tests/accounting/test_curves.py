"""δ(ε) curves against dp_accounting's and against quadrature; connect-the-dots against the curve it must dominate."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import integrate, stats

from sordino.accounting.curves import addition_delta, connect_the_dots, gaussian_delta, removal_delta, sampled_gaussian

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
    assert removal_delta(grid, 1.0, 1.5) == pytest.approx(gaussian_delta(grid, 1.5), abs=1e-15)
    assert addition_delta(grid, 1.0, 1.5) == pytest.approx(gaussian_delta(grid, 1.5), abs=1e-14)


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
        return gaussian_delta(grid, 2.0)

    loose = connect_the_dots(curve, -5.0, 6.0)
    fine = connect_the_dots(curve, -5.0, 6.0, surplus=lambda grid: np.exp(grid) * curve(-grid))
    assert loose._probs == pytest.approx(fine._probs, abs=1e-11)
    assert loose._infinity_mass == fine._infinity_mass


@pytest.mark.parametrize(("lower", "upper"), [(-0.01, 0.3), (0.05, 0.2), (-0.3, -0.1), (0.0, 0.0)])
def test_any_bounds_are_safe(lower: float, upper: float) -> None:
    pmf = connect_the_dots(lambda grid: gaussian_delta(grid, 3.0), lower, upper)
    assert pmf._probs.sum() + pmf._infinity_mass == pytest.approx(1.0, abs=1e-10)
    for epsilon in (0.0, 0.02, 0.1, 0.5, 2.0):
        assert pmf.get_delta_for_epsilon(epsilon) >= gaussian_delta(np.array([epsilon]), 3.0)[0] - 1e-13
