"""Privacy loss distributions: from an event type to the PLD of one such event.

`pld` is open: `pld.register(MyEvent)` gives a new event a price, `sampled_pld.register(MyEvent)` the same event on a
Poisson draw. A handler returns a pessimistic dp_accounting `PrivacyLossDistribution` on the grid of the given interval;
`sordino.accounting.curves.connect_the_dots` makes one of any δ(ε) curve.
"""

from __future__ import annotations

import math
from functools import singledispatch

from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.composition import INTERVAL
from sordino.accounting.curves import sampled_gaussian
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    leaves,
)
from sordino.accounting.rdp import merged_leaf, required_noise, required_rate
from sordino.errors import InvalidInput

REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@singledispatch
def pld(event: DpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """The privacy loss distribution of one `event`, never below the true one."""
    raise _unpriced(event, adjacency, "pld")


@singledispatch
def sampled_pld(
    event: DpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    """The privacy loss distribution of `event` applied to a Poisson draw with 0 < rate < 1."""
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
    for leaf, count in leaves(event):
        part = pld(leaf, adjacency, interval)
        if part.get_delta_for_epsilon(0.0) >= 1:
            return _unbounded(interval)
        total = total.compose(part.self_compose(count))
    return total


@pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _gaussian(required_noise(event), 1.0, adjacency, interval)


@pld.register(LaplaceDpEvent)
def _(event: LaplaceDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _laplace(event, 1.0, adjacency, interval)


@pld.register(PoissonSampledDpEvent)
def _(event: PoissonSampledDpEvent, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    rate = required_rate(event)
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
    return sampled_pld(merged_leaf(event), rate, adjacency, interval)


@sampled_pld.register(GaussianDpEvent)
def _(event: GaussianDpEvent, rate: float, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _gaussian(required_noise(event), rate, adjacency, interval)


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
    noise = required_noise(event)
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
