"""Rényi prices: from an event type to its curve of Rényi divergences over orders.

`rdp_curve` can be extended: `rdp_curve.register(MyEvent)` gives a new event a price, and
`sampled_rdp_curve.register(MyEvent)` prices it on a Poisson draw. dp_accounting's own accountant prices every event
that it supports. Curves add under composition, even adaptive (Mironov 2017, Prop. 1). They become (ε, δ) by Canonne,
Kamath & Steinke 2020, Prop. 12; papers until 2020 used a looser conversion, ε = ε(α) + ln(1/δ)/(α − 1) (Mironov 2017,
Prop. 3).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, singledispatch
from typing import Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from sordino.accounting import levels
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
    merge,
    tally,
    to_json,
    unroll,
)
from sordino.accounting.grids import Array
from sordino.errors import InvalidInput

# Fine where DP-SGD has its optimum for ε from 0.5 to 10, and far enough out for small ε and small δ.
ORDERS: tuple[float, ...] = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 88, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048),
)

_WHOLE = np.array([order == int(order) for order in ORDERS])


@singledispatch
def rdp_curve(event: DpEvent, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """Return the Rényi divergence of one `event` at each of `orders`; infinite if there is none."""
    if adjacency == "replace-one":
        raise _unpriced(event, adjacency)
    return _delegate(event, orders)


@singledispatch
def sampled_rdp_curve(event: DpEvent, rate: float, adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> Array:
    """Return the curve of `event` applied to a Poisson draw with `rate`."""
    raise _unpriced(PoissonSampledDpEvent(rate, event), adjacency)


@rdp_curve.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return np.zeros(len(orders))


@rdp_curve.register(NonPrivateDpEvent)
def _(_event: NonPrivateDpEvent, _adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return np.full(len(orders), np.inf)


@rdp_curve.register(ComposedDpEvent)
@rdp_curve.register(SelfComposedDpEvent)
def _(event: DpEvent, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    total: Array = np.zeros(len(orders))
    for leaf, count in unroll(event):
        total = total + count * rdp_curve(leaf, adjacency, orders)
    return total


@rdp_curve.register(GaussianDpEvent)
def _(event: GaussianDpEvent, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """α/(2σ²) (Mironov 2017, Cor. 3); replacing one record moves the sum by 2 C, which is a Gaussian with σ/2."""
    sigma = require_noise(event) / (2 if adjacency == "replace-one" else 1)
    if sigma == 0:
        return np.full(len(orders), np.inf)
    with np.errstate(over="ignore"):  # for the smallest noise the price is infinite
        return np.asarray(orders, dtype=np.float64) / 2 / sigma / sigma


@rdp_curve.register(PoissonSampledDpEvent)
def _(event: PoissonSampledDpEvent, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    rate = require_rate(event)
    if rate == 0:
        return np.zeros(len(orders))
    if rate == 1:
        return rdp_curve(event.event, adjacency, orders)
    return sampled_rdp_curve(event.event, rate, adjacency, orders)


@sampled_rdp_curve.register(NoOpDpEvent)
def _(_event: NoOpDpEvent, _rate: float, _adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return np.zeros(len(orders))


@sampled_rdp_curve.register(NonPrivateDpEvent)
def _(_event: NonPrivateDpEvent, _rate: float, _adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return np.full(len(orders), np.inf)


@sampled_rdp_curve.register(ComposedDpEvent)
@sampled_rdp_curve.register(SelfComposedDpEvent)
def _(event: DpEvent, rate: float, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return sampled_rdp_curve(merge_answers(event), rate, adjacency, orders)


@sampled_rdp_curve.register(GaussianDpEvent)
def _(event: GaussianDpEvent, rate: float, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """Mironov, Talwar & Zhang 2019, Sec. 3, which covers only add/remove adjacency."""
    noise = require_noise(event)
    if noise == 0 or math.isinf(1 / noise / noise):
        return np.full(len(orders), np.inf)
    if adjacency == "replace-one":
        raise _unpriced(PoissonSampledDpEvent(rate, event), adjacency)
    return _delegate(PoissonSampledDpEvent(rate, event), orders)


def merge_answers(event: DpEvent) -> DpEvent:
    """Several Gaussian answers on one draw are one Gaussian (law 3); any other composition on a draw has no price."""
    parts = list(unroll(event))
    if not parts:
        return NoOpDpEvent()
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    gaussians = [(part, count) for part, count in parts if isinstance(part, GaussianDpEvent)]
    if len(gaussians) < len(parts):
        raise InvalidInput(f"{event!r} on one draw has no price: only Gaussian answers on the same draw merge (law 3)")
    return merge(*(GaussianDpEvent(require_noise(part) / count**0.5) for part, count in gaussians))


def require_noise(event: GaussianDpEvent | LaplaceDpEvent) -> float:
    """Return the noise multiplier of `event`, or an error if it is negative or not a number."""
    noise = float(event.noise_multiplier)
    if not noise >= 0:
        raise InvalidInput(f"noise_multiplier={noise} must be >= 0: give the noise divided by the sensitivity")
    return noise


def require_rate(event: PoissonSampledDpEvent) -> float:
    """Return the sampling rate of `event`, or an error if it is not a probability."""
    rate = float(event.sampling_probability)
    if not 0 <= rate <= 1:
        raise InvalidInput(f"sampling rate={rate} must be in [0, 1]: give expected draw size / number of records")
    return rate


class RdpPricing:
    """ε and δ by Rényi accounting over the fixed `ORDERS`. A proven upper bound."""

    name = "rdp"
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        return float(compute_epsilon(ORDERS, _compose(events, adjacency).tolist(), delta)[0])

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        return float(compute_delta(ORDERS, _compose(events, adjacency).tolist(), epsilon)[0])


class ClassicRdpPricing:
    """ε and δ by the conversion of Mironov 2017, Prop. 3, over whole orders: a proven bound, looser than `RdpPricing`.

    It is here for the papers that used it (noise screening, Lemma 2 and Theorem 2; Tramèr & Boneh): at their printed ε,
    the later conversion pays for a third more steps than they took.
    """

    name = "rdp-classic"
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        orders, curve = _compose_whole(events, adjacency)
        return float(np.min(curve + math.log(1 / delta) / (orders - 1))) if curve.any() else 0.0

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        orders, curve = _compose_whole(events, adjacency)
        return math.exp(min(0.0, float(np.min((orders - 1) * (curve - epsilon))))) if curve.any() else 0.0


def _compose_whole(events: Events, adjacency: Adjacency) -> tuple[Array, Array]:
    """Return the whole numbers among `ORDERS`, and the composed curve at these."""
    return np.asarray(ORDERS, dtype=np.float64)[_WHOLE], _compose(events, adjacency)[_WHOLE]


def _compose(events: Events, adjacency: Adjacency) -> Array:
    single, ladders = levels.split([leaf for event, count in events for leaf in unroll(event, count)], adjacency)
    total: Array = np.zeros(len(ORDERS))
    for text, count in tally(single):
        total = total + count * _cached_curve(text, adjacency)
    for ladder in ladders:
        curves = {rung: _cached_curve(to_json(event), adjacency) for rung, event in ladder.events().items()}
        for charge in ladder.charges:
            ends = curves[charge.rung], curves[charge.rung + 1]
            total = total + charge.count * levels.blend_curves(*ends, charge.share, ORDERS)
    return total


@lru_cache(maxsize=4096)
def _cached_curve(text: str, adjacency: Adjacency) -> Array:
    curve = np.asarray(rdp_curve(from_json(text), adjacency, ORDERS), dtype=np.float64)
    curve.setflags(write=False)
    return curve


def _delegate(event: DpEvent, orders: Sequence[float]) -> Array:
    accountant = RdpAccountant(list(orders), NeighboringRelation.ADD_OR_REMOVE_ONE)
    if not accountant.supports(event):
        raise _unpriced(event, "add-or-remove-one")
    with _quietly():
        return np.asarray(accountant.compose(event).rdp, dtype=np.float64)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence dp_accounting's warning for every order at which a series diverges: the value is infinite and unused."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _unpriced(event: DpEvent, adjacency: Adjacency) -> InvalidInput:
    return InvalidInput(
        f"event {event!r} has no RDP price under {adjacency} adjacency: "
        "use accountant='pld' or register a price with sordino.accounting.pricing.rdp_curve.register"
    )
