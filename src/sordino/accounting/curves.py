"""Privacy loss distributions from δ(ε) curves: where a mechanism's exact curve is known, its PLD follows.

Connect-the-dots (Doroshenko et al. 2022, Alg. 1) turns a curve into the tightest distribution on a grid that is never
below it. dp_accounting has it too, but evaluates its curves point by point and subtracts neighbouring values close to
1, which leaves errors of 1e-16/interval; the closed forms here take all points at once and subtract small numbers only.
The first makes calibration take a second instead of half a minute, the second allows grids finer than 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

from sordino.accounting.composition import INTERVAL, Array

Curve = Callable[[Array], Array]

# Noise beyond this many deviations has probability below 1e-23, and is counted as infinite loss.
DEVIATIONS = 10.0
COARSE = 1.0
"""A grid wider than this is connected without the surplus."""


def connect_the_dots(
    curve: Curve, lower: float, upper: float, interval: float = INTERVAL, *, surplus: Curve | None = None
) -> DensePLDPmf:
    """The pessimistic distribution of the δ(ε) `curve`, on the grid between `lower` and `upper`.

    `curve` is ∫(P − e^ε Q)₊ and `surplus` is ∫(e^ε Q − P)₊ = δ(ε) − 1 + e^ε. Both give the same masses; below ε = 0 the
    surplus is the smaller of the two, so that give it if you can compute it without subtracting.
    Any bounds are safe: δ(upper) becomes mass at infinity, and losses below `lower` are rounded up to it.
    """
    first, last = math.floor(lower / interval), max(math.ceil(upper / interval), math.floor(lower / interval) + 1)
    grid: Array = np.arange(first, last + 1, dtype=np.float64) * interval
    if interval > COARSE:  # e^ε overflows at the first point above zero, and masses are far above rounding
        return _connect_coarsely(curve(grid), first, interval)
    split = min(max(-first, 0), len(grid) - 2)  # up to here (ε <= 0) the surplus is used, beyond it the curve
    below, above = grid[: split + 2], grid[split:]
    spare = surplus(below) if surplus is not None else curve(below) + np.expm1(below)
    deltas = np.minimum.accumulate(curve(above))
    decay, near = math.exp(-interval), -math.expm1(-interval)  # in decays alone: the growth of a coarse grid overflows
    masses = np.empty(len(grid))
    masses[0] = decay * (spare[1] - spare[0]) / near - spare[0]
    masses[1 : split + 1] = (decay * np.diff(spare[1:]) - np.diff(spare[:-1])) / near
    masses[split + 1 : -1] = (decay * np.diff(deltas[1:]) - np.diff(deltas[:-1])) / near
    masses[-1] = (deltas[-2] - deltas[-1]) / near
    return DensePLDPmf(interval, first, np.maximum(masses, 0.0), float(deltas[-1]), True)


def _connect_coarsely(curve: Array, first: int, interval: float) -> DensePLDPmf:
    """The same masses from the curve alone: its values are near 1 below zero, which costs 1e-16 of mass per point."""
    deltas = np.minimum.accumulate(curve)
    decay, near = math.exp(-interval), -math.expm1(-interval)
    masses = np.empty(len(deltas))
    masses[0] = (1 - deltas[0]) + decay * (deltas[1] - deltas[0]) / near
    masses[1:-1] = (decay * np.diff(deltas[1:]) - np.diff(deltas[:-1])) / near
    masses[-1] = (deltas[-2] - deltas[-1]) / near
    return DensePLDPmf(interval, first, np.maximum(masses, 0.0), float(deltas[-1]), True)


def gaussian_delta(epsilons: Array, noise: float) -> Array:
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
    deltas[inside] = rate * gaussian_delta(_unsampled(epsilons[inside], rate), noise)
    return deltas


def addition_delta(epsilons: Array, rate: float, noise: float) -> Array:
    """δ(ε) of N(0,σ²) against (1−q)·N(0,σ²) + q·N(1,σ²), zero above ε = −log(1−q).

    With a = log(1 + (e^−ε − 1)/q) it is e^ε·q·(e^a Φ(1/(2σ) + aσ) − Φ(aσ − 1/(2σ))): the surplus of removal, mirrored.
    """
    deltas = np.zeros(len(epsilons))
    inside = epsilons < (-math.log1p(-rate) if rate < 1 else math.inf)
    losses = _unsampled(-epsilons[inside], rate)
    half = 1 / (2 * noise)
    gained = np.exp(losses + epsilons[inside] + special.log_ndtr(half + losses * noise))
    paid = np.exp(epsilons[inside] + special.log_ndtr(losses * noise - half))
    deltas[inside] = np.clip(rate * (gained - paid), 0.0, 1.0)
    return deltas


def sampled_gaussian(noise: float, rate: float, interval: float = INTERVAL) -> PrivacyLossDistribution:
    """The PLD of a Gaussian answer on a Poisson draw, 0 < rate <= 1, for adding or removing one record."""

    def removal(grid: Array) -> Array:
        return removal_delta(grid, rate, noise)

    def addition(grid: Array) -> Array:
        return addition_delta(grid, rate, noise)

    lowest, highest = (_loss(x, noise, rate) for x in (-DEVIATIONS * noise, 1 + DEVIATIONS * noise))
    remove = connect_the_dots(removal, lowest, highest, interval, surplus=_mirrored(addition))
    if rate == 1:
        return PrivacyLossDistribution(remove)
    highest = _loss(DEVIATIONS * noise, noise, rate)
    add = connect_the_dots(addition, -highest, -lowest, interval, surplus=_mirrored(removal))
    return PrivacyLossDistribution(remove, add)


def _mirrored(curve: Curve) -> Curve:
    """∫(e^ε Q − P)₊ = e^ε ∫(Q − e^−ε P)₊: the surplus of a pair is the scaled curve of the exchanged pair."""
    return lambda epsilons: np.exp(epsilons) * curve(-epsilons)


def _unsampled(losses: Array, rate: float) -> Array:
    """log(1 + (e^loss − 1)/q): the loss of the Gaussian alone where the sampled one has `losses`."""
    with np.errstate(over="ignore", divide="ignore"):
        small = np.log1p(np.expm1(losses) / rate)
    large = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)


def _loss(x: float, noise: float, rate: float) -> float:
    """log(1 − q + q·exp((x − 1/2)/σ²)), the privacy loss at the answer x."""
    return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + (x - 0.5) / noise**2))
