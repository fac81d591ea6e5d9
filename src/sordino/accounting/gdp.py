"""Gaussian differential privacy and its central limit theorem. A limit, no bound: finite runs cost *more*.

T sampled Gaussians together approach the trade-off of N(0, 1) against N(μ, 1) as T → ∞ with q·√T constant, where

    μ² = q² Σ_t (e^{μ_t²} − 1),   μ_t = 1/σ_t                        (Dynamic DP-SGD, Theorem 1, Eq. 9),

which for equal steps is μ = q √(T (e^{1/σ²} − 1)) (Bu et al. 2020; Eq. 7 there). At the paper's own settings the true ε
is from 1 % to more than twice as large; the error grows with the largest μ_t. Gaussians on all records add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, leaves
from sordino.errors import InvalidInput


class GdpPricing:
    """ε and δ of the limiting Gaussian. Asymptotic."""

    name = "gdp"
    basis: Literal["asymptotic"] = "asymptotic"

    def epsilon(self, events: Sequence[tuple[DpEvent, int]], delta: float, adjacency: Adjacency) -> float:
        return gaussian_epsilon(limit_mu(events, adjacency), delta)

    def delta(self, events: Sequence[tuple[DpEvent, int]], epsilon: float, adjacency: Adjacency) -> float:
        return gaussian_delta(limit_mu(events, adjacency), epsilon)


def limit_mu(events: Sequence[tuple[DpEvent, int]], adjacency: Adjacency = "add-or-remove-one") -> float:
    """The μ of the limit (Eq. 9); infinite without noise."""
    if adjacency != "add-or-remove-one":
        raise InvalidInput(f"the GDP limit has no price under {adjacency} adjacency: use accountant='pld'")
    squares = 0.0
    for event, count in events:
        for leaf, times in leaves(event, count):
            squares += times * _square(leaf)
    return math.sqrt(squares)


def _square(event: DpEvent) -> float:
    rate, answer = 1.0, event
    if isinstance(event, PoissonSampledDpEvent):
        rate, answer = float(event.sampling_probability), event.event
    if not isinstance(answer, GaussianDpEvent):
        raise InvalidInput(f"event {event!r} has no GDP price: only Gaussian answers have one; use accountant='pld'")
    if rate == 0 or math.isinf(answer.noise_multiplier):
        return 0.0
    if answer.noise_multiplier <= 0:
        return math.inf
    precision = float(answer.noise_multiplier) ** -2
    if rate == 1:
        return precision
    return rate**2 * math.expm1(precision) if precision < 700 else math.inf


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Dynamic DP-SGD, Eq. 1; Balle & Wang 2018)."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    paid = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return max(0.0, float(ndtr(-epsilon / mu + mu / 2)) - math.exp(min(paid, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε ≥ 0 at which δ(ε; μ) = `delta`."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    upper = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1.0
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12))
