"""The price of choosing a step length by report-noisy-minimum (DPAGD).

Add up every candidate's clipped losses, each in [0, C]; subtract independent exponential noise of scale C/ε; report the
smallest. A record that joins raises every sum, by at most C. Candidate j wins iff its noise exceeds a threshold that
the others set, and this threshold moves by at most C. An exponential tail then changes by a factor of at most e^ε,
either way. So one report is ε-DP. It is not a Gaussian and may not be charged as one.

On a Poisson draw at rate q one record changes the law to (1−q)·P + q·P', which is log(1 + q(e^ε − 1))-DP.
The proof is in docs/proofs/noisy-minimum.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_privacy_parameters

from sordino.accounting.events import Adjacency, DpEvent
from sordino.accounting.extremes import Quiet, price_quiet
from sordino.accounting.grids import INTERVAL, Array
from sordino.accounting.pld import pld, sampled_pld
from sordino.accounting.rdp import ORDERS, rdp_curve, sampled_rdp_curve
from sordino.errors import InvalidInput


@dataclass(frozen=True)
class NoisyMinimum(DpEvent):
    """A choice among candidates that is ε-DP: as private as a randomized response, which dominates it."""

    epsilon: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise InvalidInput(f"epsilon={self.epsilon} of a choice must be > 0 and finite: 0.1 is a careful one")


NAMES = {"noisy-minimum": NoisyMinimum}


@price_quiet.register(NoisyMinimum)
def _(event: NoisyMinimum, count: int, _adjacency: Adjacency) -> Quiet:
    return Quiet(pure=count * event.epsilon)


@pld.register(NoisyMinimum)
def _(event: NoisyMinimum, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    _require_monotone(event, adjacency)
    return from_privacy_parameters(
        DifferentialPrivacyParameters(event.epsilon, 0.0), value_discretization_interval=interval
    )


@sampled_pld.register(NoisyMinimum)
def _(event: NoisyMinimum, rate: float, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return pld(_amplify(event, rate), adjacency, interval)


@rdp_curve.register(NoisyMinimum)
def _(event: NoisyMinimum, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """The Rényi divergence of randomized response: log(p^α(1−p)^(1−α) + (1−p)^α p^(1−α))/(α−1) (Mironov 2017)."""
    _require_monotone(event, adjacency)
    alpha = np.asarray(orders, dtype=np.float64)
    likely, unlikely = -np.logaddexp(0, -event.epsilon), -np.logaddexp(0, event.epsilon)
    terms = alpha * likely + (1 - alpha) * unlikely, alpha * unlikely + (1 - alpha) * likely
    curve: Array = np.logaddexp(*terms) / (alpha - 1)
    return np.minimum(curve, event.epsilon)


@sampled_rdp_curve.register(NoisyMinimum)
def _(event: NoisyMinimum, rate: float, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    return rdp_curve(_amplify(event, rate), adjacency, orders)


def _amplify(event: NoisyMinimum, rate: float) -> NoisyMinimum:
    """log(1 − q + q·e^ε), without overflow."""
    unseen = math.log1p(-rate) if rate < 1 else -math.inf
    return NoisyMinimum(float(np.logaddexp(unseen, math.log(rate) + event.epsilon)))


def _require_monotone(event: NoisyMinimum, adjacency: Adjacency) -> None:
    if adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"{event!r} has no price under {adjacency} adjacency: an exchanged record raises some sums and lowers "
            "others; use add-or-remove-one"
        )
