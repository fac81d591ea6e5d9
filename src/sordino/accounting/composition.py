"""Composing privacy loss distributions by one Fourier transform, however many different events there are.

A privacy loss distribution on the grid h·ℤ composes by convolution. With p̂ᵢ the discrete Fourier transform of event i,
the composition of nᵢ times event i is the inverse transform of Π p̂ᵢ^nᵢ. dp_accounting does the same for one event; here
the transforms are kept, so that one more step costs one inverse transform, and events are multiplied before it.

What makes the result an upper bound:
- every input is pessimistic (dp_accounting's connect-the-dots, Doroshenko et al. 2022);
- the transform wraps losses modulo its length: the mass outside the window is at most `TAIL` by Chernoff's bound, and
  that much is added to the mass at infinity;
- an error in p̂ is multiplied by nᵢ, so transforms are kept in extended precision where the machine has it, and
  `ROUNDING` per composed event is added to the mass at infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import fft, signal

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
LongArray = np.ndarray[tuple[int, ...], np.dtype[np.longdouble]]

INTERVAL = 1e-4
TAIL = 1e-15
ROUNDING = 8 * float(np.finfo(np.longdouble).eps)
SLOPES: Array = np.geomspace(0.02, 5000.0, 48)


@dataclass(frozen=True, eq=False)
class LossGrid:
    """P[loss = (lower + k)·INTERVAL] = probabilities[k], and P[loss = ∞] = infinity."""

    lower: int
    probabilities: Array
    infinity: float

    @property
    def upper(self) -> int:
        return self.lower + len(self.probabilities) - 1

    @cached_property
    def right_cumulants(self) -> Array:
        """log E[exp(s·loss)] over the finite losses, for every slope s: Chernoff's bound on large losses."""
        return self._cumulants(SLOPES)

    @cached_property
    def left_cumulants(self) -> Array:
        """The same for negative slopes: Chernoff's bound on small losses."""
        return self._cumulants(-SLOPES)

    def _cumulants(self, slopes: Array) -> Array:
        kept = self.probabilities > 0
        losses = (np.arange(len(self.probabilities))[kept] + self.lower) * INTERVAL
        logs = np.log(self.probabilities[kept])
        if not len(losses):
            return np.full(len(slopes), -np.inf)
        return np.array([_log_sum(logs + slope * losses) for slope in slopes])

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence: infinity + Σ p·(1 − e^(ε − loss)) over losses above ε."""
        losses = np.arange(self.lower, self.upper + 1) * INTERVAL
        above = losses > epsilon
        return float(self.infinity - np.dot(np.expm1(epsilon - losses[above]), self.probabilities[above]))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with divergence at most `delta`; infinite if there is none.

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
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-INTERVAL)], from_the_top)
        first = int(np.argmax(mass - math.exp(-INTERVAL) * discounted > delta))
        loss = (self.upper - first) * INTERVAL
        return max(0.0, loss + math.log((mass[first] - delta) / discounted[first]))


def compose(parts: Sequence[tuple[LossGrid, int]]) -> LossGrid:
    """The loss of `count` times each of `parts`, as a pessimistic grid."""
    parts = [(grid, count) for grid, count in parts if count > 0]
    if any(grid.infinity >= 1 for grid, _ in parts):
        return LossGrid(0, np.zeros(1), 1.0)
    if not parts:
        return LossGrid(0, np.ones(1), 0.0)
    lower, upper = _window(parts)
    length = _length(upper - lower + 1)
    magnitude: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
    turns: LongArray = np.zeros(length // 2 + 1, dtype=np.longdouble)
    for grid, count in parts:
        log_magnitude, turn = _log_spectrum(grid, length)
        magnitude += count * log_magnitude
        turns += count * turn
    phase = 2 * np.pi * (turns - np.rint(turns)).astype(np.float64)
    wrapped = fft.irfft(np.exp(magnitude.astype(np.float64)) * np.exp(1j * phase), length)
    probabilities = np.maximum(np.take(wrapped, np.arange(lower, upper + 1), mode="wrap"), 0.0)
    escaped = -math.expm1(sum(count * math.log1p(-grid.infinity) for grid, count in parts))
    rounding = ROUNDING * sum(count for _, count in parts)
    return LossGrid(lower, probabilities, min(1.0, escaped + TAIL + rounding))


def _window(parts: Sequence[tuple[LossGrid, int]]) -> tuple[int, int]:
    """Grid positions outside which the composed loss has mass at most TAIL: Chernoff over SLOPES, and the support."""
    right = sum(count * grid.right_cumulants for grid, count in parts)
    left = sum(count * grid.left_cumulants for grid, count in parts)
    margin = math.log(2 / TAIL)
    highest = float(np.min((right + margin) / SLOPES)) / INTERVAL
    lowest = -float(np.min((left + margin) / SLOPES)) / INTERVAL
    upper = min(math.ceil(highest), sum(count * grid.upper for grid, count in parts))
    lower = max(math.floor(lowest), sum(count * grid.lower for grid, count in parts))
    return min(lower, upper), max(lower, upper)


def _length(size: int) -> int:
    """A fast transform length, from a sparse set so that the kept transforms serve many counts."""
    octave = 1 << max(4, size.bit_length() - 1)
    return next(length for length in (octave, octave * 5 // 4, octave * 3 // 2, 2 * octave) if length >= size)


@lru_cache(maxsize=256)
def _log_spectrum(grid: LossGrid, length: int) -> tuple[LongArray, LongArray]:
    """Log magnitude and angle (in turns) of the transform; loss 0 is at index 0, so that the angles stay small."""
    positions = np.arange(grid.lower, grid.upper + 1) % length
    folded = np.bincount(positions, weights=grid.probabilities, minlength=length)
    spectrum = fft.rfft(folded.astype(np.longdouble))
    tau = 2 * np.arccos(np.longdouble(-1))
    return np.log(np.maximum(np.abs(spectrum), 1e-300)), np.arctan2(spectrum.imag, spectrum.real) / tau


def _log_sum(logs: Array) -> float:
    peak = float(np.max(logs))
    return peak + math.log(float(np.sum(np.exp(logs - peak))))
