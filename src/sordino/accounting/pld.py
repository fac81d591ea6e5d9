"""Privacy loss distributions of one event and of a whole run, and the ε and δ that follow: the default accountant.

`pld` can be extended: `pld.register(MyEvent)` gives a new event a price, and `sampled_pld.register(MyEvent)` prices it
on a Poisson draw. A handler returns a pessimistic dp_accounting `PrivacyLossDistribution` on the grid of the given
interval; `sordino.accounting.grids.connect_the_dots` makes one of any δ(ε) curve.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache, singledispatch
from typing import Any, Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from sordino.accounting import extremes, levels
from sordino.accounting.events import (
    Adjacency,
    ComposedDpEvent,
    DpEvent,
    Events,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    from_json,
    tally,
    to_json,
    unroll,
)
from sordino.accounting.grids import INTERVAL, LossGrid, Part, compose, count_points, sampled_gaussian
from sordino.accounting.rdp import merge_answers, require_noise, require_rate
from sordino.errors import InvalidInput

Counts = tuple[tuple[str, int], ...]
Ladders = tuple[levels.Ladder, ...]
Rungs = list[tuple[dict[int, str], tuple[levels.Charge, ...]]]

FINEST = 4.0**-8
NEGLIGIBLE = 1e-4
WIDEST = 2**20
MOST_POINTS = 2**19
"""Most points of one event, and of the composition; beyond them a coarser grid is used, which is pessimistic too."""
COARSENINGS = 4
UNCERTAIN = 1e-3
"""If the mass of unknown loss is more than this share of δ, bounds that need no grid are asked too."""
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


# -- one event --------------------------------------------------------------------------------------------------------


@singledispatch
def pld(event: DpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of one `event`, never below the true one."""
    raise _unpriced(event, adjacency, "pld")


