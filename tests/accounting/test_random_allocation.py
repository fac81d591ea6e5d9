"""The price of an epoch in which each record is in one step: exact cases, quadrature, simulation, and wrong twins.

See docs/proofs/allocation.md.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from sordino.accounting import random_allocation
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent, from_json, to_json
from sordino.accounting.gaussian import gaussian_delta
from sordino.accounting.pld import pld
from sordino.accounting.pricing import delta as price_delta
from sordino.accounting.pricing import epsilon as price
from sordino.accounting.random_allocation import RandomAllocation, find_sum
from sordino.errors import InvalidInput

Array = NDArray[np.float64]
EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)
ADD_REMOVE = "add-or-remove-one"
SLACK = 0.05
"""By how much of a δ the price may exceed it."""


def call(strikes: Array, noise: float) -> Array:
    """E[(W − k)₊] in closed form."""
    positive = np.maximum(strikes, 1e-300)
    edge = noise * np.log(positive) + 0.5 / noise
    priced = stats.norm.sf(edge - 1 / noise) - positive * stats.norm.sf(edge)
    return np.where(strikes > 0, priced, 1 - strikes)


def integrate(steps: int, noise: float, epsilon: float) -> tuple[float, float]:
    """Both divergences for two or three steps: the last term in closed form, the others by quadrature."""
    axis = np.linspace(-9 * noise, 1 + 9 * noise, 241)
    mass = stats.norm.pdf(axis, 0, noise) * (axis[1] - axis[0])
    terms, weights = np.exp((axis - 0.5) / noise**2), mass
    if steps == 3:
        terms, weights = np.add.outer(terms, terms).ravel(), np.outer(mass, mass).ravel()
    removed = weights @ call(steps * math.exp(epsilon) - terms, noise) / steps
    short = steps * math.exp(-epsilon) - terms
    put = np.where(short > 0, call(short, noise) - 1 + short, 0.0)
    return float(removed), float(weights @ np.maximum(put, 0.0) * math.exp(epsilon) / steps)


@pytest.mark.parametrize(("steps", "noise"), [(2, 0.5), (2, 1.0), (2, 3.0), (3, 0.7), (3, 1.5)])
def test_both_directions_are_those_of_quadrature_and_never_below(steps: int, noise: float) -> None:
    total = find_sum(steps, noise)
    for epsilon in EPSILONS:
        for exact, found in zip(
            integrate(steps, noise, epsilon), (total.remove(epsilon), total.add(epsilon)), strict=True
        ):
            assert exact * (1 - 1e-6) - 1e-14 <= found <= exact * (1 + SLACK) + 1e-8


@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0])
def test_one_step_is_a_gaussian(noise: float) -> None:
    total = find_sum(1, noise)
    for epsilon in EPSILONS:
        exact = gaussian_delta(1 / noise, epsilon)
        for found in (total.remove(epsilon), total.add(epsilon)):
            assert exact * (1 - 1e-9) <= found <= exact * (1 + SLACK) + 1e-8
    alone, gaussian = (price([(event, 1)], 1e-5) for event in (RandomAllocation(noise, 1), GaussianDpEvent(noise)))
    assert alone == pytest.approx(gaussian, rel=1e-6)


@pytest.mark.parametrize(("steps", "noise"), [(7, 0.8), (50, 1.0), (235, 2.0)])
def test_simulation_finds_the_same(steps: int, noise: float) -> None:
    """200,000 epochs: the price lies within a hundredth above what they estimate, and not significantly below."""
    rng = np.random.default_rng(steps)
    total = find_sum(steps, noise)
    ratios = np.empty(200_000)
    for start in range(0, len(ratios), 20_000):
        part = rng.normal(0, noise, (20_000, steps))
        ratios[start : start + 20_000] = np.exp((part - 0.5) / noise**2).mean(axis=1)
    for epsilon in (0.0, 0.1, 0.3):
        for values, found in (
            (np.maximum(ratios - math.exp(epsilon), 0), total.remove(epsilon)),
            (np.maximum(1 - math.exp(epsilon) * ratios, 0), total.add(epsilon)),
        ):
            error = 4.5 * values.std() / math.sqrt(len(values))
            assert values.mean() - error <= found <= values.mean() * (1 + SLACK) + error + 1e-6


def test_mass_and_mean_stay() -> None:
    for steps, noise in ((3, 0.5), (100, 1.0), (1000, 4.0)):
        total = find_sum(steps, noise)
        assert total.masses.sum() == pytest.approx(1, abs=1e-12)
        assert total.values @ total.masses + total.lost == pytest.approx(steps, rel=1e-12)
        assert total.lost / steps < 1e-16


def test_the_grid_of_losses_is_not_below_the_sum() -> None:
    event = RandomAllocation(0.8, 20)
    total, charged = find_sum(20, 0.8), pld(event, ADD_REMOVE)
    for epsilon in EPSILONS:
        least = max(total.remove(epsilon), total.add(epsilon))
        assert least <= charged.get_delta_for_epsilon(epsilon) <= least * 1.001 + 1e-13


def test_a_finer_grid_costs_less_and_not_much_less() -> None:
    coarse, normal, fine = (find_sum(60, 0.9, fineness).remove(0.5) for fineness in (0.16, 0.04, 0.02))
    assert fine < normal < coarse
    assert normal < 1.01 * fine


def test_the_price_falls_with_noise_and_with_steps_and_grows_with_epochs() -> None:
    by_noise = [price([(RandomAllocation(noise, 30), 3)], 1e-5) for noise in (0.8, 1.2, 6.0)]
    by_steps = [price([(RandomAllocation(1.0, steps), 3)], 1e-5) for steps in (1, 5, 64)]
    by_epochs = [price([(RandomAllocation(1.0, 30), epochs)], 1e-5) for epochs in (8, 2, 1)]
    for prices in (by_noise, by_steps, by_epochs):
        assert all(larger > smaller for larger, smaller in pairwise(prices))


@pytest.mark.parametrize(("steps", "noise", "epochs"), [(10, 0.9, 1), (100, 1.0, 10), (235, 2.0, 4)])
def test_it_costs_less_than_poisson_draws_and_than_a_known_step(steps: int, noise: float, epochs: int) -> None:
    mine = price([(RandomAllocation(noise, steps), epochs)], 1e-5)
    poisson = price([(PoissonSampledDpEvent(1 / steps, GaussianDpEvent(noise)), steps * epochs)], 1e-5)
    assert 0.5 * poisson < mine < poisson
    assert mine < price([(GaussianDpEvent(noise), epochs)], 1e-5)


def test_epochs_compose_like_any_events() -> None:
    """Two epochs of two steps: a simulation of both losses."""
    noise, rng = 1.0, np.random.default_rng(1)
    x = rng.normal(0, noise, (400_000, 2, 2))
    ratio = np.exp((x - 0.5) / noise**2).mean(axis=2).prod(axis=1)
    for epsilon in (0.5, 1.5):
        values = np.maximum(1 - math.exp(epsilon) * ratio, 0), np.maximum(ratio - math.exp(epsilon), 0)
        means = [value.mean() for value in values]
        error = max(4.5 * value.std() / math.sqrt(len(value)) for value in values)
        found = price_delta([(RandomAllocation(noise, 2), 2)], epsilon)
        assert max(means) - error <= found <= max(means) * (1 + SLACK) + error


def test_rounding_to_the_nearest_point_instead_would_be_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong twin: values moved down to their grid."""

    def down(values: Array, masses: Array, grid: Array) -> tuple[Array, float]:
        below = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 1)
        return np.bincount(below, masses, len(grid)), 0.0

    exact = find_sum(3, 0.7).remove(1.0)
    monkeypatch.setattr(random_allocation, "_move", down)
    assert find_sum.__wrapped__(3, 0.7).remove(1.0) < (1 - SLACK) * exact


