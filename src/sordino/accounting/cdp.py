"""Concentrated differential privacy: the accountants of the noise-decay papers.

Both charge a Gaussian with noise multiplier σ the same ρ = 1/(2σ²) at every Rényi order α, D_α ≤ ρ·α, and convert by
ε = ρ + 2 √(ρ ln(1/δ)) (Bun & Steinke 2016, Prop. 1.3). They differ in what a draw is worth: nothing (zCDP), one part of
an epoch of disjoint lots (Yu et al. 2019), or an amplification with truncated orders (Zhang et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.events import DpEvent, gaussians

Events = Sequence[tuple[DpEvent, int]]


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
        """The same bound solved for δ."""
        if self.rho == 0:
            return 0.0
        if math.isinf(self.rho) or self.omega <= 1:
            return 1.0
        best = min((epsilon + self.rho) / (2 * self.rho), self.omega)  # the order of the smallest δ
        return math.exp(min(0.0, (best - 1) * (self.rho * best - epsilon))) if best > 1 else 1.0


@dataclass(frozen=True)
class CdpPricing:
    """ε and δ by adding up what `charge(rate, rho)` asks for each Gaussian on a draw."""

    name: str
    basis: Literal["proven", "published"]
    charge: Callable[[float, float], Truncated]

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        return self._composed(events, adjacency).epsilon(delta)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        return self._composed(events, adjacency).delta(epsilon)

    def _composed(self, events: Events, adjacency: Adjacency) -> Truncated:
        """ρ adds up, the smallest ω holds (Bun, Dwork, Rothblum & Steinke 2018, on composition)."""
        parts = [(self.charge(rate, rho), count) for rate, rho, count in _gaussians(events, adjacency)]
        rho = sum(count * part.rho for part, count in parts)
        return Truncated(rho, min((part.omega for part, _ in parts), default=math.inf))


def unamplified(_rate: float, rho: float) -> Truncated:
    """As if every record were in every draw. Forgetting the draw only adds, so this is proven."""
    return Truncated(rho)


def per_epoch(rate: float, rho: float) -> Truncated:
    """One Gaussian per *epoch*, whose 1/q lots are disjoint (Yu et al. 2019, parallel composition).

    Poisson draws are not disjoint, so for a run of ours this is no proof: 1/q draws are charged like one.
    """
    return Truncated(rate * rho)


def amplified(rate: float, rho: float) -> Truncated:
    """(13 q² ρ, log(1/q)/(4ρ))-tCDP, as Zhang et al. 2021 charge; infinite where the theorem's conditions fail.

    The theorem (Bun, Dwork, Rothblum & Steinke 2018, on sampling) needs q, ρ ≤ 0.1, log(1/q) ≥ 3ρ(2 + log₂(1/ρ)) and
    log(1/q)/(2ρ) ≥ 3. It is stated for samples of fixed size and replaced records, and Sordino draws by Poisson and
    adds or removes: no proof for a run of ours. Where it applies it is several times too large anyway, for the
    constant 13 stands where the limit has 1.
    """
    if rho == 0:
        return Truncated(0.0)
    if rate == 1:
        return Truncated(rho)
    rarity = math.log(1 / rate)
    applies = rate <= 0.1 and rho <= 0.1 and rarity >= 3 * rho * (2 + math.log2(1 / rho)) and rarity / (2 * rho) >= 3
    return Truncated(13 * rate**2 * rho, rarity / (4 * rho)) if applies else Truncated(math.inf)


def _gaussians(events: Events, adjacency: Adjacency) -> Iterator[tuple[float, float, int]]:
    """(rate, ρ, count) of every plain event; replacing a record moves the sum by 2 C, four times the ρ."""
    moved = 4 if adjacency == "replace-one" else 1
    for rate, noise, count in gaussians(events, "CDP"):
        if rate > 0:
            yield rate, math.inf if noise <= 0 else moved / 2 / noise / noise, count


ZCDP = CdpPricing("zcdp", "proven", unamplified)
ZCDP_EPOCH = CdpPricing("zcdp-epoch", "published", per_epoch)
TCDP = CdpPricing("tcdp", "published", amplified)
