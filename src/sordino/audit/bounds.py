"""Lower bounds on ε from an attacker's successes, and claims that they refute. Nothing here imports torch.

An attacker who tells "the record was there" from "it was not" makes false alarms and misses. Differential privacy
bounds both error rates from below, so error rates that are demonstrably small contradict a small ε.

A ledger claims more than one ε: it claims δ(ε) for every ε at once, and with it a trade-off between the errors of every
attacker. Rates below that trade-off refute the claim, whatever the mechanism really is. The attacker's statistic and
threshold are chosen on one half of the trials, and their errors are certified on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import attr
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy import optimize, special, stats

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
from sordino.accounting.random_allocation import RandomAllocation
from sordino.errors import InvalidInput

Events = list[tuple[DpEvent, int]]
Array = NDArray[np.float64]

LARGEST = 100.0
"""No audit asks about an ε above this."""
EPSILONS: Array = np.concatenate([np.arange(0.0, 3.0, 0.1), np.arange(3.0, 12.5, 0.5)])
"""Where the curve is compared with the attacker: a larger ε would need more trials than an audit has."""
SCALES = (1 / 32, 64.0)
TOLERANCE = 1e-9
PRECISION = 0.02
INTERVAL = 0.005
"""The grid of losses: coarser than that of prices and rounded up like them, so an audit errs in favour of the claim."""
THRESHOLDS = 100
RULES = 2
"""How many rules are certified: the one that says most about the claim, and the one that separates best."""


def bound_above(events: int, trials: int, error: float) -> float:
    """The Clopper-Pearson upper bound on a probability: exceeded by the true one with probability at most `error`."""
    if not 0 <= events <= trials or trials < 1:
        raise InvalidInput(f"events={events} must be in 0..trials={trials}, and trials >= 1")
    if not 0 < error < 1:
        raise InvalidInput(f"error={error} must be in (0, 1): it is the chance that a bound fails")
    return 1.0 if events == trials else float(stats.beta.isf(error, events + 1, trials - events))


def bound_below(events: int, trials: int, error: float) -> float:
    """Return the Clopper-Pearson lower bound on a probability."""
    return 1.0 - bound_above(trials - events, trials, error)


@dataclass(frozen=True)
class Rates:
    """Upper bounds on an attacker's two error rates."""

    false_alarms: float
    misses: float

    @staticmethod
    def certify(false_alarms: int, absent: int, misses: int, present: int, confidence: float) -> Rates:
        """Both bounds hold together with at least this confidence: each may fail with half of the rest."""
        error = (1 - _require_confidence(confidence)) / 2
        return Rates(bound_above(false_alarms, absent, error), bound_above(misses, present, error))

    def epsilon(self, delta: float) -> float:
        """Return the ε that these rates force: 1 − misses ≤ e^ε·alarms + δ, and the same with both exchanged.

        Kairouz, Oh and Viswanath 2015, Thm. 2.1. Assumes nothing about the mechanism.
        """
        one = _log_ratio(1 - self.misses - delta, self.false_alarms)
        return max(0.0, one, _log_ratio(1 - self.false_alarms - delta, self.misses))

    def mu(self) -> float:
        """The μ of the Gaussian mechanism with these rates: Φ⁻¹(1 − alarms) − Φ⁻¹(misses) (Dong, Roth, Su 2022)."""
        return max(0.0, float(stats.norm.isf(self.false_alarms) - stats.norm.ppf(self.misses)))


def clopper_pearson_epsilon(
    false_alarms: int, absent: int, misses: int, present: int, delta: float, confidence: float = 0.999
) -> float:
    """Bound ε from below for any mechanism, by counting the errors of a threshold that was fixed beforehand.

    >>> round(clopper_pearson_epsilon(0, 1000, 500, 1000, delta=1e-5), 2)
    4.08
    """
    return Rates.certify(false_alarms, absent, misses, present, confidence).epsilon(delta)


