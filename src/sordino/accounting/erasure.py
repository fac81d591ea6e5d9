"""The price of an attempt whose proposal is seen only if a noisy test accepts it (DPSUR and noise screening).

An attempt draws records at rate q, adds noise of multiplier σ to their sum of gradients and so proposes a model w. A
test on a fresh draw at rate q_v accepts w with a probability that clipping keeps between two public constants lo and
hi, whatever the data. The attempt outputs w if accepted and nothing otherwise. With ℓ(z) = 1 − q + q·exp(z/σ − 1/(2σ²))
for z standard normal, E = e^ε, G(c) = E[ℓ − c]₊ and H(c) = E[c − ℓ]₊ (the curve of the sampled Gaussian and its
surplus), and with the acceptance probabilities a = (1−q_v)·lo + q_v·hi and b = (1−q_v)·hi + q_v·lo of the extremes:

    δ_remove(ε) = max{ a·G(E·lo/a) + (1−q_v)(hi−lo)·G(E/(1−q_v)) ,  1 − E + b·H(E·hi/b) }
    e^ε·δ_add(−ε) = δ_remove(ε) − 1 + E

The proof is in docs/proofs/erasure.md. If each record's share of the test is clipped too, one record moves the test
value by at most `shift` deviations of its noise. The acceptance probabilities u without and x with the record are then
not only both in [lo, hi] but close: x ≤ U(u) = Φ(Φ⁻¹(u) + shift), which is concave. The extreme pairs lie on two
curves. Tangents enclose these from outside by polygons with corners (uⱼ, vⱼ), v = (1−q_v)·u + q_v·x. Take the hull,
start at the origin, and let Δuⱼ, Δvⱼ go from corner to corner, rⱼ = Δuⱼ/Δvⱼ:

    δ_remove(ε) = max{ Σ Δvⱼ·G(E·rⱼ) over the upper polygon ,  1 − E + Σ Δvⱼ·H(E·rⱼ) over the lower one }

The formula above is the case of a shift beyond the interval, whose polygons have two corners.

The output says whether the attempt was accepted, so the trace of acceptances is paid for. A larger interval costs more,
so an interval may be rounded outwards. If earlier outputs decide which of several intervals applies, the pointwise
maximum of their curves dominates each, and the composition stays a composition of equal events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

from sordino.accounting.events import Adjacency, DpEvent, GaussianDpEvent
from sordino.accounting.extremes import dissect
from sordino.accounting.grids import DEVIATIONS, INTERVAL, Array, addition_delta, connect_the_dots, removal_delta
from sordino.accounting.pld import pld
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.errors import InvalidInput

Interval = tuple[float, float]

LARGEST_LOSS = 30.0
"""Losses of a test beyond this count as infinite: they need an acceptance probability of nearly 0 or 1."""
STEEPNESS = np.geomspace(0.02, 200.0, 81)
"""The brackets of Q·C_v over which annealing is priced."""
TANGENTS_EVERY, MOST_TANGENTS = 0.2, 16
"""Distance of the tangents in deviations; their polygon is within half a per cent of the curve's share."""


@dataclass(frozen=True)
class Erasure(DpEvent):
    """A Gaussian proposal on a draw at `rate`, shown if accepted with a probability between `lowest` and `highest`.

    The test draws at `test_rate`. Where `forced`, an attempt may also be accepted without a test. With
    noise_multiplier = ∞ there is no proposal: the event is the verdict of a test alone. The acceptance is Φ of a test
    value in deviations of its noise, which one record moves by at most `shift`; ∞ where nothing bounds that.
    """

    rate: float
    noise_multiplier: float
    test_rate: float
    lowest: float
    highest: float
    forced: bool = False
    shift: float = math.inf

    def __post_init__(self) -> None:
        _require_draws(self.rate, self.noise_multiplier, self.test_rate)
        if not self.shift > 0:
            raise InvalidInput(f"shift={self.shift} must be > 0: every record moves the test, by its clipped share")
        if not 0 <= self.lowest <= self.highest <= 1 or self.highest == 0:
            raise InvalidInput(
                f"acceptance between {self.lowest:g} and {self.highest:g} must lie in (0, 1]: "
                "raise the threshold or the noise of the test, or nothing is ever accepted"
            )

    def intervals(self) -> list[Interval]:
        """Return where the probability of acceptance may lie."""
        return [(self.lowest, self.highest), *([(1.0, 1.0)] if self.forced else [])]


