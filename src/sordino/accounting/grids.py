"""Privacy losses on a grid: from a δ(ε) curve to a distribution, and from many distributions to their composition.

**Curves.** Where a mechanism's exact curve is known, its distribution follows. Connect-the-dots (Doroshenko et al.
2022, Alg. 1) turns a curve into the tightest distribution on a grid that is never below it. dp_accounting has it too,
but evaluates its curves point by point and subtracts neighbouring values close to 1, which leaves errors of
1e-16/interval. The closed forms here take all points at once, which makes calibration take a second instead of half a
minute. They also subtract small numbers only, which allows grids finer than 1e-4.

**Composition.** A privacy loss distribution on the grid h·ℤ composes by convolution. With p̂ᵢ the discrete Fourier
transform of event i, the composition of nᵢ times event i is the inverse transform of Π p̂ᵢ^nᵢ. dp_accounting does the
same for one event. Here the transforms are kept and multiplied before the inverse, so one more step costs only one
inverse transform. Three things make the result an upper bound:
- every input is pessimistic (connect-the-dots);
- the transform wraps losses modulo its length: the mass outside the window is at most `TAIL` by Chernoff's bound, and
  that much is added to the mass at infinity;
- an error in p̂ is multiplied by nᵢ, so transforms are kept in extended precision where the machine has it, and
  `ROUNDING` per composed event is added to the mass at infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, signal, special

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
LongArray = np.ndarray[tuple[int, ...], np.dtype[np.longdouble]]
Spectrum = np.ndarray[tuple[int, ...], np.dtype[np.clongdouble]]
LogSpectrum = tuple[LongArray, LongArray]
Curve = Callable[[Array], Array]

INTERVAL = 1e-4  # dp_accounting's own choice
TAIL = 1e-15
ROUNDING = 8 * float(np.finfo(np.longdouble).eps)
SLOPES: tuple[float, ...] = (*np.geomspace(1e-9, 0.02, 48)[:-1].tolist(), *np.geomspace(0.02, 50_000.0, 64).tolist())
LONG = 2**18
"""Only the last few of the longer transforms are kept: each takes megabytes."""
# Noise beyond this many deviations has probability below 1e-23, and is counted as infinite loss.
DEVIATIONS = 10.0
COARSE = 1.0
"""A grid wider than this is connected without the surplus."""


# -- from a curve to a distribution -----------------------------------------------------------------------------------


def connect_the_dots(
    curve: Curve, lower: float, upper: float, interval: float = INTERVAL, *, surplus: Curve | None = None
) -> DensePLDPmf:
    """Return the pessimistic distribution of the δ(ε) `curve`, on the grid between `lower` and `upper`.

    `curve` is ∫(P − e^ε Q)₊ and `surplus` is ∫(e^ε Q − P)₊ = δ(ε) − 1 + e^ε. Both give the same masses. Below ε = 0 the
    surplus is the smaller of the two, so give it if you can compute it without subtracting.
    Any bounds are safe: δ(upper) becomes mass at infinity, and losses below `lower` are rounded up to it.
    """
    first, last = math.floor(lower / interval), max(math.ceil(upper / interval), math.floor(lower / interval) + 1)
    grid: Array = np.arange(first, last + 1, dtype=np.float64) * interval
    if interval > COARSE:  # e^ε overflows at the first point above zero, and masses are far above rounding
        return _connect_coarsely(curve(grid), first, interval)
    split = min(max(-first, 0), len(grid) - 2)  # the surplus is used up to here (ε <= 0), the curve beyond
    below, above = grid[: split + 2], grid[split:]
    spare = surplus(below) if surplus is not None else curve(below) + np.expm1(below)
    deltas = np.minimum.accumulate(curve(above))
    decay, near = math.exp(-interval), -math.expm1(-interval)  # decays only: growth overflows on a coarse grid
    masses = np.empty(len(grid))
    masses[0] = decay * (spare[1] - spare[0]) / near - spare[0]
    masses[1 : split + 1] = (decay * np.diff(spare[1:]) - np.diff(spare[:-1])) / near
    masses[split + 1 : -1] = (decay * np.diff(deltas[1:]) - np.diff(deltas[:-1])) / near
    masses[-1] = (deltas[-2] - deltas[-1]) / near
    return DensePLDPmf(interval, first, np.maximum(masses, 0.0), float(deltas[-1]), True)


def _connect_coarsely(curve: Array, first: int, interval: float) -> DensePLDPmf:
    """Find the same masses from the curve alone, whose values near 1 below zero cost 1e-16 of mass per point."""
    deltas = np.minimum.accumulate(curve)
    decay, near = math.exp(-interval), -math.expm1(-interval)
    masses = np.empty(len(deltas))
    masses[0] = (1 - deltas[0]) + decay * (deltas[1] - deltas[0]) / near
    masses[1:-1] = (decay * np.diff(deltas[1:]) - np.diff(deltas[:-1])) / near
    masses[-1] = (deltas[-2] - deltas[-1]) / near
    return DensePLDPmf(interval, first, np.maximum(masses, 0.0), float(deltas[-1]), True)


def gaussian_curve(epsilons: Array, noise: float) -> Array:
    """δ(ε) = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ), also for ε < 0 (Balle & Wang 2018, Thm. 8)."""
    half = 1 / (2 * noise)
    paid = np.exp(np.minimum(epsilons + special.log_ndtr(-half - epsilons * noise), 0.0))
    deltas: Array = np.clip(special.ndtr(half - epsilons * noise) - paid, 0.0, 1.0)
    return deltas


def removal_delta(epsilons: Array, rate: float, noise: float) -> Array:
    """δ(ε) of (1−q)·N(0,σ²) + q·N(1,σ²) against N(0,σ²): q·δ_Gauss(log(1 + (e^ε − 1)/q)) where the logarithm exists.

    Below ε = log(1−q) the first is above e^ε times the second everywhere, and δ = 1 − e^ε.
    """
    deltas = -np.expm1(np.minimum(epsilons, 0.0))
    inside = epsilons > (math.log1p(-rate) if rate < 1 else -math.inf)
    deltas[inside] = rate * gaussian_curve(_undo_sampling(epsilons[inside], rate), noise)
    return deltas


def addition_delta(epsilons: Array, rate: float, noise: float) -> Array:
    """δ(ε) of N(0,σ²) against (1−q)·N(0,σ²) + q·N(1,σ²), zero above ε = −log(1−q).

    With a = log(1 + (e^−ε − 1)/q) it is e^ε·q·(e^a Φ(1/(2σ) + aσ) − Φ(aσ − 1/(2σ))): the surplus of removal, mirrored.
    """
    deltas = np.zeros(len(epsilons))
    inside = epsilons < (-math.log1p(-rate) if rate < 1 else math.inf)
    losses = _undo_sampling(-epsilons[inside], rate)
    half = 1 / (2 * noise)
    gained = np.exp(losses + epsilons[inside] + special.log_ndtr(half + losses * noise))
    paid = np.exp(epsilons[inside] + special.log_ndtr(losses * noise - half))
    deltas[inside] = np.clip(rate * (gained - paid), 0.0, 1.0)
    return deltas


def sampled_gaussian(noise: float, rate: float, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """Return the PLD of a Gaussian answer on a Poisson draw, 0 < rate <= 1, for adding or removing one record."""

    def removal(grid: Array) -> Array:
        return removal_delta(grid, rate, noise)

    def addition(grid: Array) -> Array:
        return addition_delta(grid, rate, noise)

    lowest, highest = (_loss(x, noise, rate) for x in (-DEVIATIONS * noise, 1 + DEVIATIONS * noise))
    remove = connect_the_dots(removal, lowest, highest, interval, surplus=_mirror(addition))
    if rate == 1:
        return PrivacyLossDistribution(remove)
    highest = _loss(DEVIATIONS * noise, noise, rate)
    add = connect_the_dots(addition, -highest, -lowest, interval, surplus=_mirror(removal))
    return PrivacyLossDistribution(remove, add)


def _mirror(curve: Curve) -> Curve:
    """∫(e^ε Q − P)₊ = e^ε ∫(Q − e^−ε P)₊: the surplus of a pair is the scaled curve of the exchanged pair."""
    return lambda epsilons: np.exp(epsilons) * curve(-epsilons)


def _undo_sampling(losses: Array, rate: float) -> Array:
    """log(1 + (e^loss − 1)/q): the loss of the Gaussian alone where the sampled one has `losses`."""
    with np.errstate(over="ignore", divide="ignore"):
        small = np.log1p(np.expm1(losses) / rate)
    large = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)


def _loss(x: float, noise: float, rate: float) -> float:
    """log(1 − q + q·exp((x − 1/2)/σ²)), the privacy loss at the answer x."""
    return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + (x - 0.5) / noise**2))


# -- composition ------------------------------------------------------------------------------------------------------


class Part(Protocol):
    """A privacy loss, with what `compose` needs to know about it."""

    @property
    def interval(self) -> float: ...

    @property
    def lower(self) -> int:
        """The smallest loss, in intervals."""
        ...

    @property
    def upper(self) -> int:
        """The largest finite loss, in intervals."""
        ...

    @property
    def infinity(self) -> float:
        """The probability of an infinite loss."""
        ...

    @property
    def events(self) -> int:
        """How many events this stands for: each adds its share of rounding."""
        ...

    def cumulant(self, slope: float) -> float:
        """log E[exp(slope·loss)] over the finite losses."""
        ...

    def log_spectrum(self, length: int) -> LogSpectrum:
        """Log magnitude and angle (in turns) of the transform of this length."""
        ...


@dataclass(frozen=True, eq=False)
class LossGrid:
    """P[loss = (lower + k)·interval] = probabilities[k], and P[loss = ∞] = infinity.

    The grid keeps its cumulants and its last transforms for the next price with another count.
    """

    lower: int
    probabilities: Array
    infinity: float
    interval: float = INTERVAL
    _cumulants: dict[float, float] = field(default_factory=dict, repr=False)

    @property
    def upper(self) -> int:
        return self.lower + len(self.probabilities) - 1

    @property
    def events(self) -> int:
        return 1

    @property
    def width(self) -> float:
        return len(self.probabilities) * self.interval

    @property
    def losses(self) -> Array:
        return np.arange(self.lower, self.upper + 1, dtype=np.float64) * self.interval

    def cumulant(self, slope: float) -> float:
        """log E[exp(slope·loss)] over the finite losses."""
        if slope not in self._cumulants:
            with np.errstate(divide="ignore"):
                exponents = np.log(self.probabilities) + slope * self.losses
            peak = max(float(np.max(exponents)), -1e300)
            self._cumulants[slope] = peak + math.log(max(float(np.sum(np.exp(exponents - peak))), 1e-300))
        return self._cumulants[slope]

    def log_spectrum(self, length: int) -> LogSpectrum:
        """Log magnitude and angle (in turns) of the transform."""
        return _log_spectrum(self, length) if length <= LONG else _long_log_spectrum(self, length)

    def delta(self, epsilon: float) -> float:
        """Return the hockey-stick divergence: infinity + Σ p·(1 − e^(ε − loss)) over losses above ε."""
        start = min(max(math.floor(epsilon / self.interval) - self.lower, 0), len(self.probabilities))
        losses = self.losses[start:]
        return float(self.infinity - np.dot(np.expm1(np.minimum(epsilon - losses, 0.0)), self.probabilities[start:]))

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with divergence at most `delta`; infinite if there is none.

        With S_k = Σ_{j≥k} p_j e^(ℓ_k − ℓ_j), a first-order recursion, δ(ε) = ∞-mass + Σ_{j≥k} p_j − e^(ε − ℓ_k) S_k
        for ε between ℓ_{k-1} and ℓ_k.
        """
        if self.infinity > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        start = max(self.lower, 1)  # only losses above zero count for ε ≥ 0
        from_the_top = self.probabilities[start - self.lower :][::-1]
        mass = self.infinity + np.cumsum(from_the_top)
        decay = math.exp(-self.interval)
        discounted = signal.lfilter([1.0], [1.0, -decay], from_the_top)
        exceeded = mass - decay * discounted > delta
        first = int(np.argmax(exceeded)) if exceeded.any() else len(mass) - 1
        loss = (self.upper - first) * self.interval
        return max(0.0, loss + math.log((mass[first] - delta) / discounted[first]))