def test_extreme_noise_is_priced_like_one_gaussian() -> None:
    for noise in (1e-5, 0.05, 3e5):
        assert price([(RandomAllocation(noise, 50), 1)], 1e-5) == pytest.approx(
            price([(GaussianDpEvent(noise), 1)], 1e-5), rel=1e-3, abs=1e-4
        )


def test_it_is_written_and_read_and_bad_ones_are_refused() -> None:
    event = RandomAllocation(0.8, 20)
    assert from_json(to_json(event)) == event
    for noise, steps in ((0.0, 5), (math.inf, 5), (1.0, 0)):
        with pytest.raises(InvalidInput, match="must be"):
            RandomAllocation(noise, steps)
    with pytest.raises(InvalidInput, match="share one secret step"):
        price([(event, 1)], 1e-5, adjacency="replace-one")
    with pytest.raises(InvalidInput, match="accountant='pld'"):
        price([(event, 1)], 1e-5, accountant="rdp")


def test_thinner_grids_are_dearer_never_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps the memory of a long and loud epoch small is one more move: an upper bound of the upper bound."""
    fine = random_allocation.find_sum(50, 0.5)
    monkeypatch.setattr(random_allocation, "MOST", 128)
    random_allocation.find_sum.cache_clear()
    thin = random_allocation.find_sum(50, 0.5)
    random_allocation.find_sum.cache_clear()
    assert thin.masses.sum() == pytest.approx(fine.masses.sum(), rel=1e-9)
    for epsilon in (0.1, 1.0, 3.0):
        for direction in ("remove", "add"):
            dear, cheap = (getattr(each, direction)(epsilon) for each in (thin, fine))
            assert cheap * (1 - 1e-9) <= dear <= 1.5 * cheap + 1e-9


def test_the_longest_epochs_cost_more_rather_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for noise in (0.1, 0.12, 0.2, 0.3, 1.0, 10.0, 1e5):
        points = random_allocation._lay_grid(random_allocation.LONGEST, noise, random_allocation.FINENESS)
        assert len(points) < 2**16
    exact = price([(RandomAllocation(0.8, 24), 2)], 1e-5)
    summed: list[int] = []

    def watch(terms: int, noise: float) -> random_allocation.Spread:
        summed.append(terms)
        return find_sum(terms, noise)

    monkeypatch.setattr(random_allocation, "find_sum", watch)
    monkeypatch.setattr(random_allocation, "LONGEST", 8)
    eight, capped, endless = (price([(RandomAllocation(0.8, steps), 2)], 1e-5) for steps in (8, 25, 10**18))
    assert max(summed) == 8
    assert capped == endless == pytest.approx(eight)
    assert capped > exact