@dataclass(frozen=True)
class AnnealedErasure(DpEvent):
    """An attempt that is accepted with probability min(1, exp(−Q·ΔE)) for a noised energy ΔE, at any Q ≥ 0.

    ΔE is clipped to ±C and noised by `test_noise`·2C; Q may depend on everything that was released before.
    """

    rate: float
    noise_multiplier: float
    test_rate: float
    test_noise: float

    @property
    def shift(self) -> float:
        """Unbounded: acceptance is not Φ of the energy, so the proof uses only its interval."""
        return math.inf

    def __post_init__(self) -> None:
        _require_draws(self.rate, self.noise_multiplier, self.test_rate)
        if not 0 < self.test_noise < math.inf:
            raise InvalidInput(
                f"test_noise={self.test_noise} must be > 0 and finite: without noise there is no privacy"
            )

    def intervals(self) -> list[Interval]:
        """One interval per bracket of Q·C, rounded outwards; acceptance falls with Q for either end of ΔE."""
        return list(_annealed_intervals(self.test_noise))


NAMES = {"erasure": Erasure, "annealed-erasure": AnnealedErasure}


def _require_draws(rate: float, noise_multiplier: float, test_rate: float) -> None:
    for name, value in (("rate", rate), ("test_rate", test_rate)):
        if not 0 < value <= 1:
            raise InvalidInput(f"{name}={value} must be in (0, 1]: give expected draw size / number of records")
    if not noise_multiplier > 0:
        raise InvalidInput(f"noise_multiplier={noise_multiplier} must be > 0: without noise there is no privacy")


@lru_cache(maxsize=64)
def _annealed_intervals(test_noise: float) -> tuple[Interval, ...]:
    limits = (float(special.ndtr(-1 / (2 * test_noise))), float(special.ndtr(1 / (2 * test_noise))))
    low = [annealed_acceptance(s, 1.0, test_noise) for s in STEEPNESS] + [limits[0]]
    high = [annealed_acceptance(s, -1.0, test_noise) for s in STEEPNESS]
    return ((1.0, 1.0), *zip(low[1:], high, strict=True))


def annealed_acceptance(steepness: float, energy: float, test_noise: float) -> float:
    """E[min(1, exp(−s·x))] for x ~ N(energy, (2σ_v)²), in units of C: s = Q·C. Closed form of two normal integrals."""
    spread = 2 * test_noise
    improved = float(special.ndtr(-energy / spread))
    exponent = -steepness * energy + (steepness * spread) ** 2 / 2
    worsened = exponent + float(special.log_ndtr((energy - steepness * spread**2) / spread))
    return min(1.0, improved + math.exp(min(worsened, 0.0)))


def removal_curve(epsilons: Array, event: Erasure | AnnealedErasure) -> Array:
    """δ(ε) with the record against without it, for any ε; exact where the curve is small."""
    return _largest(event, lambda interval: _removal(epsilons, event, interval))


def surplus_curve(epsilons: Array, event: Erasure | AnnealedErasure) -> Array:
    """δ_remove(ε) − 1 + e^ε without subtracting from 1."""
    return _largest(event, lambda interval: _surplus(epsilons, event, interval))


def addition_curve(epsilons: Array, event: Erasure | AnnealedErasure) -> Array:
    """δ(ε) without the record against with it: the mirrored surplus."""
    return np.exp(epsilons) * surplus_curve(-epsilons, event)


def _largest(event: Erasure | AnnealedErasure, curve: Callable[[Interval], Array]) -> Array:
    found: Array = np.maximum.reduce([curve(interval) for interval in event.intervals()])
    return found