def compose(parts: Sequence[tuple[Part, int]]) -> LossGrid:
    """Return the loss of `count` times each of `parts`, all on one interval, as a pessimistic grid."""
    parts = [(part, count) for part, count in parts if count > 0]
    if any(part.infinity >= 1 for part, _ in parts):
        return LossGrid(0, np.zeros(1), 1.0)
    if not parts:
        return LossGrid(0, np.ones(1), 0.0)
    interval = parts[0][0].interval
    lower, upper = _window(parts, interval)
    length = _length(upper - lower + 1)
    magnitude: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
    turns: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
    for part, count in parts:
        log_magnitude, turn = part.log_spectrum(length)
        magnitude += count * log_magnitude
        turns += count * turn
    phase = 2 * np.pi * (turns - np.rint(turns)).astype(np.float64)
    wrapped = fft.irfft(np.exp(magnitude.astype(np.float64)) * np.exp(1j * phase), length)
    probabilities = np.maximum(np.take(wrapped, np.arange(lower, upper + 1), mode="wrap"), 0.0)
    escaped = -math.expm1(sum(count * math.log1p(-part.infinity) for part, count in parts))
    rounding = ROUNDING * sum(count * part.events for part, count in parts)
    return LossGrid(lower, probabilities, min(1.0, escaped + TAIL + rounding), interval)


