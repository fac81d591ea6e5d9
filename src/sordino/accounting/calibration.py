"""Calibration: the noise, or the number of steps, that a budget pays for.

The price never exceeds the budget and lies within `TOLERANCE` below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sordino.accounting.budget import Budget, affordable
from sordino.accounting.events import DpEvent, Events, GaussianDpEvent, PoissonSampledDpEvent
from sordino.errors import InvalidInput

TOLERANCE = 1e-3
LEAST_NOISE = 0.1
MOST_NOISE = 1e6
MOST_STEPS = 10**9


@dataclass(frozen=True)
class Calibrated:
    """The smallest noise that keeps within the budget, and the ε that it costs."""

    noise_multiplier: float
    epsilon: float


@dataclass(frozen=True)
class _Probe:
    noise: float
    epsilon: float


def noise_for(budget: Budget, make_events: Callable[[float], Events], *, start: float = 1.0) -> Calibrated:
    """Find the smallest σ for which `make_events(σ)` costs at most the budget, to 0.1 % of ε.

    The price must not grow with σ. In logarithms it is almost a straight line in σ, so interpolation within a bracket
    needs about six prices from any reasonable `start`.
    Edge cases: if even `LEAST_NOISE` stays below the budget, that is the answer; if no noise is enough because other
    events alone cost more, the error says what they cost.
    """
    short: _Probe | None = None
    enough: _Probe | None = None
    noise = min(max(start, LEAST_NOISE), MOST_NOISE)
    while True:
        probe = _Probe(noise, budget.price(make_events(noise)))
        if probe.epsilon > budget.epsilon:
            short = probe
        else:
            enough = probe
        if short is not None and short.noise >= MOST_NOISE:
            raise InvalidInput(
                f"epsilon={budget.epsilon:g} cannot be met by any noise: even noise_multiplier={MOST_NOISE:g} costs "
                f"{short.epsilon:.4g}; allow at least that much or spend less elsewhere"
            )
        if enough is not None and _is_smallest(short, enough, budget):
            return Calibrated(enough.noise, enough.epsilon)
        noise = _next_noise(short, enough, budget.epsilon)


def _is_smallest(short: _Probe | None, enough: _Probe, budget: Budget) -> bool:
    if enough.epsilon >= budget.epsilon * (1 - TOLERANCE) or enough.noise <= LEAST_NOISE:
        return True
    return short is not None and enough.noise / short.noise < 1 + 1e-9  # the price jumps here


def _next_noise(short: _Probe | None, enough: _Probe | None, target: float) -> float:
    """Outside a bracket, follow ε ∝ 1/σ in bounded strides; inside, interpolate log ε over log σ, off its ends."""
    if enough is None:
        assert short is not None
        return min(MOST_NOISE, short.noise * min(4.0, 1.1 * short.epsilon / target))
    if short is None:
        return max(LEAST_NOISE, enough.noise * max(0.5, 0.95 * enough.epsilon / target))
    share = 0.5
    if enough.epsilon > 0 and math.isfinite(short.epsilon):
        goal = target * (1 - TOLERANCE / 2)
        share = math.log(short.epsilon / goal) / math.log(short.epsilon / enough.epsilon)
    return short.noise * math.pow(enough.noise / short.noise, min(max(share, 0.02), 0.98))


def steps_for(budget: Budget, event: DpEvent, *, spent: Events = ()) -> int:
    """Return how often `event` may happen in addition to what was `spent`, within the budget."""
    horizon = 1
    while True:
        steps = affordable(budget, spent, [(event, horizon)])
        if steps < horizon:
            break
        if horizon >= MOST_STEPS:
            raise InvalidInput(
                f"epsilon={budget.epsilon:g} is not used up by {horizon:,} steps: choose the steps yourself"
            )
        horizon *= 4
    if steps == 0:
        cost = budget.price([*spent, (event, 1)])
        raise InvalidInput(
            f"epsilon={budget.epsilon:g} does not pay for one step, which makes it {cost:.4g}: "
            "use more noise, a smaller sampling rate or a larger epsilon"
        )
    return steps


def calibrate_noise(budget: Budget, rate: float, steps: int) -> Calibrated:
    """Find the smallest noise multiplier for `steps` Poisson draws at `rate`, each answered once."""
    _require_rate(rate)
    if steps < 1:
        raise InvalidInput(f"steps={steps} must be >= 1: nothing is released in none")
    return noise_for(budget, lambda noise: [(_sample(rate, noise), steps)])


def calibrate_steps(budget: Budget, rate: float, noise_multiplier: float) -> int:
    """Find the largest number of Poisson draws at `rate` that the budget pays for at this noise."""
    _require_rate(rate)
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise InvalidInput(f"noise_multiplier={noise_multiplier} must be > 0 and finite: without noise no privacy")
    event = _sample(rate, noise_multiplier)
    if not budget.allows([(event, 1)]):
        needed = calibrate_noise(budget, rate, 1)
        raise InvalidInput(
            f"noise_multiplier={noise_multiplier:g} does not allow one step within epsilon={budget.epsilon:g}: "
            f"one step needs at least {needed.noise_multiplier:.4g}"
        )
    return steps_for(budget, event)


def _sample(rate: float, noise_multiplier: float) -> PoissonSampledDpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier))


def _require_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise InvalidInput(f"rate={rate} must be in (0, 1]: give expected draw size / number of records")
