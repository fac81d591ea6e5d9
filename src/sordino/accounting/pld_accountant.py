"""ε and δ from composed privacy loss distributions: the default accountant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.composition import INTERVAL, LossGrid, compose
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    SelfComposedDpEvent,
    from_json,
    tally,
    to_json,
)
from sordino.accounting.pld import pld
from sordino.accounting.rdp import merged_leaf
from sordino.errors import InvalidInput

Counts = tuple[tuple[str, int], ...]

FINEST = 4.0**-8
WIDEST = 2**20


class PldPricing:
    """A proven upper bound, and nearly exact: both directions of adjacency, every step composed.

    The grid is dp_accounting's (1e-4) and so are the prices, to 1e-6, except where the loss of a single event is not
    much larger than the grid: rounding would then dominate (and RDP be smaller), so that a finer grid is used.
    """

    name = "pld"
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Sequence[tuple[DpEvent, int]], delta: float, adjacency: Adjacency) -> float:
        """The smallest ε at which the larger of the two divergences is at most `delta`."""
        return _epsilon(_one_gaussian(tally(events)), delta, adjacency)

    def delta(self, events: Sequence[tuple[DpEvent, int]], epsilon: float, adjacency: Adjacency) -> float:
        """The larger of the two divergences at `epsilon`."""
        sides = _composed(_one_gaussian(tally(events)), adjacency)
        return min(1.0, max(side.delta(epsilon) for side in sides))


@lru_cache(maxsize=4096)
def _epsilon(counts: Counts, delta: float, adjacency: Adjacency) -> float:
    return max(side.epsilon(delta) for side in _composed(counts, adjacency))


@lru_cache(maxsize=8)
def _composed(counts: Counts, adjacency: Adjacency) -> tuple[LossGrid, ...]:
    interval = min((_fitting_interval(text, adjacency) for text, _ in counts), default=INTERVAL)
    widest = max((_width(text, adjacency) for text, _ in counts), default=0.0)
    while widest / interval > WIDEST and interval < INTERVAL:
        interval *= 4
    parts = [(_grids(text, adjacency, interval), count) for text, count in counts]
    if all(remove is add for (remove, add), _ in parts):
        return (compose([(remove, count) for (remove, _), count in parts]),)
    return tuple(compose([(grids[side], count) for grids, count in parts]) for side in (0, 1))


def _fitting_interval(text: str, adjacency: Adjacency) -> float:
    """The grid for one event: INTERVAL, or a tenth of its typical loss if that is below two intervals.

    δ(0) is exact on every grid. For a loss that is nearly normal with deviation s, δ(0) = s/√(2π).
    """
    typical = 2.5 * max(grid.delta(0.0) for grid in _grids(text, adjacency, INTERVAL))
    interval = INTERVAL
    if 0 < typical < 2 * INTERVAL:
        while interval > typical / 10 and interval > INTERVAL * FINEST:
            interval /= 4
    return interval


def _width(text: str, adjacency: Adjacency) -> float:
    return max(len(grid.probabilities) * grid.interval for grid in _grids(text, adjacency, INTERVAL))


@lru_cache(maxsize=64)
def _grids(text: str, adjacency: Adjacency, interval: float) -> tuple[LossGrid, LossGrid]:
    """The loss when a record is removed and when one is added: the same object where they are equal."""
    distribution = pld(from_json(text), adjacency, interval)
    # dp_accounting has no public way to read the masses; this is the one place that looks inside.
    remove = _read(distribution._pmf_remove.to_dense_pmf(), interval)
    return remove, remove if distribution._symmetric else _read(distribution._pmf_add.to_dense_pmf(), interval)


def _read(pmf: Any, interval: float) -> LossGrid:
    if pmf._discretization != interval or not pmf._pessimistic_estimate:
        raise InvalidInput(
            f"PLD with interval {pmf._discretization} cannot be composed: build it pessimistic at {interval}"
        )
    return LossGrid(int(pmf._lower_loss), pmf._probs, float(pmf._infinity_mass), interval)


def _one_gaussian(counts: Counts) -> Counts:
    """Replace all unsampled Gaussians by the one that they compose to, exactly: σ = (Σ nᵢ σᵢ⁻²)^(-1/2)."""
    parts = [(from_json(text), count) for text, count in counts]
    plain = [(event, count) for event, count in parts if isinstance(event, GaussianDpEvent)]
    if not plain:
        return counts
    rest = [(event, count) for event, count in parts if not isinstance(event, GaussianDpEvent)]
    together = merged_leaf(ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in plain]))
    return tuple(sorted((to_json(event), count) for event, count in [*rest, (together, 1)]))