def count_points(parts: Sequence[tuple[Part, int]]) -> int:
    """Return how many grid points the composition of `parts` takes."""
    if not parts or any(part.infinity >= 1 for part, count in parts if count > 0):
        return 1
    lower, upper = _window(parts, parts[0][0].interval)
    return upper - lower + 1


def _window(parts: Sequence[tuple[Part, int]], interval: float) -> tuple[int, int]:
    """Find positions outside which the composed loss has mass at most TAIL, by Chernoff's bound and the support."""
    upper = sum(count * part.upper for part, count in parts)
    lower = sum(count * part.lower for part, count in parts)
    above, below = (_chernoff(parts, sign) / interval for sign in (1, -1))
    upper = min(math.ceil(above), upper) if math.isfinite(above) else upper
    lower = max(math.floor(-below), lower) if math.isfinite(below) else lower
    return min(lower, upper), max(lower, upper)


def _chernoff(parts: Sequence[tuple[Part, int]], sign: int) -> float:
    """min over s of (log E[exp(±s·loss)] + log(2/TAIL))/s, beyond which ±loss has mass at most TAIL/2.

    Every s gives a bound. The bound first falls and then rises in s, so bisection over SLOPES finds the smallest.
    """

    def bound(index: int) -> float:
        total = math.fsum(count * part.cumulant(sign * SLOPES[index]) for part, count in parts)
        return (total + math.log(2 / TAIL)) / SLOPES[index]

    low, high = 0, len(SLOPES) - 1
    while low < high:
        middle = (low + high) // 2
        if bound(middle) <= bound(middle + 1):
            high = middle
        else:
            low = middle + 1
    return bound(low)


