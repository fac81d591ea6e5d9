"""The price of an epoch in which every record takes part in one step, chosen by a secret coin (random allocation).

With t steps and noise multiplier σ no mechanism of this kind is easier to tell apart, in either direction, than

    P = (1/t) Σ_i N(e_i, σ²·I_t)    from    Q = N(0, σ²·I_t).

Their likelihood ratio is S/t with S = W_1 + … + W_t and W_i = exp((x_i − ½)/σ²): under Q a sum of independent
log-normals of mean 1. Both divergences are expectations of *convex* functions of S,

    δ_remove(ε) = E[(S/t − e^ε)₊],    δ_add(ε) = E[(1 − e^ε·S/t)₊],

so anything that spreads S out and keeps its mean gives an upper bound for both. Here W is moved onto the points of a
grid, each value to its two neighbours such that the mean stays. Sums of two such variables are moved in the same way,
and after log₂ t doublings S itself, onto the grid of losses log(S/t). All terms are positive: there is no transform and
no cancellation. Values above the last point of a grid count as an infinite loss. The proof is in
docs/proofs/allocation.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import ndtr, ndtri

from sordino.accounting.events import Adjacency, DpEvent, GaussianDpEvent
from sordino.accounting.extremes import dissect
from sordino.accounting.grids import INTERVAL, Array
from sordino.accounting.pld import pld
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.errors import InvalidInput

FINENESS = 0.04
"""Spacing of a grid for sums: a share of their deviation in the middle, a share of the distance outside."""
DEVIATIONS = 8.5
"""Noise beyond this many deviations has probability below 1e-17, and counts as infinite loss."""
UNLIKELY = 1e-18
"""Sums that are this improbably small have no grid points between zero and the lowest: they move to these two."""
WIDEST = 11.0
"""How many deviations of a sum its grid covers at least, below its mean and above."""
MOST = 2048
"""Most points of a variable that goes into a sum, because all pairs of points are formed."""
LOUD, QUIET = 0.1, 1e5
"""Outside these noise multipliers the price is that of one Gaussian answer: W or its deviation is not a double."""
LONGEST = 2**20
"""Longer epochs are priced like one of so many steps, which costs more; a sum's grid grows with the root of t."""
ROUNDING = 1e-9
"""All masses are raised by this much for every term of the sum: more than additions and products round off."""
SHIFT = 1e-14
"""Added to the mass at infinity in both directions: more than rounded values move the mean of S/t."""


@dataclass(frozen=True)
class RandomAllocation(DpEvent):
    """An epoch of `steps` Gaussian answers of `noise_multiplier`; every unit is in exactly one, by a uniform coin."""

    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.noise_multiplier > 0 and math.isfinite(self.noise_multiplier)):
            raise InvalidInput(f"noise_multiplier={self.noise_multiplier} must be > 0 and finite: no noise, no privacy")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise InvalidInput(f"steps={self.steps!r} must be a whole number >= 1: the steps of an epoch")


NAMES = {"random-allocation": RandomAllocation}


@pld.register(RandomAllocation)
def _(event: RandomAllocation, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    if adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"{event!r} has no proven price under {adjacency} adjacency: the exchanged records share one secret step; "
            "use add-or-remove-one, or Poisson draws"
        )
    if event.steps == 1 or not LOUD <= event.noise_multiplier <= QUIET:
        return pld(GaussianDpEvent(event.noise_multiplier), adjacency, interval)
    return _to_losses(find_sum(min(event.steps, LONGEST), event.noise_multiplier), interval)