def gaussian_epsilon(
    false_alarms: int, absent: int, misses: int, present: int, delta: float, confidence: float = 0.999
) -> float:
    """Bound ε from below for a Gaussian mechanism, such as full-batch DP-SGD (Nasr et al. 2023).

    One point of the trade-off between the two errors fixes the whole Gaussian trade-off, and so ε at any δ. If the
    mechanism is not Gaussian, as with sampled draws, this is not a bound: use `Claim.implied_epsilon`.

    >>> round(gaussian_epsilon(150, 1000, 150, 1000, delta=1e-5), 2)
    8.51
    """
    mu = Rates.certify(false_alarms, absent, misses, present, confidence).mu()
    return epsilon_of_mu(mu, delta)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism with sensitivity over noise μ (Balle and Wang 2018, Thm. 8)."""
    if mu == 0:
        return 0.0
    tail = math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)))
    return max(0.0, float(special.ndtr(-epsilon / mu + mu / 2)) - tail)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the ε at `delta` of the Gaussian mechanism with sensitivity over noise μ."""
    if not 0 < delta < 1:
        raise InvalidInput(f"delta={delta} must be in (0, 1)")
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    highest = mu * mu / 2 + 40 * mu + 1
    return float(optimize.brentq(lambda epsilon: delta_of_mu(mu, epsilon) - delta, 0.0, highest))


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the chance of at least `correct` right guesses if one run with random canaries were (ε, δ)-private.

    Each of `canaries` examples joined the training data by its own fair coin; the attacker guessed `guesses` of these
    coins and left out the rest. With W binomial of `guesses` and e^ε/(1 + e^ε), the chance is at most
    Pr[W ≥ v] + 2·m·δ·max_i Pr[v − i ≤ W < v]/i (Steinke, Nasr and Jagielski 2023, App. D).
    """
    if not 0 <= correct <= guesses <= canaries:
        raise InvalidInput(f"correct={correct} must be <= guesses={guesses} <= canaries={canaries}, all >= 0")
    if correct == 0:
        return 1.0
    right = float(1 / (1 + math.exp(-epsilon)))
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
    slope = float(np.max(np.cumsum(below) / np.arange(1, correct + 1)))
    return min(1.0, float(stats.binom.sf(correct - 1, guesses, right)) + 2 * canaries * delta * slope)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Bound ε from below after one run with random canaries; 0 if nothing can be said.

    >>> round(one_run_epsilon(1000, 100, 98, delta=1e-5), 2)
    2.71
    """
    error = 1 - _require_confidence(confidence)

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, LARGEST))


def _log_ratio(above: float, below: float) -> float:
    if above <= 0:
        return 0.0
    return math.inf if below == 0 else math.log(above / below)


def _require_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence={confidence} must be in (0, 1): 0.999 is usual for an audit")
    return confidence


# -- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """The events of a run, as a claim about every attacker."""

    events: Events

    def epsilon(self, delta: float) -> float:
        """Return the ε that is claimed at `delta`."""
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
        """Return μ if everything is a plain Gaussian, whose curve has a closed form."""
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
        """Return the ε of these events with their noise scaled, up or down, until the rates are just possible.

        It is a lower bound for mechanisms of the claimed shape at some noise, as in Nasr et al. 2023. For any mechanism
        at all, it exceeds the claim exactly if the rates refute the claim. It is None if an event has no single noise
        to scale.
        """
        if any(scale_noise(event, 1.0) is None for event, _ in self.events):
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
        # More noise than `high` is refuted, less than `low` is not: take the end on the answer's side of 1.
        return self.at_noise(math.exp(low if refuted else high))._coarse_epsilon(delta)

    def _coarse_epsilon(self, delta: float) -> float:
        if self._mu is not None:
            return epsilon_of_mu(self._mu, delta)
        return float(self._losses.get_epsilon_for_delta(delta))

    def at_noise(self, scale: float) -> Claim:
        """Return the same events with `scale` times the noise."""
        return Claim([(_require_event(scale_noise(event, scale)), count) for event, count in self.events])


