"""The price of clipping by norms that random projections estimated (DP-SGD-JL).

With r projections the norm of a gradient g is estimated as ‖g‖·χ_r/√r, so that a contribution clipped to C has length
at most C·Z_r with Z_r = √r/χ_r: the sensitivity is random (Lemma 4.3 of the paper). The projections are public and
independent of the data. One answer is therefore a *mixture* over z = Z_r/σ, with z known, of Gaussians of shift z:

    δ(ε) = E_z[δ_z(ε)],   δ_z of N(z, 1) against N(0, 1), or on a Poisson draw of (1−q) N(0, 1) + q N(z, 1) against it.

Everything is rounded towards more loss. z is rounded up to the next of `LEVELS` values, or to ∞, which is an answer
without noise. The loss moves onto a grid by connect-the-dots (Doroshenko et al. 2022), which keeps the mass that both
neighbours give to every cell. Losses above `HIGHEST` become ∞. Z_r has the tail of z^(-r), so no moment of e^loss is
finite: the Rényi divergence is infinite for every r, and so is ε for few projections. The proof is in
docs/proofs/jl-gaussian.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import gammainc, gammainccinv, gammaincinv, ndtr

from sordino.accounting.events import Adjacency, DpEvent
from sordino.accounting.grids import INTERVAL, Array
from sordino.accounting.pld import pld, sampled_pld
from sordino.accounting.rdp import ORDERS, rdp_curve, sampled_rdp_curve
from sordino.errors import InvalidInput

Positions = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

LEVELS = 600
TAIL = 1e-18
LOW_TAIL = 1e-9
HIGHEST = 100.0
"""Larger losses count as infinite: telling ε = 200 from ∞ would cost time and help no one."""
LOWEST = -50.0
"""Lower losses have mass below e^LOWEST."""
NEGLIGIBLE = 1e-16
"""To shorten a distribution, this much mass is moved up: to the rest at its lower end, to ∞ at its upper end."""
SPREAD = 100


@dataclass(frozen=True)
class ProjectedGaussian(DpEvent):
    """A Gaussian release of contributions that were clipped by norms estimated with `projections` random projections.

    `noise_multiplier` is the noise over the *nominal* sensitivity C.
    """

    noise_multiplier: float
    projections: int

    def __post_init__(self) -> None:
        if not (self.noise_multiplier > 0 and math.isfinite(self.noise_multiplier)):
            raise InvalidInput(f"noise_multiplier={self.noise_multiplier} must be > 0 and finite: no noise, no privacy")
        if not (isinstance(self.projections, int) and self.projections >= 1):
            raise InvalidInput(f"projections={self.projections!r} must be a whole number >= 1: 20 or more is advised")


NAMES = {"jl-gaussian": ProjectedGaussian}


@pld.register(ProjectedGaussian)
def _(event: ProjectedGaussian, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    return _mixture(event, 1.0, adjacency, interval)


@sampled_pld.register(ProjectedGaussian)
def _(
    event: ProjectedGaussian, rate: float, adjacency: Adjacency, interval: float = INTERVAL
) -> PrivacyLossDistribution:
    return _mixture(event, rate, adjacency, interval)


@rdp_curve.register(ProjectedGaussian)
def _(event: ProjectedGaussian, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> Array:
    raise _infinite_renyi(event)


@sampled_rdp_curve.register(ProjectedGaussian)
def _(event: ProjectedGaussian, _rate: float, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> Array:
    raise _infinite_renyi(event)


def tail_epsilon(noise_multiplier: float, projections: int, rate: float, steps: int, delta: float) -> float:
    """Estimate the ε that the tail of Z_r alone forces, to show how bad few projections are. It is not a bound.

    Solves δ = T·q·Pr[χ²_r < r / (2σ²(ε + ln 1/q))], the chance that some step hardly clips the record at all.
    """
    chance = delta / (steps * rate)
    if chance >= 1:
        return 0.0
    chi_square = 2 * float(gammaincinv(projections / 2, chance))
    return max(0.0, projections / (2 * noise_multiplier**2 * chi_square) + math.log(rate))


def _mixture(event: ProjectedGaussian, rate: float, adjacency: Adjacency, interval: float) -> PrivacyLossDistribution:
    if adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"{event!r} has no proven price under {adjacency} adjacency: both exchanged records meet the same "
            "projections, which ties their lengths together; use add-or-remove-one"
        )
    positions = _positions(interval)
    shifts, weights, noiseless = _levels(event)
    with_record, without = _cell_masses(positions.astype(np.float64) * interval, rate, shifts, weights)
    remove = _connect(positions, interval, with_record, without)
    add = _connect(-positions[::-1], interval, without[::-1], with_record[::-1])
    # Where z = ∞ a drawn record is seen as it is. With it in the data the loss is ∞ with probability q, else ln(1−q);
    # without it the loss is −ln(1−q).
    unseen = math.log1p(-rate) if rate < 1 else -math.inf
    remove[-1] += noiseless * rate
    remove[np.searchsorted(positions, unseen / interval)] += noiseless * (1 - rate)
    add[np.searchsorted(-positions[::-1], -unseen / interval)] += noiseless
    return PrivacyLossDistribution(_dense(positions, remove, interval), _dense(-positions[::-1], add, interval))


def _levels(event: ProjectedGaussian) -> tuple[Array, Array, float]:
    """Return values of z with the mass that is rounded up to each, and the mass that is rounded up to z = ∞."""
    half = event.projections / 2
    smallest = math.sqrt(half / gammainccinv(half, LOW_TAIL))
    largest = math.sqrt(half / gammaincinv(half, TAIL))
    # A shift this large loses more than HIGHEST with certainty: beyond it nothing differs from z = ∞.
    largest = min(largest, event.noise_multiplier * (math.sqrt(2 * HIGHEST) + 12))
    stretches = np.geomspace(smallest, max(largest, 1.001 * smallest), LEVELS)
    above = gammainc(half, half / stretches**2)
    weights = -np.diff(above, prepend=1.0)
    return stretches / event.noise_multiplier, weights, float(above[-1])


def _positions(interval: float) -> Positions:
    """Choose the losses that carry mass, as multiples of the interval: all near 0, then ever sparser by 1/SPREAD."""

    def up_to(bound: float) -> list[int]:
        found = [0]
        while found[-1] * interval < bound:
            found.append(found[-1] + max(1, found[-1] // SPREAD))
        return found

    negative, positive = up_to(-LOWEST), up_to(HIGHEST)
    return np.array([-position for position in reversed(negative[1:])] + positive, dtype=np.int64)


def _cell_masses(losses: Array, rate: float, shifts: Array, weights: Array) -> tuple[Array, Array]:
    """Return the mass of every cell between `losses`, and of the two outer cells, with and without the record.

    With the record the output x of shift z is (1−q) N(0, 1) + q N(z, 1), without it N(0, 1); the loss
    ln(1 − q + q e^(zx − z²/2)) grows with x, so that cells of losses are intervals of x.
    """
    with np.errstate(divide="ignore"):
        logits = np.log(np.maximum(np.expm1(losses) + rate, 0.0) / rate)
    unshifted, shifted = np.zeros(len(losses) + 1), np.zeros(len(losses) + 1)
    for shift, weight in zip(shifts, weights, strict=True):
        outputs = logits / shift + shift / 2
        unshifted += weight * _between(outputs)
        shifted += weight * _between(outputs - shift)
    return (1 - rate) * unshifted + rate * shifted, unshifted


def _between(points: Array) -> Array:
    """Standard normal mass between consecutive points and outside them, exact to rounding in either tail."""
    below, above = ndtr(points), ndtr(-points)
    inner = np.where(points[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.concatenate([below[:1], inner, above[-1:]])


def _connect(positions: Positions, interval: float, upper: Array, lower: Array) -> Array:
    """Connect the dots: move the mass of every cell to its ends such that upper and lower mass stay what they are.

    The lowest cell moves up to the first position, the highest to infinity, which is the last of the masses.
    """
    inner = upper[1:-1]
    starts, widths = positions[:-1] * interval, np.diff(positions) * interval
    to_the_end = np.clip((inner - lower[1:-1] * np.exp(starts)) / -np.expm1(-widths), 0.0, inner)
    masses = np.zeros(len(positions) + 1)
    masses[0], masses[-1] = upper[0], upper[-1]
    masses[:-2] += inner - to_the_end
    masses[1:-1] += to_the_end
    return masses


def _dense(positions: Positions, masses: Array, interval: float) -> DensePLDPmf:
    """Put the distribution on every multiple of the interval, without the negligible mass at either end."""
    below, above = np.cumsum(masses[:-1]), np.cumsum(masses[:-1][::-1])[::-1]
    first = int(np.searchsorted(below, NEGLIGIBLE))
    end = max(first + 1, int(np.searchsorted(-above, -NEGLIGIBLE)))
    kept = positions[first:end]
    dense = np.zeros(kept[-1] - kept[0] + 1)
    dense[kept - kept[0]] = masses[first:end]
    dense[0] = below[first]
    return DensePLDPmf(interval, int(kept[0]), dense, float(masses[end:].sum()), True)


def _infinite_renyi(event: ProjectedGaussian) -> InvalidInput:
    return InvalidInput(
        f"{event!r} has no Rényi price: its divergence is infinite at every order, because the estimated norm may be "
        "arbitrarily far too small; use accountant='pld'"
    )