def _removal(epsilons: Array, event: Erasure | AnnealedErasure, interval: Interval) -> Array:
    shown, hidden = np.zeros_like(epsilons), np.zeros_like(epsilons)
    for width, height in _polygon(interval, event.test_rate, event.shift, 1):
        if height > 0:
            shown = shown + height * _curve(epsilons + _log(width / height), event)
    top = 0.0
    for width, height in _polygon(interval, event.test_rate, event.shift, -1):
        if height > 0:
            hidden, top = hidden + height * _curve(epsilons + _log(width / height), event), top + height
    high = interval[1]
    hidden = hidden + (high - top) - np.expm1(epsilons) * (1 - high)
    return np.maximum(np.maximum(shown, hidden), -np.expm1(np.minimum(epsilons, 0.0)))


def _surplus(epsilons: Array, event: Erasure | AnnealedErasure, interval: Interval) -> Array:
    shown, hidden = (
        sum((_unspent(epsilons, side, event) for side in _polygon(interval, event.test_rate, event.shift, which)), 0.0)
        for which in (1, -1)
    )
    shown = shown + (1 - interval[1]) * np.expm1(epsilons)
    return np.maximum(np.maximum(shown, hidden), np.expm1(np.maximum(epsilons, 0.0)))


def _unspent(epsilons: Array, side: tuple[float, float], event: Erasure | AnnealedErasure) -> Array:
    """height·H(E·width/height) of one side of a polygon, and its limit where that is flat."""
    width, height = side
    if height > 0:
        return height * _spare(epsilons + _log(width / height), event)
    return width * np.exp(epsilons)


@lru_cache(maxsize=512)
def _polygon(interval: Interval, test: float, shift: float, side: int) -> tuple[tuple[float, float], ...]:
    """(Δu, Δv) along the hull of the extreme acceptances: side 1 the most, side −1 the least, with the record.

    They start at the origin. A corner inside the hull never attains the maximum over all corners and is left out.
    """
    chain = [(0.0, 0.0)]
    for without, extra in _corners(interval, shift, side):
        corner = (without, (1 - test) * without + test * extra)
        while len(chain) > 1 and side * _turn(chain[-2], chain[-1], corner) >= 0:
            chain.pop()
        chain.append(corner)
    return tuple((u - before_u, v - before_v) for (before_u, before_v), (u, v) in pairwise(chain))


def _turn(first: Interval, second: Interval, third: Interval) -> float:
    """Positive where the path over three points turns left."""
    ahead, aside = (second[0] - first[0], second[1] - first[1]), (third[0] - first[0], third[1] - first[1])
    return ahead[0] * aside[1] - ahead[1] * aside[0]


def _corners(interval: Interval, shift: float, side: int) -> list[Interval]:
    """Return a polygon (u, x) that encloses {(Φ(t), Φ(t + d)): |d| ≤ shift, both in the interval} on one side.

    U(u) = Φ(Φ⁻¹(u) ± shift) has the slope exp(∓shift·t − shift²/2) at u = Φ(t): concave above, convex below, so that
    its tangents lie outside. Where two of them meet is rounded outwards: the outer tangent's value is taken.
    """
    low, high = interval
    lowest, highest = (float(special.ndtri(end)) for end in interval)
    infinite = math.isinf(lowest) or math.isinf(highest)  # no tangents there; a larger share costs more
    if infinite or not lowest + shift < highest:  # a record may move acceptance from one end to the other
        return [(low, high), (high, high)] if side > 0 else [(low, low), (high, low)]
    first, last = (lowest, highest - shift) if side > 0 else (lowest + shift, highest)
    t = np.linspace(first, last, 2 + int(min((last - first) / TANGENTS_EVERY, MOST_TANGENTS)))
    u, x, slope = special.ndtr(t), special.ndtr(t + side * shift), np.exp(-side * shift * t - shift**2 / 2)
    turns = np.diff(slope)
    meet = -np.diff(x - slope * u) / np.where(turns == 0, 1.0, turns)  # equal slopes are one tangent: it meets anywhere
    meet = np.clip(meet, u[:-1], u[1:])
    tangents = (x[:-1] + slope[:-1] * (meet - u[:-1]), x[1:] + slope[1:] * (meet - u[1:]))
    outer = np.maximum(*tangents) if side > 0 else np.minimum(*tangents)
    touched = [(u[0], x[0]), *zip(meet, outer, strict=True), (u[-1], x[-1])]
    found = [*touched, (high, high)] if side > 0 else [(low, low), *touched]
    return [(float(without), float(extra)) for without, extra in found]


