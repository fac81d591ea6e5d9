"""ε and δ from composed privacy loss distributions: the default accountant."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from sordino.accounting import levels
from sordino.accounting.adjacency import Adjacency
from sordino.accounting.composition import INTERVAL, LossGrid, Part, compose
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    SelfComposedDpEvent,
    from_json,
    leaves,
    tally,
    to_json,
)
from sordino.accounting.pld import pld
from sordino.accounting.rdp import merged_leaf
from sordino.errors import InvalidInput

Counts = tuple[tuple[str, int], ...]
Ladders = tuple[levels.Ladder, ...]

FINEST = 4.0**-8
NEGLIGIBLE = 1e-4
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
        return _epsilon(*_sorted_out(events, adjacency), delta, adjacency)

    def delta(self, events: Sequence[tuple[DpEvent, int]], epsilon: float, adjacency: Adjacency) -> float:
        """The larger of the two divergences at `epsilon`."""
        sides = _composed(*_sorted_out(events, adjacency), adjacency)
        return min(1.0, max(side.delta(epsilon) for side in sides))


def _sorted_out(events: Sequence[tuple[DpEvent, int]], adjacency: Adjacency) -> tuple[Counts, Ladders]:
    """What is composed one by one, and the ladders of the rates with many noises, which need no text of each event."""
    single, ladders = levels.split([leaf for event, count in events for leaf in leaves(event, count)], adjacency)
    return _one_gaussian(tally(single)), ladders


@lru_cache(maxsize=4096)
def _epsilon(kinds: Counts, ladders: Ladders, delta: float, adjacency: Adjacency) -> float:
    return max(side.epsilon(delta) for side in _composed(kinds, ladders, adjacency))


@lru_cache(maxsize=8)
def _composed(kinds: Counts, ladders: Ladders, adjacency: Adjacency) -> tuple[LossGrid, ...]:
    rungs = [({rung: to_json(event) for rung, event in ladder.events().items()}, ladder.charges) for ladder in ladders]
    interval = _interval([*kinds, *_rung_counts(rungs)], adjacency)
    composed = []
    for side in (0, 1):
        parts: list[tuple[Part, int]] = [(_grids(text, adjacency, interval)[side], count) for text, count in kinds]
        for texts, charges in rungs:
            grids = {rung: _grids(text, adjacency, interval)[side] for rung, text in texts.items()}
            parts.append((levels.Blend(grids, charges), 1))
        composed.append(compose(parts))
        if not rungs and all(operator.is_(*_grids(text, adjacency, interval)) for text, _ in kinds):
            break  # the other direction is the same
    return tuple(composed)


def _rung_counts(rungs: Sequence[tuple[dict[int, str], Sequence[levels.Charge]]]) -> Iterator[tuple[str, int]]:
    for texts, charges in rungs:
        for rung in texts:
            yield texts[rung], sum(charge.count for charge in charges if charge.rung == rung)


def _interval(kinds: Sequence[tuple[str, int]], adjacency: Adjacency) -> float:
    """The grid for all: INTERVAL, or a tenth of the smallest typical loss s that is below two intervals and matters.

    A grid h adds about n·h·s to the variance of n events whose s is below it; events whose share of the whole is below
    NEGLIGIBLE do not matter. The widest distribution must not take more than WIDEST points.
    """
    typical = {text: _typical_loss(text, adjacency) for text, _ in kinds}
    variance = sum(count * typical[text] ** 2 for text, count in kinds)
    interval = INTERVAL
    for text, count in kinds:
        if 0 < typical[text] < 2 * INTERVAL and count * INTERVAL * typical[text] > NEGLIGIBLE * variance:
            while interval > typical[text] / 10 and interval > INTERVAL * FINEST:
                interval /= 4
    widest = max((grid.width for text, _ in kinds for grid in _grids(text, adjacency, INTERVAL)), default=0.0)
    while widest / interval > WIDEST and interval < INTERVAL:
        interval *= 4
    return interval


def _typical_loss(text: str, adjacency: Adjacency) -> float:
    """δ(0) is exact on every grid; for a loss that is nearly normal with deviation s it is s/√(2π)."""
    return 2.5 * max(grid.delta(0.0) for grid in _grids(text, adjacency, INTERVAL))


@lru_cache(maxsize=256)
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
