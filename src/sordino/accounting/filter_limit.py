"""Everything that one Rényi filter allows, as one event: the cost of a trial that chooses its noise as it goes.

Whatever the releases were and however they were chosen, together they are (α, B)-RDP (`sordino.accounting.filtered`).
That alone bounds the whole privacy profile, at every ε (docs/proofs/selection.md, "Trials under a filter"):

    δ(ε) ≤ 1 − e^(ε−B)              for ε ≤ ε₀ = B + log(1 − 1/α),
    δ(ε) ≤ e^((α−1)(ε₀−ε)) / α      beyond it.

The second line is the conversion of Canonne, Kamath & Steinke 2020, Prop. 12. The first is its tangent, in e^ε, through
the point (0, 1) that every profile begins in: both together are convex, and smooth where they meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from sordino.accounting.events import Adjacency, DpEvent, Events, unroll
from sordino.accounting.extremes import has_other_bounds, price_alone
from sordino.accounting.filtered import Filter, Filtered
from sordino.accounting.grids import INTERVAL, Array, connect_the_dots
from sordino.accounting.pld import pld
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.errors import InvalidInput

BELOW = 40.0
"""This far below ε₀, the divergence is 1 up to e^−40."""
SMALLEST = math.log(1e-20)
"""The profile is not followed to divergences below this."""
POINTS = 20_001


@dataclass(frozen=True)
class FilterLimit(DpEvent):
    """Everything that a filter at `order` lets pass until `limit`, known in advance, is reached."""

    order: float
    limit: float
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        self.filter  # noqa: B018 - refuses what is not a filter

    @property
    def filter(self) -> Filter:
        return Filter(self.order, self.limit, self.adjacency)

    def covers(self, events: Events) -> bool:
        """Whether all of `events`, in whatever order and for whatever reason they were chosen, pass this filter."""
        counter = self.filter
        parts = [part for event, count in events for part in unroll(event, count)]
        spent = math.fsum(
            count * counter.cost(event.event if isinstance(event, Filtered) else event) for event, count in parts
        )
        return spent <= self.limit


NAMES = {"filter-limit": FilterLimit}


@dataclass(frozen=True)
class FilterProfile:
    """δ(ε) of anything that is (`order`, `limit`)-RDP, the same in both directions."""

    order: float
    limit: float

    @property
    def bend(self) -> float:
        """ε₀, where the tangent touches."""
        return self.limit + math.log1p(-1 / self.order)

    @property
    def infinity(self) -> float:
        return 0.0

    @property
    def upper(self) -> float:
        """Where the divergence is `SMALLEST`."""
        return self.bend - (SMALLEST + math.log(self.order)) / (self.order - 1)

    @property
    def points(self) -> Array:
        below = np.linspace(self.bend - BELOW, self.bend, POINTS // 10, endpoint=False)
        return np.concatenate([below, np.linspace(self.bend, self.upper, POINTS)])

    def delta(self, epsilons: Array) -> Array:
        bend = self.bend
        tangent = -np.expm1(np.minimum(epsilons, bend) - self.limit)
        power = np.exp((self.order - 1) * (bend - np.maximum(epsilons, bend))) / self.order
        found: Array = np.where(epsilons <= bend, tangent, power)
        return found


def find_filter_profile(event: FilterLimit, adjacency: Adjacency) -> FilterProfile:
    """Return the profile of `event`, in both directions."""
    _require_same(event, adjacency)
    return FilterProfile(event.order, event.limit)


def _require_same(event: FilterLimit, adjacency: Adjacency) -> None:
    if event.adjacency != adjacency:
        raise InvalidInput(f"the filter limits {event.adjacency} adjacency, not {adjacency}: ask for that one")


@pld.register(FilterLimit)
def _(event: FilterLimit, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """Below ε₀ the profile is a straight line in e^ε: no loss lies there."""
    profile = find_filter_profile(event, adjacency)
    return PrivacyLossDistribution(connect_the_dots(profile.delta, profile.bend, profile.upper, interval))


@price_alone.register(FilterLimit)
def _(event: FilterLimit, delta: float, adjacency: Adjacency) -> float:
    _require_same(event, adjacency)
    return event.filter.epsilon(delta)


@has_other_bounds.register(FilterLimit)
def _(_event: FilterLimit) -> bool:
    return True


@rdp_curve.register(FilterLimit)
def _(event: FilterLimit, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """B up to α, because the divergence never falls with its order; beyond α nothing is known."""
    _require_same(event, adjacency)
    return np.where(np.asarray(orders, dtype=np.float64) <= event.order, event.limit, np.inf)
