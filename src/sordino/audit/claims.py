"""What a run claims, as a curve: contradicted by any two error rates that lie below it. Nothing here imports torch.

A ledger claims more than one ε: it claims δ(ε) for every ε at once, and with it a trade-off between the errors of every
attacker. Rates below that trade-off refute the claim, whatever the mechanism really is.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, reduce

import attr
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from sordino.accounting import pricing
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    unroll,
)
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.pld import pld
from sordino.audit.bounds import Rates, delta_of_mu, epsilon_of_mu

Events = list[tuple[DpEvent, int]]
Array = NDArray[np.float64]

EPSILONS: Array = np.concatenate([np.arange(0.0, 3.0, 0.1), np.arange(3.0, 12.5, 0.5)])
"""Where the curve is compared with the attacker: ε beyond these need more trials than an audit has."""
SCALES = (1 / 32, 64.0)
TOLERANCE = 1e-9
PRECISION = 0.02
INTERVAL = 0.005
"""The grid of losses: coarser than that of prices and rounded up as they are, so that an audit errs for the claim."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """The events of a run, as a claim about every attacker."""

    events: Events

    def epsilon(self, delta: float) -> float:
        """The ε that is claimed at `delta`."""
        return epsilon_of_mu(self._mu, delta) if self._mu is not None else pricing.epsilon(self.events, delta)

    @cached_property
    def curve(self) -> Array:
        """The claimed δ at each of `EPSILONS`."""
        if self._mu is not None:
            return np.array([delta_of_mu(self._mu, epsilon) for epsilon in EPSILONS])
        return np.array([self._losses.get_delta_for_epsilon(float(epsilon)) for epsilon in EPSILONS])

    @cached_property
    def _losses(self) -> PrivacyLossDistribution:
        parts = [pld(event, "add-or-remove-one", INTERVAL).self_compose(times) for event, times in self._leaves()]
        return reduce(lambda one, other: one.compose(other), parts)

    def _leaves(self) -> Events:
        return [part for event, times in self.events for part in unroll(event, times)]

    @cached_property
    def _mu(self) -> float | None:
        """Where everything is a plain Gaussian the curve has a closed form."""
        parts = self._leaves()
        plain = [(event, times) for event, times in parts if isinstance(event, GaussianDpEvent)]
        if len(plain) < len(parts):
            return None
        return math.sqrt(math.fsum(times * event.noise_multiplier**-2 for event, times in plain))

    def excess(self, false_alarms: Array, misses: Array) -> Array:
        """How far each pair of error rates lies beyond the claim: positive where it is refuted.

        The largest over ε, and over both directions, of 1 − misses − e^ε·alarms − δ(ε).
        """
        grown = np.exp(EPSILONS)
        found = 1 - misses[:, None] - grown * false_alarms[:, None] - self.curve
        exchanged = 1 - false_alarms[:, None] - grown * misses[:, None] - self.curve
        return np.asarray(np.maximum(found, exchanged).max(axis=1))

    def refuted_by(self, rates: Rates) -> bool:
        """Whether no mechanism that keeps this claim can have these error rates."""
        excess = self.excess(np.array([rates.false_alarms]), np.array([rates.misses]))
        return bool(excess[0] > TOLERANCE)

    def implied_epsilon(self, rates: Rates, delta: float) -> float | None:
        """The ε of these same events with just so much noise, more or less than claimed, that the rates are possible.

        A lower bound for mechanisms that have the claimed shape at some noise, as in Nasr et al. 2023; for any
        mechanism at all it exceeds the claim exactly if the rates refute the claim. None where an event has not one
        noise to scale.
        """
        if any(scaled(event, 1.0) is None for event, _ in self.events):
            return None
        low, high = (math.log(scale) for scale in SCALES)
        if self.at_noise(math.exp(low)).refuted_by(rates):
            return math.inf
        if not self.at_noise(math.exp(high)).refuted_by(rates):
            return 0.0
        refuted = self.refuted_by(rates)
        low, high = (low, 0.0) if refuted else (0.0, high)
        while high - low > PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if self.at_noise(math.exp(middle)).refuted_by(rates) else (middle, high)
        # More noise than `high` is refuted, less than `low` is not: take the end that lies on the answer's side of 1.
        return self.at_noise(math.exp(low if refuted else high))._coarse_epsilon(delta)

    def _coarse_epsilon(self, delta: float) -> float:
        if self._mu is not None:
            return epsilon_of_mu(self._mu, delta)
        return float(self._losses.get_epsilon_for_delta(delta))

    def at_noise(self, scale: float) -> Claim:
        """The same events with `scale` times the noise."""
        return Claim([(_required(scaled(event, scale)), count) for event, count in self.events])


def scaled(event: DpEvent, scale: float) -> DpEvent | None:
    """`event` with `scale` times its noise, or None for kinds whose noise is not one number."""
    if isinstance(event, PoissonSampledDpEvent | SelfComposedDpEvent):
        inner = scaled(event.event, scale)
        return None if inner is None else attr.evolve(event, event=inner)
    if isinstance(event, ComposedDpEvent):
        parts = [scaled(part, scale) for part in event.events]
        return None if None in parts else ComposedDpEvent([_required(part) for part in parts])
    if isinstance(event, GaussianDpEvent):
        return GaussianDpEvent(event.noise_multiplier * scale)
    if isinstance(event, ProjectedGaussian):
        return dataclasses.replace(event, noise_multiplier=event.noise_multiplier * scale)
    return None


def _required(event: DpEvent | None) -> DpEvent:
    assert event is not None
    return event
