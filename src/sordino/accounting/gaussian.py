"""Accountants for runs whose answers are all Gaussian: closed forms, without a grid and without orders.

**GDP** is the limit theorem of Gaussian differential privacy (`GdpPricing`). **CDP** is concentrated differential
privacy, the accountants of the noise-decay papers (`CdpPricing`). Of all these, only `zcdp` is a bound for a run of
Sordino: see each `basis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from sordino.accounting.events import (
    Adjacency,
    Events,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    unroll,
)
from sordino.errors import InvalidInput

UNDERSTATED = 1.05  # the limit asks for one to twenty per cent less noise than is needed


def unroll_gaussians(events: Events, price: str) -> Iterator[tuple[float, float, int]]:
    """(sampling rate, noise multiplier, count) of every plain event, for a `price` that only Gaussian answers have."""
    for event, count in events:
        for leaf, times in unroll(event, count):
            rate, answer = 1.0, leaf
            if isinstance(leaf, PoissonSampledDpEvent):
                rate, answer = float(leaf.sampling_probability), leaf.event
            if not isinstance(answer, GaussianDpEvent):
                raise InvalidInput(
                    f"event {type(answer).__name__} has no {price} price: only Gaussian answers have one; "
                    "use 'rdp-filter' for a run that chose its events as it went, 'pld' for any other"
                )
            yield rate, float(answer.noise_multiplier), times


# -- one Gaussian -----------------------------------------------------------------------------------------------------


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Dynamic DP-SGD, Eq. 1; Balle & Wang 2018)."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    paid = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return max(0.0, float(ndtr(-epsilon / mu + mu / 2)) - math.exp(min(paid, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε ≥ 0 at which δ(ε; μ) = `delta`."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if mu > 1e4:  # the second term is far below the first, so doubles cannot hold both
        return float(mu**2 / 2 - mu * ndtri(delta))
    upper = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1.0
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, upper, xtol=1e-12, rtol=1e-12))


# -- the limit --------------------------------------------------------------------------------------------------------


class GdpPricing:
    """ε and δ of the limiting Gaussian. It is a limit, not a bound: finite runs cost *more*.

    T sampled Gaussians together approach the trade-off of N(0, 1) against N(μ, 1) as T → ∞ with q·√T constant, where

        μ² = q² Σ_t (e^{μ_t²} − 1),   μ_t = 1/σ_t                        (Dynamic DP-SGD, Theorem 1, Eq. 9),

    which for equal steps is μ = q √(T (e^{1/σ²} − 1)) (Bu et al. 2020; Eq. 7 there). At the paper's own settings the
    true ε is from 1 % to more than twice as large; the error grows with the largest μ_t. Gaussians on all records add
    up exactly.
    """

    name = "gdp"
    basis: Literal["asymptotic"] = "asymptotic"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        return gaussian_epsilon(limit_mu(events, adjacency), delta)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        return gaussian_delta(limit_mu(events, adjacency), epsilon)


def limit_mu(events: Events, adjacency: Adjacency = "add-or-remove-one") -> float:
    """Return the μ of the limit (Eq. 9); infinite without noise."""
    if adjacency != "add-or-remove-one":
        raise InvalidInput(f"the GDP limit has no price under {adjacency} adjacency: use accountant='pld'")
    return math.sqrt(math.fsum(count * _square(rate, noise) for rate, noise, count in _costly(events)))


def starting_noise(events: Events, epsilon: float, delta: float) -> float:
    """How much more noise `events` need, as a factor, to cost about (ε, δ): where calibration should start looking.

    A schedule whose noise falls tenfold must not be priced at σ = 1: its last steps would have σ = 0.1, whose loss
    reaches hundreds and takes minutes to price. The limit is right to a few tenths and takes no time. Any answer is
    safe, because calibration continues from here with a proven price. The answer is 1 if the limit has no price.
    """
    try:
        parts = [part for part in _costly(events) if part[1] > 0]
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


def _costly(events: Events) -> Iterator[tuple[float, float, int]]:
    """(rate, noise multiplier, count) of every plain event that costs anything."""
    return (part for part in unroll_gaussians(events, "GDP") if part[0] > 0 and part[1] < math.inf)


def _square(rate: float, noise: float) -> float:
    """Return what an event adds to μ²: 1/σ² on all records, q² (e^{1/σ²} − 1) on a draw."""
    if noise <= 0:
        return math.inf
    precision = 1 / noise / noise  # infinite, not an error, where a double cannot hold it
    if rate == 1:
        return precision
    return rate**2 * math.expm1(precision) if precision < 700 else math.inf


# -- concentrated differential privacy --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truncated:
    """(ρ, ω)-tCDP: D_α ≤ ρ·α for 1 < α < ω (Bun, Dwork, Rothblum & Steinke 2018, Def. 1); ω = ∞ is ρ-zCDP."""

    rho: float
    omega: float = math.inf

    def epsilon(self, delta: float) -> float:
        """min over 1 < α < ω of ρ·α + ln(1/δ)/(α − 1), the conversion of every Rényi divergence."""
        if self.rho == 0:
            return 0.0
        if math.isinf(self.rho) or self.omega <= 1:
            return math.inf
        surprise = math.log(1 / delta)
        if surprise <= (self.omega - 1) ** 2 * self.rho:
            return self.rho + 2 * math.sqrt(self.rho * surprise)
        return self.rho * self.omega + surprise / (self.omega - 1)

    def delta(self, epsilon: float) -> float:
        """Return the same bound solved for δ."""
        if self.rho == 0:
            return 0.0
        if math.isinf(self.rho) or self.omega <= 1:
            return 1.0
        best = min((epsilon + self.rho) / (2 * self.rho), self.omega)  # the order of the smallest δ
        return math.exp(min(0.0, (best - 1) * (self.rho * best - epsilon))) if best > 1 else 1.0


@dataclass(frozen=True)
class CdpPricing:
    """ε and δ by adding up what `charge(rate, rho)` asks for each Gaussian on a draw.

    All charge a Gaussian with noise multiplier σ the same ρ = 1/(2σ²) at every Rényi order α, D_α ≤ ρ·α, and convert
    by ε = ρ + 2 √(ρ ln(1/δ)) (Bun & Steinke 2016, Prop. 1.3). They differ in what a draw is worth: nothing (zCDP), one
    part of an epoch of disjoint lots (Yu et al. 2019), or an amplification with truncated orders (Zhang et al. 2021).
    """

    name: str
    basis: Literal["proven", "published"]
    charge: Callable[[float, float], Truncated]

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        return self._compose(events, adjacency).epsilon(delta)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        return self._compose(events, adjacency).delta(epsilon)

    def _compose(self, events: Events, adjacency: Adjacency) -> Truncated:
        """ρ adds up, the smallest ω holds (Bun, Dwork, Rothblum & Steinke 2018, on composition)."""
        parts = [(self.charge(rate, rho), count) for rate, rho, count in _count_rho(events, adjacency)]
        rho = sum(count * part.rho for part, count in parts)
        return Truncated(rho, min((part.omega for part, _ in parts), default=math.inf))


def charge_unsampled(_rate: float, rho: float) -> Truncated:
    """Charge as if every record were in every draw. Forgetting the draw can only raise the price, so this is proven."""
    return Truncated(rho)


def charge_by_epoch(rate: float, rho: float) -> Truncated:
    """Charge one Gaussian per *epoch*, whose 1/q lots are disjoint (Yu et al. 2019, parallel composition).

    Poisson draws are not disjoint, so this proves nothing for a run of Sordino: 1/q draws are charged like one.
    """
    return Truncated(rate * rho)


def amplify(rate: float, rho: float) -> Truncated:
    """(13 q² ρ, log(1/q)/(4ρ))-tCDP, as Zhang et al. 2021 charge; infinite where the theorem's conditions fail.

    The theorem (Bun, Dwork, Rothblum & Steinke 2018, on sampling) needs q, ρ ≤ 0.1, log(1/q) ≥ 3ρ(2 + log₂(1/ρ)) and
    log(1/q)/(2ρ) ≥ 3. It is stated for samples of fixed size and replaced records, but Sordino has Poisson draws and
    adds or removes records. So it proves nothing for a run of Sordino. Where it applies it is several times too large
    anyway, because its constant is 13 where the limit has 1.
    """
    if rho == 0:
        return Truncated(0.0)
    if rate == 1:
        return Truncated(rho)
    rarity = math.log(1 / rate)
    applies = rate <= 0.1 and rho <= 0.1 and rarity >= 3 * rho * (2 + math.log2(1 / rho)) and rarity / (2 * rho) >= 3
    return Truncated(13 * rate**2 * rho, rarity / (4 * rho)) if applies else Truncated(math.inf)


def _count_rho(events: Events, adjacency: Adjacency) -> Iterator[tuple[float, float, int]]:
    """(rate, ρ, count) of every plain event; replacing a record moves the sum by 2 C, four times the ρ."""
    moved = 4 if adjacency == "replace-one" else 1
    for rate, noise, count in unroll_gaussians(events, "CDP"):
        if rate > 0:
            yield rate, math.inf if noise <= 0 else moved / 2 / noise / noise, count


ZCDP = CdpPricing("zcdp", "proven", charge_unsampled)
ZCDP_EPOCH = CdpPricing("zcdp-epoch", "published", charge_by_epoch)
TCDP = CdpPricing("tcdp", "published", amplify)
