"""Prices where a privacy loss distribution is hopeless: hardly any noise, or a δ below what a transform resolves.

**Quiet events.** The loss of a Gaussian answer reaches about 1/(2σ²): with σ = 1e-8 no grid holds it. Above `MOST_LOSS`
events are priced in closed form instead, and composed with the rest by adding up ε and δ:

- a Gaussian answer is N(μ, 1) against N(0, 1) with μ = 1/σ, and all of them together are one Gaussian with
  μ² = Σ μᵢ² (Dong, Roth & Su 2022, Cor. 3.3). On a draw it costs no more than on all records: the divergence is
  jointly convex and the draw only mixes in an answer that reveals nothing;
- an answer that is ε-DP by itself (Laplace noise, a noisy minimum) adds its ε;
- an attempt (`Erasure`) is a function of its proposal and of its test's verdict: it costs no more than both.

**Small δ.** The transform leaves 1e-15 of mass whose loss is unknown. Rényi accounting, and the closed form where all
events are Gaussian, hold at every δ: `bounds` gives what they say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, gaussians
from sordino.accounting.gdp import gaussian_delta, gaussian_epsilon
from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.accounting.rdp import RdpPricing, merged_leaf, required_noise
from sordino.errors import InvalidInput

MOST_LOSS = 1e6
"""Events whose typical loss is above this are quiet."""
_TAIL = 12.0
"""So many deviations of the noise a distribution may reach."""

Counted = Sequence[tuple[DpEvent, int]]


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


def sort_out(events: Counted, adjacency: Adjacency) -> tuple[Quiet, list[tuple[DpEvent, int]]]:
    """The quiet ones of these plain `events`, and the others."""
    precision = pure = 0.0
    others: list[tuple[DpEvent, int]] = []
    for event, count in events:
        if widest_loss(event, adjacency) <= MOST_LOSS:
            others.append((event, count))
            continue
        for part in _parts(event):
            if isinstance(part, GaussianDpEvent):
                precision += count * _precision(part, adjacency)
            elif isinstance(part, LaplaceDpEvent):
                pure += count / float(part.noise_multiplier)
            elif isinstance(part, NoisyMinimum):
                pure += count * part.epsilon
            else:
                others.append((part, count))
    return Quiet(precision, pure), others


def widest_loss(event: DpEvent, adjacency: Adjacency) -> float:
    """About how far the loss of one `event` reaches; 0 where it is known to be small, ∞ never.

    An event without noise at all has no loss to put on a grid; its distribution is one point at infinity.
    """
    return max((_widest(part, adjacency) for part in _parts(event)), default=0.0)


def _widest(part: DpEvent, adjacency: Adjacency) -> float:
    if isinstance(part, GaussianDpEvent):
        precision = _precision(part, adjacency) if 0 < part.noise_multiplier < math.inf else 0.0
        return min(precision / 2 + _TAIL * math.sqrt(precision), 1e308)
    if isinstance(part, LaplaceDpEvent):
        return min(1 / float(part.noise_multiplier), 1e308) if part.noise_multiplier > 0 else 0.0
    return part.epsilon if isinstance(part, NoisyMinimum) else 0.0


def _parts(event: DpEvent) -> Iterator[DpEvent]:
    """Events that together cost at least as much as `event`: without its draw, an attempt as proposal and verdict."""
    if isinstance(event, PoissonSampledDpEvent):
        yield from _parts(merged_leaf(event.event))
    elif isinstance(event, Erasure | AnnealedErasure) and event.noise_multiplier < math.inf:
        yield GaussianDpEvent(event.noise_multiplier)
        yield replace(event, noise_multiplier=math.inf)
    else:
        yield event


def _precision(event: GaussianDpEvent, adjacency: Adjacency) -> float:
    """μ², infinite where a double cannot hold it; replacing a record moves a sum twice as far as removing one."""
    noise = required_noise(event) / (2 if adjacency == "replace-one" else 1)
    return 1 / noise / noise


def bounds(events: Counted, delta: float, adjacency: Adjacency) -> Iterator[float]:
    """Every ε at `delta` that holds without a grid."""
    with suppress(InvalidInput):  # an event without a Rényi price
        yield RdpPricing().epsilon(events, delta, adjacency)
    if (quiet := _all_gaussian(events, adjacency)) is not None:
        yield quiet.epsilon(delta)


def delta_bounds(events: Counted, epsilon: float, adjacency: Adjacency) -> Iterator[float]:
    """Every δ at `epsilon` that holds without a grid."""
    with suppress(InvalidInput):
        yield RdpPricing().delta(events, epsilon, adjacency)
    if (quiet := _all_gaussian(events, adjacency)) is not None:
        yield quiet.delta(epsilon)


def _all_gaussian(events: Counted, adjacency: Adjacency) -> Quiet | None:
    """The one Gaussian that all events together are at most; None if any is of another kind."""
    moved = 4 if adjacency == "replace-one" else 1
    try:
        parts = [(noise, count) for rate, noise, count in gaussians(events, "closed") if rate > 0]
    except InvalidInput:
        return None
    if any(noise <= 0 for noise, _ in parts):
        return None
    return Quiet(math.fsum(count * moved / noise / noise for noise, count in parts))