def scale_noise(event: DpEvent, scale: float) -> DpEvent | None:
    """`event` with `scale` times its noise, or None for kinds whose noise is not one number."""
    if isinstance(event, PoissonSampledDpEvent | SelfComposedDpEvent):
        inner = scale_noise(event.event, scale)
        return None if inner is None else attr.evolve(event, event=inner)
    if isinstance(event, ComposedDpEvent):
        parts = [scale_noise(part, scale) for part in event.events]
        return None if None in parts else ComposedDpEvent([_require_event(part) for part in parts])
    if isinstance(event, GaussianDpEvent):
        return GaussianDpEvent(event.noise_multiplier * scale)
    if isinstance(event, ProjectedGaussian | RandomAllocation):
        return replace(event, noise_multiplier=event.noise_multiplier * scale)
    return None


def _require_event(event: DpEvent | None) -> DpEvent:
    assert event is not None
    return event


# -- choosing and certifying ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Says "present" where `side` times the statistic exceeds the threshold."""

    statistic: str
    side: int
    threshold: float

    def says_present(self, values: Array) -> NDArray[np.bool_]:
        return np.asarray(self.side * values > self.threshold)


@dataclass(frozen=True)
class Certified:
    """A rule, how many errors it made in how many fresh trials, and their bounds."""

    rule: Rule
    false_alarms: int
    misses: int
    trials: int
    rates: Rates


@dataclass(frozen=True)
class Scores:
    """One value per trial and statistic."""

    absent: dict[str, Array]
    present: dict[str, Array]


def certify(scores: Scores, claim: Claim, confidence: float) -> list[Certified]:
    """Certify at most `RULES` rules so that all their bounds hold together with this confidence."""
    each = 1 - (1 - confidence) / RULES
    first, second = (_take_half(scores, which) for which in (0, 1))
    return [_certify_rule(second, rule, each) for rule in choose_rules(first, claim, each)]


def _take_half(scores: Scores, which: int) -> Scores:
    """Take a random half of the trials: neighbouring ones may be alike, such as every fourth coordinate."""
    sides = (scores.absent, scores.present)
    parts = ({name: values[_shuffle(len(values))[which::2]] for name, values in side.items()} for side in sides)
    return Scores(*parts)


def _shuffle(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).permutation(count)


def choose_rules(scores: Scores, claim: Claim, confidence: float) -> list[Rule]:
    """Return the best rules by these trials, as they would be certified by as many others."""
    error = (1 - confidence) / 2
    rules = list(_list_rules(scores))
    counted = [_count_errors(scores, rule) for rule in rules]
    false_alarms, misses = (np.array(column) for column in zip(*counted, strict=True))
    absent, present = (len(next(iter(side.values()))) for side in (scores.absent, scores.present))
    alarms, missed = _bound_all_above(false_alarms, absent, error), _bound_all_above(misses, present, error)
    separation = stats.norm.isf(alarms) - stats.norm.ppf(missed)
    best = {int(np.argmax(claim.excess(alarms, missed))), int(np.argmax(separation))}
    return [rules[place] for place in sorted(best)]


def _list_rules(scores: Scores) -> Iterator[Rule]:
    for name, absent in scores.absent.items():
        pooled = np.concatenate([absent, scores.present[name]])
        for threshold in np.unique(np.quantile(pooled, np.linspace(0.001, 0.999, THRESHOLDS))):
            yield Rule(name, 1, float(threshold))
            yield Rule(name, -1, float(-threshold))


def _count_errors(scores: Scores, rule: Rule) -> tuple[int, int]:
    alarms = rule.says_present(scores.absent[rule.statistic])
    found = rule.says_present(scores.present[rule.statistic])
    return int(alarms.sum()), int((~found).sum())


def _certify_rule(scores: Scores, rule: Rule, confidence: float) -> Certified:
    false_alarms, misses = _count_errors(scores, rule)
    absent, present = len(scores.absent[rule.statistic]), len(scores.present[rule.statistic])
    rates = Rates.certify(false_alarms, absent, misses, present, confidence)
    return Certified(rule, false_alarms, misses, absent + present, rates)


def _bound_all_above(events: NDArray[np.int64], trials: int, error: float) -> Array:
    bounds = stats.beta.isf(error, events + 1, np.maximum(trials - events, 1e-9))
    return np.where(events == trials, 1.0, bounds)