def _extremes(interval: Interval, test: float) -> tuple[float, float]:
    low, high = interval
    return (1 - test) * low + test * high, (1 - test) * high + test * low


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _curve(losses: Array, event: Erasure | AnnealedErasure) -> Array:
    """G(e^loss): how much the proposal alone gives away."""
    if math.isinf(event.noise_multiplier):
        return -np.expm1(np.minimum(losses, 0.0))
    return removal_delta(losses, event.rate, event.noise_multiplier)


def _spare(losses: Array, event: Erasure | AnnealedErasure) -> Array:
    """H(e^loss), by mirroring the curve of the exchanged pair."""
    if math.isinf(event.noise_multiplier):
        return np.expm1(np.maximum(losses, 0.0))
    finite = np.maximum(losses, -700.0)
    return np.where(losses > -700.0, np.exp(finite) * addition_delta(-finite, event.rate, event.noise_multiplier), 0.0)


@dissect.register(Erasure)
@dissect.register(AnnealedErasure)
def _(event: Erasure | AnnealedErasure) -> tuple[DpEvent, ...]:
    """An attempt is a function of its proposal and its test's verdict."""
    if math.isinf(event.noise_multiplier):
        return (event,)
    return GaussianDpEvent(event.noise_multiplier), replace(event, noise_multiplier=math.inf)


@pld.register(Erasure)
@pld.register(AnnealedErasure)
def _(event: Erasure | AnnealedErasure, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    if adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"{event!r} has no proven price under {adjacency} adjacency: the proof adds or removes one record; "
            "use add-or-remove-one"
        )
    removed, added = _range(event)
    remove = connect_the_dots(
        lambda grid: removal_curve(grid, event),
        -added,
        removed,
        interval,
        surplus=lambda grid: surplus_curve(grid, event),
    )
    add = connect_the_dots(
        lambda grid: addition_curve(grid, event),
        -removed,
        added,
        interval,
        surplus=lambda grid: np.exp(grid) * removal_curve(-grid, event),
    )
    return PrivacyLossDistribution(remove, add)


def _range(event: Erasure | AnnealedErasure) -> tuple[float, float]:
    """The largest loss when the record is removed and when it is added: the proposal's and the test's together."""
    removed = added = 0.0
    for low, high in event.intervals():
        a, b = _extremes((low, high), event.test_rate)
        removed = max(removed, *(_ratio(*pair) for pair in ((a, low), (1 - b, 1 - high))))
        added = max(added, *(_ratio(*pair) for pair in ((high, b), (1 - low, 1 - a))))
    if math.isinf(event.noise_multiplier):
        return removed, added
    noise, rate = event.noise_multiplier, event.rate
    unseen = math.log1p(-rate) if rate < 1 else -math.inf
    top, bottom = (
        float(np.logaddexp(unseen, math.log(rate) + (x - 0.5) / noise**2))
        for x in (1 + DEVIATIONS * noise, -DEVIATIONS * noise)
    )
    return removed + max(top, 0.0), added + max(-bottom, 0.0)


def _ratio(above: float, below: float) -> float:
    if above <= 0:
        return 0.0
    return min(LARGEST_LOSS, math.log(above / below)) if below > 0 else LARGEST_LOSS


@rdp_curve.register(Erasure)
@rdp_curve.register(AnnealedErasure)
def _(event: Erasure | AnnealedErasure, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> Array:
    raise InvalidInput(f"{event!r} has no Rényi price: its bound is a curve of δ(ε); use accountant='pld'")
