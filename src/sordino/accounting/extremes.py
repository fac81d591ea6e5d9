"""Prices where a privacy loss distribution does not work: hardly any noise, or a δ below what a transform resolves.

**Quiet events.** The loss of a Gaussian answer reaches about 1/(2σ²): with σ = 1e-8 no grid holds it. Above `MOST_LOSS`
events are priced in closed form instead, and composed with the rest by adding up ε and δ:

- a Gaussian answer is N(μ, 1) against N(0, 1) with μ = 1/σ, and all of them together are one Gaussian with
  μ² = Σ μᵢ² (Dong, Roth & Su 2022, Cor. 3.3). On a draw it costs no more than on all records: the divergence is
  jointly convex and the draw only mixes in an answer that reveals nothing;
- an answer that is ε-DP by itself (Laplace noise) adds its ε;
- an event that is a function of several costs no more than all of them.

Both can be extended: `price_quiet.register(MyEvent)` gives a new event a closed form, and `dissect.register(MyEvent)`
says of which events it is a function.

**All or nothing.** An event that reveals everything with probability p and otherwise nothing, together with events with
the curve δ(ε), gives p + (1 - p)·δ(ε): with Gaussians no grid is needed (`price_beside`).

**Small δ.** The transform leaves 1e-15 of mass whose loss is unknown. Rényi accounting, and the closed form where all
events are Gaussian, hold at every δ: `bounds` gives what they say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import singledispatch

from sordino.accounting.events import (
    Adjacency,
    DpEvent,
    Events,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
)
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon, unroll_gaussians
from sordino.accounting.rdp import RdpPricing, merge_answers
from sordino.errors import InvalidInput

MOST_LOSS = 1e6
"""Events whose typical loss is above this are quiet."""
_TAIL = 12.0
"""How many deviations of the noise a distribution may reach."""


@dataclass(frozen=True)
class Quiet:
    """All quiet events together: one Gaussian with μ² = `precision` beside answers that are `pure`-DP."""

    precision: float = 0.0
    pure: float = 0.0

    def epsilon(self, delta: float) -> float:
        return self.pure + gaussian_epsilon(math.sqrt(self.precision), delta)

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(math.sqrt(self.precision), epsilon - self.pure) if epsilon >= self.pure else 1.0

    def __bool__(self) -> bool:
        return self.precision > 0 or self.pure > 0


@singledispatch
def price_quiet(_event: DpEvent, _count: int, _adjacency: Adjacency) -> Quiet | None:
    """Return the price of `count` times this event in closed form, if it has one; an answer without noise has none."""
    return None


@price_quiet.register(GaussianDpEvent)
def _(event: GaussianDpEvent, count: int, adjacency: Adjacency) -> Quiet | None:
    """μ² = 1/σ², infinite where a double cannot hold it; replacing a record moves a sum twice as far."""
    noise, moved = float(event.noise_multiplier), 4 if adjacency == "replace-one" else 1
    return Quiet(precision=count * (moved / noise / noise)) if noise > 0 else None


@price_quiet.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, count: int, _adjacency: Adjacency) -> Quiet | None:
    return Quiet(pure=count / float(event.noise_multiplier)) if event.noise_multiplier > 0 else None


@singledispatch
def dissect(event: DpEvent) -> tuple[DpEvent, ...]:
    """Return events that together cost at least as much as `event`; by default the event itself."""
    return (event,)


@dissect.register(PoissonSampledDpEvent)
def _(event: PoissonSampledDpEvent) -> tuple[DpEvent, ...]:
    return dissect(merge_answers(event.event))


@singledispatch
def chance_of_all(_event: DpEvent, _adjacency: Adjacency) -> float | None:
    """Return the probability with which this event reveals everything, if it reveals nothing otherwise."""
    return None


def find_beside(events: Events, adjacency: Adjacency) -> tuple[float, Quiet] | None:
    """Return the chance that everything is revealed, and the Gaussian beside it, if all events are of these kinds."""
    whole = [(chance, count) for event, count in events if (chance := chance_of_all(event, adjacency)) is not None]
    others = [(event, count) for event, count in events if chance_of_all(event, adjacency) is None]
    plain = bool(others) and all(isinstance(event, GaussianDpEvent) for event, _ in others)  # on all records
    quiet = _all_gaussian(others, adjacency) if whole and plain else None
    if quiet is None:
        return None
    return -math.expm1(math.fsum(count * math.log1p(-chance) for chance, count in whole)), quiet


def price_beside(events: Events, delta: float, adjacency: Adjacency) -> float | None:
    """Return the ε at `delta` in closed form, if `find_beside` finds one."""
    if (found := find_beside(events, adjacency)) is None:
        return None
    chance, quiet = found
    left = (delta - chance) / (1.0 - chance)
    return quiet.epsilon(left) if left > 0 else math.inf


@singledispatch
def has_other_bounds(_event: DpEvent) -> bool:
    """Whether a bound without a grid may be smaller at any δ, so that it must always be asked too."""
    return False


@singledispatch
def price_alone(_event: DpEvent, _delta: float, _adjacency: Adjacency) -> float | None:
    """Return the ε at δ of this event alone, if it is known without a grid."""
    return None


def sort_out(events: Events, adjacency: Adjacency) -> tuple[Quiet, list[tuple[DpEvent, int]]]:
    """Split these plain `events` into the quiet ones and the others."""
    precision = pure = 0.0
    others: list[tuple[DpEvent, int]] = []
    for event, count in events:
        if widest_loss(event, adjacency) <= MOST_LOSS:
            others.append((event, count))
            continue
        for part in dissect(event):
            quiet = price_quiet(part, count, adjacency)
            if quiet is None:
                others.append((part, count))
            else:
                precision, pure = precision + quiet.precision, pure + quiet.pure
    return Quiet(precision, pure), others


def widest_loss(event: DpEvent, adjacency: Adjacency) -> float:
    """Estimate how far the loss of one `event` reaches: 0 if it is known to be small, and never ∞.

    An event without any noise has no loss to put on a grid; its distribution is one point at infinity.
    """
    parts = [price_quiet(part, 1, adjacency) or Quiet() for part in dissect(event)]
    reaches = [part.precision / 2 + _TAIL * math.sqrt(part.precision) + part.pure for part in parts]
    return max((min(reach, 1e308) for reach in reaches), default=0.0)


def bounds(events: Events, delta: float, adjacency: Adjacency) -> Iterator[float]:
    """Yield every ε at `delta` that holds without a grid."""
    with suppress(InvalidInput):  # an event without a Rényi price
        yield RdpPricing().epsilon(events, delta, adjacency)
    if (quiet := _all_gaussian(events, adjacency)) is not None:
        yield quiet.epsilon(delta)


def delta_bounds(events: Events, epsilon: float, adjacency: Adjacency) -> Iterator[float]:
    """Yield every δ at `epsilon` that holds without a grid."""
    with suppress(InvalidInput):
        yield RdpPricing().delta(events, epsilon, adjacency)
    if (quiet := _all_gaussian(events, adjacency)) is not None:
        yield quiet.delta(epsilon)


def _all_gaussian(events: Events, adjacency: Adjacency) -> Quiet | None:
    """Return one Gaussian that costs at least as much as all events together; None if any is of another kind."""
    moved = 4 if adjacency == "replace-one" else 1
    try:
        parts = [(noise, count) for rate, noise, count in unroll_gaussians(events, "closed") if rate > 0]
    except InvalidInput:
        return None
    if any(noise <= 0 for noise, _ in parts):
        return None
    return Quiet(math.fsum(count * moved / noise / noise for noise, count in parts))