@rdp_curve.register(RandomAllocation)
def _(event: RandomAllocation, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> NoReturn:
    raise InvalidInput(f"{event!r} has no Rényi price that is worth having: use accountant='pld'")


@dissect.register(RandomAllocation)
def _(event: RandomAllocation) -> tuple[DpEvent, ...]:
    """To anyone who knows the step, it is one Gaussian answer."""
    return (GaussianDpEvent(event.noise_multiplier),)


# -- sums of log-normals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spread:
    """A variable with `masses` at `values`, from 0 upwards, that is at least as spread out as the sum of `terms` W.

    `lost` is how much of its mean lies above the last value: E[(S − max)₊], all of it together.
    """

    terms: int
    values: Array
    masses: Array
    lost: float

    def remove(self, epsilon: float) -> float:
        """Return an upper bound of E[(S/t − e^ε)₊]."""
        above = np.maximum(self.values / self.terms - math.exp(epsilon), 0.0)
        return float(above @ self.masses + self.lost / self.terms)

    def add(self, epsilon: float) -> float:
        """Return an upper bound of E[(1 − e^ε·S/t)₊]."""
        return float(np.maximum(1 - math.exp(epsilon) * self.values / self.terms, 0.0) @ self.masses)


@lru_cache(maxsize=64)
def find_sum(terms: int, noise: float, fineness: float = FINENESS) -> Spread:
    """Find the sum of `terms` log-normals of mean 1, by doubling."""
    power, total = _spread_one(noise, fineness), None
    while True:
        if terms & 1:
            total = power if total is None else _add(total, power, noise, fineness)
        terms >>= 1
        if not terms:
            assert total is not None
            return total
        power = _add(power, power, noise, fineness)


def _spread_one(noise: float, fineness: float) -> Spread:
    """Put W on its grid: a cell's mass is its mass under Q, and its mean is its mass under a shift by 1."""
    grid = _lay_grid(1, noise, fineness)
    with np.errstate(divide="ignore"):
        edges = noise * np.log(grid) + 0.5 / noise  # where W reaches a point, in deviations of x
    mass, mean = _between(edges), _between(edges - 1 / noise)
    up = np.clip((mean - mass * grid[:-1]) / np.diff(grid), 0.0, mass)
    masses = np.append(mass - up, 0.0) + np.insert(up, 0, 0.0)
    beyond = float(ndtr(-edges[-1]))
    masses[-1] += beyond
    return Spread(1, grid, masses, max(float(ndtr(1 / noise - edges[-1])) - beyond * grid[-1], 0.0))


def _add(one: Spread, other: Spread, noise: float, fineness: float) -> Spread:
    """Add two independent variables, on a new grid."""
    one, other = (_thin(one), _thin(other)) if one is not other else (_thin(one),) * 2
    if one is other:  # each pair once
        first, second = np.triu_indices(len(one.values))
        values = one.values[first] + one.values[second]
        masses = one.masses[first] * one.masses[second] * np.where(first == second, 1.0, 2.0)
    else:
        values = np.add.outer(one.values, other.values).ravel()
        masses = np.multiply.outer(one.masses, other.masses).ravel()
    terms = one.terms + other.terms
    grid = _lay_grid(terms, noise, fineness)
    moved, lost = _move(values, masses, grid)
    held = moved > 0
    held[[0, -1]] = True
    return Spread(terms, grid[held], moved[held], one.lost + other.lost + lost)


def _thin(spread: Spread) -> Spread:
    """Keep at most `MOST` points, moving the rest onto them as onto any other grid."""
    if len(spread.values) <= MOST:
        return spread
    grid = spread.values[np.linspace(0, len(spread.values) - 1, MOST).round().astype(int)]
    masses, _ = _move(spread.values, spread.masses, grid)
    return Spread(spread.terms, grid, masses, spread.lost)


def _move(values: Array, masses: Array, grid: Array) -> tuple[Array, float]:
    """Move every value to its two neighbours on the grid and keep its mean; return the mean above the last point."""
    lost = float(np.maximum(values - grid[-1], 0.0) @ masses)
    values = np.minimum(values, grid[-1])
    below = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    up = masses * np.clip((values - grid[below]) / (grid[below + 1] - grid[below]), 0.0, 1.0)
    moved: Array = np.zeros(len(grid))
    moved += np.bincount(below, masses - up, len(grid))
    moved += np.bincount(below + 1, up, len(grid))
    return moved, lost


def _lay_grid(terms: int, noise: float, fineness: float) -> Array:
    """Choose points for a sum: evenly about its mean, then ever sparser; in ratios where it is skewed; and zero.

    Any points are safe; these keep the loss of precision small.
    """
    deviation = math.sqrt(terms * math.expm1(noise**-2))
    highest = terms + WIDEST * deviation + math.exp((0.5 + DEVIATIONS * noise) / noise**2)
    # If the sum is below a value, all of its terms are.
    lowest = math.exp((noise * float(ndtri(UNLIKELY ** (1 / terms))) - 0.5) / noise**2)
    lowest = max(lowest, terms - WIDEST * deviation)
    ends = [math.asinh((end - terms) / deviation) / fineness for end in (lowest, highest)]
    points = terms + deviation * np.sinh(np.arange(math.floor(ends[0]), math.ceil(ends[1]) + 1) * fineness)
    if deviation > terms / WIDEST:
        ratio = 2 * fineness / (noise * math.sqrt(terms))
        steps = math.floor(min(math.log(lowest / terms), 0.0) / ratio)
        points = np.append(points, terms * np.exp(np.arange(steps, 1) * ratio))
    return np.unique(np.append(points[points > 0], 0.0))


def _between(points: Array) -> Array:
    """Standard normal mass between consecutive points, exact to rounding in either tail."""
    below, above = ndtr(points), ndtr(-points)
    masses: Array = np.where(points[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return masses


# -- losses -----------------------------------------------------------------------------------------------------------


def _to_losses(total: Spread, interval: float) -> PrivacyLossDistribution:
    """Move the sum onto the grid of losses, with the masses that P and Q give to each: both directions of one pair.

    Moving S keeps its mass and its mean, which are the masses that Q and P give to a cell. So this is connect-the-dots.
    """
    smallest = total.values[1] if len(total.values) > 1 else total.values[0]
    first = math.floor(math.log(smallest / total.terms) / interval)
    last = max(math.ceil(math.log(total.values[-1] / total.terms) / interval), first + 1)
    ratios = np.exp(np.arange(first, last + 1) * interval)
    masses, lost = _move(total.values, total.masses, np.insert(total.terms * ratios, 0, 0.0))
    lifted, zero = masses[1:] * (1 + ROUNDING * total.terms), float(masses[0]) + SHIFT
    escaped = (total.lost + lost) / total.terms + SHIFT
    remove = DensePLDPmf(interval, first, lifted * ratios, escaped, True)
    add = DensePLDPmf(interval, -last, lifted[::-1], zero, True)
    return PrivacyLossDistribution(remove, add)
