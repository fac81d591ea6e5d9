"""Gaussian differential privacy and its central limit theorem. A limit, no bound: finite runs cost *more*.

T sampled Gaussians together approach the trade-off of N(0, 1) against N(μ, 1) as T → ∞ with q·√T constant, where

    μ² = q² Σ_t (e^{μ_t²} − 1),   μ_t = 1/σ_t                        (Dynamic DP-SGD, Theorem 1, Eq. 9),

which for equal steps is μ = q √(T (e^{1/σ²} − 1)) (Bu et al. 2020; Eq. 7 there). At the paper's own settings the true ε
is from 1 % to more than twice as large; the error grows with the largest μ_t. Gaussians on all records add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.events import DpEvent, gaussians
from sordino.errors import InvalidInput

Events = Sequence[tuple[DpEvent, int]]

UNDERSTATED = 1.05  # the limit asks for one to twenty per cent less noise than is needed


class GdpPricing:
    """ε and δ of the limiting Gaussian. Asymptotic."""

    name = "gdp"
    basis: Literal["asymptotic"] = "asymptotic"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        return gaussian_epsilon(limit_mu(events, adjacency), delta)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        return gaussian_delta(limit_mu(events, adjacency), epsilon)


def limit_mu(events: Events, adjacency: Adjacency = "add-or-remove-one") -> float:
    """The μ of the limit (Eq. 9); infinite without noise."""
    if adjacency != "add-or-remove-one":
        raise InvalidInput(f"the GDP limit has no price under {adjacency} adjacency: use accountant='pld'")
    return math.sqrt(math.fsum(count * _square(rate, noise) for rate, noise, count in _gaussians(events)))


def starting_noise(events: Events, epsilon: float, delta: float) -> float:
    """How much more noise `events` need, as a factor, to cost about (ε, δ): where calibration should start looking.

    A schedule whose noise falls tenfold must not be priced at σ = 1: its last steps would have σ = 0.1, whose loss
    reaches hundreds and takes minutes. The limit is right to some tenths and costs nothing. Any answer is safe, since
    calibration goes on from here by a proven price; it is 1 where the limit has no price for the events.
    """
    try:
        parts = [part for part in _gaussians(events) if part[1] > 0]
    except InvalidInput:
        return 1.0
    if not parts:
        return 1.0
    rates, noises, counts = (np.array(column, dtype=np.float64) for column in zip(*parts, strict=True))
    smallest, largest = 1e-9, 1e3
    if not gaussian_epsilon(smallest, delta) < epsilon < gaussian_epsilon(largest, delta):
        return 1.0
    target = float(brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, smallest, largest))

    def surplus(log_factor: float) -> float:
        precisions = np.minimum((noises * math.exp(log_factor)) ** -2, 500.0)
        squares = np.where(rates < 1, rates**2 * np.expm1(precisions), precisions)
        return math.log(float(np.dot(counts, squares))) - 2 * math.log(target)

    low, high = math.log(1e-3), math.log(1e6)
    if surplus(low) <= 0 or surplus(high) >= 0:
        return 1.0
    return UNDERSTATED * math.exp(brentq(surplus, low, high, rtol=1e-3))


def _gaussians(events: Events) -> Iterator[tuple[float, float, int]]:
    """(rate, noise multiplier, count) of every plain event that costs anything."""
    return (part for part in gaussians(events, "GDP") if part[0] > 0 and part[1] < math.inf)


def _square(rate: float, noise: float) -> float:
    """What an event adds to μ²: 1/σ² on all records, q² (e^{1/σ²} − 1) on a draw."""
    if noise <= 0:
        return math.inf
    precision = 1 / noise / noise  # infinite, not an error, where a double cannot hold it
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
    if mu > 1e4:  # the second term is far below the first, and doubles cannot hold both
        return float(mu**2 / 2 - mu * ndtri(delta))
    upper = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1.0
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12))