@singledispatch
def sampled_pld(
    event: DpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of `event` applied to a Poisson draw with 0 < rate < 1."""
    raise _unpriced(PoissonSampledDpEvent(rate, event), adjacency, "sampled_pld")


@pld.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return distributions.identity(interval)


@pld.register(NonPrivateDpEvent)
def _(_event: NonPrivateDpEvent, _adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _unbounded(interval)


@pld.register(ComposedDpEvent)
@pld.register(SelfComposedDpEvent)
def _(event: DpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    total = distributions.identity(interval)
    for leaf, count in unroll(event):
        part = pld(leaf, adjacency, interval)
        if part.get_delta_for_epsilon(0.0) >= 1:
            return _unbounded(interval)
        total = total.compose(part.self_compose(count))
    return total


@pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _gaussian(require_noise(event), 1.0, adjacency, interval)


@pld.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _laplace(event, 1.0, adjacency, interval)


@pld.register(PoissonSampledDpEvent)
def _(event: PoissonSampledDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    rate = require_rate(event)
    if rate == 0:
        return distributions.identity(interval)
    if rate == 1:
        return pld(event.event, adjacency, interval)
    return sampled_pld(event.event, rate, adjacency, interval)


@sampled_pld.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _rate: float, _adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return distributions.identity(interval)


@sampled_pld.register(NonPrivateDpEvent)
def _(
    _event: NonPrivateDpEvent, _rate: float, _adjacency: Adjacency, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    return _unbounded(interval)


@sampled_pld.register(ComposedDpEvent)
@sampled_pld.register(SelfComposedDpEvent)
def _(event: DpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return sampled_pld(merge_answers(event), rate, adjacency, interval)


@sampled_pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _gaussian(require_noise(event), rate, adjacency, interval)


@sampled_pld.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _laplace(event, rate, adjacency, interval)


def _gaussian(noise: float, rate: float, adjacency: Adjacency, interval: float) -> PrivacyLossDistribution:
    if noise == 0:
        return _unbounded(interval)
    if math.isinf(noise):
        return distributions.identity(interval)
    if adjacency == "add-or-remove-one":
        return sampled_gaussian(noise, rate, interval)
    return distributions.from_gaussian_mechanism(
        noise, value_discretization_interval=interval, sampling_prob=rate, neighboring_relation=REPLACE_ONE
    )


def _laplace(event: LaplaceDpEvent, rate: float, adjacency: Adjacency, interval: float) -> PrivacyLossDistribution:
    noise = require_noise(event)
    if adjacency != "add-or-remove-one":
        raise _unpriced(event, adjacency, "pld")
    if noise == 0:
        return _unbounded(interval)
    return distributions.from_laplace_mechanism(noise, value_discretization_interval=interval, sampling_prob=rate)


def _unbounded(interval: float) -> PrivacyLossDistribution:
    return PrivacyLossDistribution.create_from_rounded_probability({0: 0.0}, 1.0, interval)


def _unpriced(event: DpEvent, adjacency: Adjacency, function: str) -> InvalidInput:
    return InvalidInput(
        f"event {event!r} has no {function} price under {adjacency} adjacency: "
        f"register a price with sordino.accounting.pricing.{function}.register"
    )


# -- a run ------------------------------------------------------------------------------------------------------------


class PldPricing:
    """A proven upper bound, and nearly exact: both directions of adjacency, every step composed.

    The grid is dp_accounting's (1e-4) and so are the prices, to 1e-6, except if the loss of a single event is not much
    larger than the grid. Rounding would then dominate (and RDP be smaller), so a finer grid is used.
    Edge cases: where a grid would be too long it is coarser; events with hardly any noise, and a δ below what the
    transform resolves, are priced by `sordino.accounting.extremes`. The answer takes seconds and bounded memory.
    """

    name = "pld"
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        """Return the smallest ε at which the larger of the two divergences is at most `delta`."""
        quiet, single, ladders = _sort_out(events, adjacency)
        if not quiet:
            return _epsilon(single, ladders, delta, adjacency)
        if not single and not ladders:
            return quiet.epsilon(delta)
        return quiet.epsilon(delta / 2) + _epsilon(single, ladders, delta / 2, adjacency)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        """Return the larger of the two divergences at `epsilon`."""
        quiet, single, ladders = _sort_out(events, adjacency)
        if quiet:  # the other events may lose what the quiet ones leave of ε
            spared = epsilon / 2
            return min(1.0, quiet.delta(epsilon - spared) + _delta(single, ladders, spared, adjacency))
        return _delta(single, ladders, epsilon, adjacency)


def _sort_out(events: Events, adjacency: Adjacency) -> tuple[extremes.Quiet, Counts, Ladders]:
    """Split into events with hardly any noise, events composed one by one, and ladders for rates with many noises."""
    plain = [leaf for event, count in events for leaf in unroll(event, count)]
    quiet, others = extremes.sort_out(plain, adjacency)
    single, ladders = levels.split(others, adjacency)
    return quiet, _merge_gaussians(tally(single)), ladders


@lru_cache(maxsize=4096)
def _epsilon(kinds: Counts, ladders: Ladders, delta: float, adjacency: Adjacency) -> float:
    if (alone := _price_alone(kinds, ladders, delta, adjacency)) is not None:
        return min([alone, *extremes.bounds(_restore_events(kinds, ladders), delta, adjacency)])
    sides = _compose(kinds, ladders, adjacency)
    found = max(side.epsilon(delta) for side in sides)
    if _asks_others(kinds) or any(side.infinity > UNCERTAIN * delta or side.interval > INTERVAL for side in sides):
        found = min([found, *extremes.bounds(_restore_events(kinds, ladders), delta, adjacency)])
    return found


def _delta(kinds: Counts, ladders: Ladders, epsilon: float, adjacency: Adjacency) -> float:
    if not ladders and (beside := extremes.find_beside(_restore_events(kinds, ladders), adjacency)) is not None:
        chance, quiet = beside
        return min(1.0, chance + (1.0 - chance) * quiet.delta(epsilon))
    sides = _compose(kinds, ladders, adjacency)
    found = min(1.0, max(side.delta(epsilon) for side in sides))
    if _asks_others(kinds) or any(side.infinity > UNCERTAIN * found or side.interval > INTERVAL for side in sides):
        found = min([found, *extremes.delta_bounds(_restore_events(kinds, ladders), epsilon, adjacency)])
    return found


def _price_alone(kinds: Counts, ladders: Ladders, delta: float, adjacency: Adjacency) -> float | None:
    """Return a price that needs no grid: of a single event, or of Gaussians beside all-or-nothing events."""
    if ladders:
        return None
    if len(kinds) == 1 and kinds[0][1] == 1:
        return extremes.price_alone(from_json(kinds[0][0]), delta, adjacency)
    return extremes.price_beside(_restore_events(kinds, ladders), delta, adjacency)


def _asks_others(kinds: Counts) -> bool:
    return any(extremes.has_other_bounds(from_json(text)) for text, _ in kinds)


def compose_sides(events: Events, adjacency: Adjacency) -> tuple[LossGrid, ...]:
    """Compose the loss of all `events` when a record is removed and when one is added; one grid if both are equal."""
    quiet, single, ladders = _sort_out(events, adjacency)
    return (LossGrid(0, np.zeros(1), 1.0),) if quiet else _compose(single, ladders, adjacency)


def _restore_events(kinds: Counts, ladders: Ladders) -> list[tuple[DpEvent, int]]:
    """Return the events; those of a ladder each as the rung with less noise."""
    single = [(from_json(text), count) for text, count in kinds]
    rungs = [(ladder.events()[charge.rung + 1], charge.count) for ladder in ladders for charge in ladder.charges]
    return [*single, *rungs]


@lru_cache(maxsize=8)
def _compose(kinds: Counts, ladders: Ladders, adjacency: Adjacency) -> tuple[LossGrid, ...]:
    rungs = [({rung: to_json(event) for rung, event in ladder.events().items()}, ladder.charges) for ladder in ladders]
    interval = _choose_interval([*kinds, *_rung_counts(rungs)], adjacency)
    for _ in range(COARSENINGS):
        sides = _sides(kinds, rungs, adjacency, interval)
        excess = max(count_points(parts) for parts in sides) / MOST_POINTS
        if excess <= 1:
            return tuple(compose(parts) for parts in sides)
        interval *= 4 ** math.ceil(math.log(excess, 4))
    return (LossGrid(0, np.zeros(1), 1.0),)  # so many events that every grid is too coarse for one of them


def _sides(kinds: Counts, rungs: Rungs, adjacency: Adjacency, interval: float) -> list[list[tuple[Part, int]]]:
    """Return what to compose when a record is removed and when one is added; only once if both are the same."""
    sides = []
    for side in (0, 1):
        parts: list[tuple[Part, int]] = [(_grids(text, adjacency, interval)[side], count) for text, count in kinds]
        for texts, charges in rungs:
            grids = {rung: _grids(text, adjacency, interval)[side] for rung, text in texts.items()}
            parts.append((levels.Blend(grids, charges), 1))
        sides.append(parts)
        if not rungs and all(operator.is_(*_grids(text, adjacency, interval)) for text, _ in kinds):
            break
    return sides


def _rung_counts(rungs: Rungs) -> Iterator[tuple[str, int]]:
    for texts, charges in rungs:
        for rung in texts:
            yield texts[rung], sum(charge.count for charge in charges if charge.rung == rung)


def _choose_interval(kinds: Sequence[tuple[str, int]], adjacency: Adjacency) -> float:
    """Choose one grid: INTERVAL, or a tenth of the smallest typical loss s that is below two intervals and matters.

    A grid h adds about n·h·s to the variance of n events whose s is below it. Events whose share of the whole is below
    NEGLIGIBLE do not matter. The widest distribution must not take more than WIDEST points.
    """
    typical = {text: _typical_loss(text, adjacency) for text, _ in kinds}
    variance = sum(count * typical[text] ** 2 for text, count in kinds)
    reach = max((_reach(text, adjacency) for text, _ in kinds), default=INTERVAL)
    if reach > INTERVAL:
        return reach
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
    return 2.5 * max(grid.delta(0.0) for grid in _grids(text, adjacency, _reach(text, adjacency)))


def _reach(text: str, adjacency: Adjacency) -> float:
    """Return the finest grid, from INTERVAL upwards, that holds one event in MOST_POINTS."""
    interval = INTERVAL
    while 2 * extremes.widest_loss(from_json(text), adjacency) > MOST_POINTS * interval:
        interval *= 4
    return interval


@lru_cache(maxsize=128)
def _grids(text: str, adjacency: Adjacency, interval: float) -> tuple[LossGrid, LossGrid]:
    """Return the loss when a record is removed and when one is added; the same object if they are equal."""
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


def _merge_gaussians(counts: Counts) -> Counts:
    """Replace all unsampled Gaussians by the one that they compose to, exactly: σ = (Σ nᵢ σᵢ⁻²)^(-1/2)."""
    parts = [(from_json(text), count) for text, count in counts]
    plain = [(event, count) for event, count in parts if isinstance(event, GaussianDpEvent)]
    if not plain:
        return counts
    rest = [(event, count) for event, count in parts if not isinstance(event, GaussianDpEvent)]
    together = merge_answers(ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in plain]))
    return tuple(sorted((to_json(event), count) for event, count in [*rest, (together, 1)]))
