"""Thousands of different noises at one sampling rate, priced through a few: the heterogeneous composition.

A schedule changes the noise at every step, and building one privacy loss distribution per step takes minutes. So
distributions are built only on a fixed *ladder* of noises, and a step between two rungs is charged as a blend of both.

**Why a blend is an upper bound.** Let μ = 1/σ, H_μ(E) the hockey-stick divergence of the Gaussian, and s(μ) its total
variation. Then ∂H/∂μ = φ(log E/μ − μ/2), and with E = e^ε

    dH/ds = exp(ε/2 − ε²/(2μ²)),

which grows with μ: at every E the divergence is a *convex* function of s. A Poisson draw only rescales H and E (both
without μ), so the sampled Gaussian is convex in s too, in both directions. Hence with s(μ) = (1−λ)·s(a) + λ·s(b)

    H_μ ≤ (1−λ)·H_a + λ·H_b    at every E,

and the right side is the divergence of the mechanism that tosses a coin of probability λ, says how it fell, and
answers with noise 1/b or 1/a. It dominates the step, and dominating pairs compose (Zhu, Dong & Wang 2022, Thm. 10).
Its privacy loss distribution is the blend of the two distributions, so its transform is the blend of the transforms.
For replace-one neighbours, N(±μ, 1) each on a draw, the same holds with s(μ) the total variation of N(μ, 1) and
N(−μ, 1): with x the point where the densities of H balance and R = tanh(xμ − ε/2) ∈ [0, 1) for ε ≥ 0, one finds
d/dμ log(dH/ds) ∝ x² − xμR + μ²R² ≥ 0, and ε < 0 follows by reflection.

The error is of second order in the width of a rung, while rounding the noise down to a rung, the usual grouping, has
one of first order. Rungs grow geometrically in e^{μ²} − 1, what a step costs in the limit theorem (Dynamic DP-SGD, Eq.
9). They are the same for every ledger: distributions are reused by all prices of a calibration, and a step costs the
same whatever else is in the ledger, so a longer ledger never has a smaller price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from sordino.accounting.events import Adjacency, DpEvent, Events, GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.grids import Array, LogSpectrum, LongArray, LossGrid, Spectrum, to_logarithms, transform

GROWTH = 1.1  # of e^{μ²} − 1 from rung to rung
SHARES = 64  # λ is rounded up to multiples of 1/SHARES, so that a rung has few different blends
MOST_DISTINCT = 32  # up to this many different noises at one rate are composed one by one
FLOOR = -60.0  # a transform below e^FLOOR counts as zero: all of them together are far below the tail that is charged
LOW = 2**14  # how many frequencies are kept for the next price
LEAST_NOISE = 1e-3  # below this noise there are no rungs: they would be closer than doubles
MOST_NOISE = 1e100  # more noise is charged as this much
PORTION = 2**18

Frequencies = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Charge:
    """`count` events between rung `rung` and the next, which has less noise; each is charged `share` of the next."""

    rung: int
    share: float
    count: int


@dataclass(frozen=True)
class Ladder:
    """All events at one sampling rate, as charges."""

    rate: float
    charges: tuple[Charge, ...]

    def events(self) -> dict[int, DpEvent]:
        """Return the events whose distributions the charges blend, by rung."""
        rungs = sorted({rung for charge in self.charges for rung in (charge.rung, charge.rung + 1)})
        return {rung: PoissonSampledDpEvent(self.rate, GaussianDpEvent(noise_at(rung))) for rung in rungs}


def noise_at(rung: int) -> float:
    """Return the noise multiplier of a rung: e^{1/σ²} − 1 = GROWTH^rung."""
    exponent = rung * math.log(GROWTH)
    return float((exponent if exponent > 40 else math.log1p(math.exp(exponent))) ** -0.5)


def rung_of(noise: float) -> int:
    """Return the rung just above this noise; the next rung is below it."""
    precision = noise**-2
    growth = precision if precision > 40 else math.log(math.expm1(precision))
    rung = math.floor(growth / math.log(GROWTH))
    while noise_at(rung) < noise:  # rounding may be off by one
        rung -= 1
    while noise_at(rung + 1) > noise:
        rung += 1
    return rung


def share_of(noise: float, rung: int, adjacency: Adjacency) -> float:
    """Return how much of the next rung a step with this noise is charged: linear in total variation, rounded up."""
    scale = (2 if adjacency == "replace-one" else 1) / math.sqrt(8)  # the total variation is erf(scale/σ)
    low, here, high = (scale / sigma for sigma in (noise_at(rung), noise, noise_at(rung + 1)))
    width = _erf_between(low, high)
    exact = _erf_between(low, here) / width if width > 1e-290 else 1.0
    return min(1.0, max(1, math.ceil(exact * SHARES + 1e-6)) / SHARES)


def _erf_between(low: float, high: float) -> float:
    """erf(high) − erf(low), without losing its digits where both are near 0 or near 1."""
    return math.erf(high) - math.erf(low) if high < 0.5 else math.erfc(low) - math.erfc(high)


def split(events: Events, adjacency: Adjacency) -> tuple[list[tuple[DpEvent, int]], tuple[Ladder, ...]]:
    """Split into events composed one by one, and a ladder for each rate with more than MOST_DISTINCT noises."""
    noises: dict[float, dict[float, int]] = {}
    for event, count in events:
        rate, noise = _rate_and_noise(event)
        if noise < math.inf:
            found = noises.setdefault(rate, {})
            found[noise] = found.get(noise, 0) + count
    crowded = {rate: found for rate, found in noises.items() if len(found) > MOST_DISTINCT}
    if not crowded:
        return list(events), ()
    single = [(event, count) for event, count in events if _rate_and_noise(event)[0] not in crowded]
    return single, tuple(Ladder(rate, _charges(crowded[rate], adjacency)) for rate in sorted(crowded))


def _charges(noises: Mapping[float, int], adjacency: Adjacency) -> tuple[Charge, ...]:
    counts: dict[tuple[int, float], int] = {}
    for noise, count in noises.items():
        rung = rung_of(noise)
        key = rung, share_of(noise, rung, adjacency)
        counts[key] = counts.get(key, 0) + count
    return tuple(Charge(rung, share, count) for (rung, share), count in sorted(counts.items()))


def _rate_and_noise(event: DpEvent) -> tuple[float, float]:
    """Return rate and noise of a Gaussian answer on a draw, within LEAST_NOISE and MOST_NOISE; else (0, ∞)."""
    if isinstance(event, PoissonSampledDpEvent) and isinstance(event.event, GaussianDpEvent):
        rate, noise = float(event.sampling_probability), float(event.event.noise_multiplier)
        if 0 < rate < 1 and LEAST_NOISE <= noise < math.inf:
            return rate, min(noise, MOST_NOISE)
    return 0.0, math.inf


def blend_curves(noisy: Array, quiet: Array, share: float, orders: Sequence[float]) -> Array:
    """Return the Rényi curve of a blend. e^((α−1)·D_α) is a positive sum of divergences H_E, so it blends like them."""
    above = np.asarray(orders, dtype=np.float64) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.logaddexp(np.log1p(-share) + above * noisy, np.log(share) + above * quiet)
    return np.where(np.isfinite(noisy) & np.isfinite(quiet), logs / above, np.inf)


@dataclass(frozen=True, eq=False)
class Blend:
    """The composed loss of all `charges` at one rate, given the distributions at the rungs: a part for `compose`."""

    rungs: Mapping[int, LossGrid]
    charges: Sequence[Charge]

    @property
    def interval(self) -> float:
        return self._flights[0].noisy.interval

    @property
    def events(self) -> int:
        return sum(flight.events for flight in self._flights)

    @property
    def lower(self) -> int:
        return sum(flight.events * min(flight.noisy.lower, flight.quiet.lower) for flight in self._flights)

    @property
    def upper(self) -> int:
        return sum(flight.events * max(flight.noisy.upper, flight.quiet.upper) for flight in self._flights)

    @property
    def infinity(self) -> float:
        escapes = [flight.blend(flight.noisy.infinity, flight.quiet.infinity) for flight in self._flights]
        if any(np.any(escape >= 1) for escape in escapes):
            return 1.0
        each = (np.dot(flight.counts, np.log1p(-escape)) for flight, escape in zip(self._flights, escapes, strict=True))
        return -math.expm1(float(sum(each)))

    def cumulant(self, slope: float) -> float:
        """log E[exp(slope·loss)]: that of a blend is the blend of its ends."""
        total = 0.0
        for flight in self._flights:
            low, high = flight.noisy.cumulant(slope), flight.quiet.cumulant(slope)
            peak = max(low, high)
            logs = np.log(flight.blend(math.exp(low - peak), math.exp(high - peak)))
            total += flight.events * peak + float(np.dot(flight.counts, logs))
        return total

    def log_spectrum(self, length: int) -> LogSpectrum:
        """Log magnitude and angle (in turns) of the transform, computed only where it is not practically zero.

        Every factor has magnitude at most 1, so a frequency that falls below FLOOR stays there. After a few hundred
        steps, some hundred of a hundred thousand frequencies are left. The rungs that spend most come first.
        """
        magnitude: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
        turns: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
        alive = np.arange(length // 2 + 1)
        for flight in self._flights:
            noisy, quiet = (_pick_frequencies(grid, length, alive) for grid in (flight.noisy, flight.quiet))
            ceiling = np.log(np.maximum(np.maximum(np.abs(noisy), np.abs(quiet)), 1e-300))
            kept = magnitude[alive] + flight.events * ceiling > FLOOR
            magnitude[alive[~kept]] = -np.inf
            alive = alive[kept]
            for some in _portions(len(flight.shares), len(alive)):
                logs, angles = to_logarithms(flight.blend(noisy[kept], quiet[kept], some))
                magnitude[alive] += flight.counts[some] @ logs
                turns[alive] += flight.counts[some] @ angles
        return magnitude, turns

    @cached_property
    def _flights(self) -> list[_Flight]:
        found: dict[int, list[Charge]] = {}
        for charge in self.charges:
            found.setdefault(charge.rung, []).append(charge)
        flights = [(rung, _Flight(self.rungs[rung], self.rungs[rung + 1], some)) for rung, some in found.items()]
        return [flight for _, flight in sorted(flights, key=lambda pair: -pair[1].events / noise_at(pair[0]) ** 2)]


class _Flight:
    """The charges between two rungs, as arrays."""

    def __init__(self, noisy: LossGrid, quiet: LossGrid, charges: Sequence[Charge]) -> None:
        self.noisy, self.quiet = noisy, quiet
        self.events = sum(charge.count for charge in charges)
        self.shares: LongArray = np.array([charge.share for charge in charges], dtype=np.longdouble)
        self.counts: LongArray = np.array([charge.count for charge in charges], dtype=np.longdouble)

    def blend(self, noisy: Any, quiet: Any, some: slice = slice(None)) -> Any:
        """(1 − λ)·noisy + λ·quiet for some of the shares λ, one row each."""
        shares = self.shares[some]
        return noisy + (shares if np.ndim(noisy) == 0 else shares[:, None]) * (quiet - noisy)


def _portions(charges: int, frequencies: int) -> Iterator[slice]:
    """Yield as many charges at once as fit into some megabytes."""
    size = max(1, PORTION // max(1, frequencies))
    return (slice(start, start + size) for start in range(0, charges, size))


def _pick_frequencies(grid: LossGrid, length: int, frequencies: Frequencies) -> Spectrum:
    if len(frequencies) and frequencies[-1] >= LOW:
        return transform(grid, length)[frequencies]
    return _low_spectrum(grid, length)[frequencies]


@lru_cache(maxsize=192)
def _low_spectrum(grid: LossGrid, length: int) -> Spectrum:
    """Return the part of the transform that long compositions need, small enough to be kept for the next price."""
    return transform(grid, length)[:LOW].copy()
