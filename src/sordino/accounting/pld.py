"""Privacy loss distributions: from an event type to the PLD of one such event.

`pld` is open: `pld.register(MyEvent)` gives a new event a price, `sampled_pld.register(MyEvent)` the same event on a
Poisson draw. A handler returns a pessimistic dp_accounting `PrivacyLossDistribution` on the grid `INTERVAL`; the
distributions of Gaussian and Laplace noise are dp_accounting's own (connect-the-dots, Doroshenko et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, singledispatch
from typing import Literal

from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.composition import INTERVAL, LossGrid, compose
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    from_json,
    leaves,
    tally,
    to_json,
)
from sordino.accounting.rdp import merged_leaf, required_noise, required_rate
from sordino.errors import InvalidInput

RELATIONS: dict[Adjacency, NeighboringRelation] = {
    "add-or-remove-one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


@singledispatch
def pld(event: DpEvent, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The privacy loss distribution of one `event`, never below the true one."""
    raise _unpriced(event, adjacency, "pld")


@singledispatch
def sampled_pld(event: DpEvent, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The privacy loss distribution of `event` applied to a Poisson draw with 0 < rate < 1."""
    raise _unpriced(PoissonSampledDpEvent(rate, event), adjacency, "sampled_pld")


@pld.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _adjacency: Adjacency) -> PrivacyLossDistribution:
    return distributions.identity(INTERVAL)


@pld.register(NonPrivateDpEvent)
def _(_event: NonPrivateDpEvent, _adjacency: Adjacency) -> PrivacyLossDistribution:
    return _unbounded()


@pld.register(ComposedDpEvent)
@pld.register(SelfComposedDpEvent)
def _(event: DpEvent, adjacency: Adjacency) -> PrivacyLossDistribution:
    total = distributions.identity(INTERVAL)
    for leaf, count in leaves(event):
        total = total.compose(pld(leaf, adjacency).self_compose(count))
    return total


@pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, adjacency: Adjacency) -> PrivacyLossDistribution:
    return _gaussian(required_noise(event), 1.0, adjacency)


@pld.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, adjacency: Adjacency) -> PrivacyLossDistribution:
    return _laplace(event, 1.0, adjacency)


@pld.register(PoissonSampledDpEvent)
def _(event: PoissonSampledDpEvent, adjacency: Adjacency) -> PrivacyLossDistribution:
    rate = required_rate(event)
    if rate == 0:
        return distributions.identity(INTERVAL)
    if rate == 1:
        return pld(event.event, adjacency)
    return sampled_pld(event.event, rate, adjacency)


@sampled_pld.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _rate: float, _adjacency: Adjacency) -> PrivacyLossDistribution:
    return distributions.identity(INTERVAL)


@sampled_pld.register(NonPrivateDpEvent)
def _(_event: NonPrivateDpEvent, _rate: float, _adjacency: Adjacency) -> PrivacyLossDistribution:
    return _unbounded()


@sampled_pld.register(ComposedDpEvent)
@sampled_pld.register(SelfComposedDpEvent)
def _(event: DpEvent, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    return sampled_pld(merged_leaf(event), rate, adjacency)


@sampled_pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    return _gaussian(required_noise(event), rate, adjacency)


@sampled_pld.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    return _laplace(event, rate, adjacency)


class PldPricing:
    """ε and δ from the composed privacy loss distribution, both directions of adjacency. A proven upper bound."""

    name = "pld"
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Sequence[tuple[DpEvent, int]], delta: float, adjacency: Adjacency) -> float:
        return _epsilon(_one_gaussian(tally(events)), delta, adjacency)

    def delta(self, events: Sequence[tuple[DpEvent, int]], epsilon: float, adjacency: Adjacency) -> float:
        counts = _one_gaussian(tally(events))
        return min(1.0, max(side.delta(epsilon) for side in _composed(counts, adjacency)))


@lru_cache(maxsize=4096)
def _epsilon(counts: tuple[tuple[str, int], ...], delta: float, adjacency: Adjacency) -> float:
    return max(side.epsilon(delta) for side in _composed(counts, adjacency))


@lru_cache(maxsize=8)
def _composed(counts: tuple[tuple[str, int], ...], adjacency: Adjacency) -> tuple[LossGrid, ...]:
    parts = [(_grids(text, adjacency), count) for text, count in counts]
    if all(remove is add for (remove, add), _ in parts):
        return (compose([(remove, count) for (remove, _), count in parts]),)
    return tuple(compose([(grids[side], count) for grids, count in parts]) for side in (0, 1))


@lru_cache(maxsize=256)
def _grids(text: str, adjacency: Adjacency) -> tuple[LossGrid, LossGrid]:
    """The loss when a record is removed and when one is added: the same object where they are equal."""
    distribution = pld(from_json(text), adjacency)
    # dp_accounting has no public way to read the masses; this is the one place that looks inside.
    remove = _read(distribution._pmf_remove.to_dense_pmf())
    return remove, remove if distribution._symmetric else _read(distribution._pmf_add.to_dense_pmf())


def _read(pmf: distributions.pld_pmf.DensePLDPmf) -> LossGrid:
    if pmf._discretization != INTERVAL or not pmf._pessimistic_estimate:
        raise InvalidInput(
            f"PLD with interval {pmf._discretization} cannot be composed: build it pessimistic at {INTERVAL}"
        )
    return LossGrid(int(pmf._lower_loss), pmf._probs, float(pmf._infinity_mass))


def _one_gaussian(counts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Replace all unsampled Gaussians by the one that they compose to, exactly: σ = (Σ nᵢ σᵢ⁻²)^(-1/2)."""
    parts = [(from_json(text), count) for text, count in counts]
    plain = [(event, count) for event, count in parts if isinstance(event, GaussianDpEvent)]
    if not plain:
        return counts
    rest = [(event, count) for event, count in parts if not isinstance(event, GaussianDpEvent)]
    together = merged_leaf(ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in plain]))
    return tuple(sorted((to_json(event), count) for event, count in [*rest, (together, 1)]))


def _gaussian(noise: float, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    if noise == 0:
        return _unbounded()
    if math.isinf(noise):
        return distributions.identity(INTERVAL)
    return distributions.from_gaussian_mechanism(
        noise, value_discretization_interval=INTERVAL, sampling_prob=rate, neighboring_relation=RELATIONS[adjacency]
    )


def _laplace(event: LaplaceDpEvent, rate: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    noise = required_noise(event)
    if adjacency != "add-or-remove-one":
        raise _unpriced(event, adjacency, "pld")
    if noise == 0:
        return _unbounded()
    return distributions.from_laplace_mechanism(noise, value_discretization_interval=INTERVAL, sampling_prob=rate)


def _unbounded() -> PrivacyLossDistribution:
    return PrivacyLossDistribution.create_from_rounded_probability({0: 0.0}, 1.0, INTERVAL)


def _unpriced(event: DpEvent, adjacency: Adjacency, function: str) -> InvalidInput:
    return InvalidInput(
        f"event {event!r} has no {function} price under {adjacency} adjacency: "
        f"register a price with sordino.accounting.pricing.{function}.register"
    )