def _length(size: int) -> int:
    """Choose a fast transform length, from a sparse set so that the kept transforms serve many counts."""
    octave = 1 << max(4, size.bit_length() - 1)
    return next(length for length in (octave, octave * 5 // 4, octave * 3 // 2, 2 * octave) if length >= size)


def transform(grid: LossGrid, length: int) -> Spectrum:
    """Transform the probabilities, and scale them up to full mass where rounding has lost some.

    Loss 0 is at index 0, so the angles that matter are small.
    """
    positions = np.arange(grid.lower, grid.upper + 1) % length
    folded = np.bincount(positions, weights=grid.probabilities, minlength=length)
    spectrum: Spectrum = fft.rfft(folded.astype(np.longdouble))
    mass = spectrum[0].real
    return spectrum * max((1 - grid.infinity) / mass, 1) if mass > 0 else spectrum


@lru_cache(maxsize=64)
def _log_spectrum(grid: LossGrid, length: int) -> LogSpectrum:
    return to_logarithms(transform(grid, length))


@lru_cache(maxsize=4)
def _long_log_spectrum(grid: LossGrid, length: int) -> LogSpectrum:
    return to_logarithms(transform(grid, length))


def to_logarithms(spectrum: Spectrum) -> LogSpectrum:
    """Return log magnitude and angle (in turns): where transforms multiply, these add."""
    tau = 2 * np.arccos(np.longdouble(-1))
    return np.log(np.maximum(np.abs(spectrum), 1e-300)), np.arctan2(spectrum.imag, spectrum.real) / tau
