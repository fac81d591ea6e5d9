"""Lower bounds on ε from what an attacker got right, each with a confidence. Nothing here imports torch.

An attacker who tells "the record was there" from "it was not" makes false alarms and misses. Differential privacy
bounds both error rates from below, so that error rates that are certainly small contradict a small ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from sordino.errors import InvalidInput

LARGEST = 100.0
"""No audit asks about an ε above this."""


def at_most(events: int, trials: int, error: float) -> float:
    """The Clopper-Pearson upper bound on a probability: exceeded by the true one with probability at most `error`."""
    _require_counts(events, trials)
    _require_error(error)
    return 1.0 if events == trials else float(stats.beta.isf(error, events + 1, trials - events))


def at_least(events: int, trials: int, error: float) -> float:
    """The Clopper-Pearson lower bound on a probability."""
    return 1.0 - at_most(trials - events, trials, error)


@dataclass(frozen=True)
class Rates:
    """Upper bounds on an attacker's two error rates."""

    false_alarms: float
    misses: float

    @staticmethod
    def certified(false_alarms: int, absent: int, misses: int, present: int, confidence: float) -> Rates:
        """Both bounds hold together with at least this confidence: each may fail with half of the rest."""
        error = (1 - _required_confidence(confidence)) / 2
        return Rates(at_most(false_alarms, absent, error), at_most(misses, present, error))

    def epsilon(self, delta: float) -> float:
        """The ε that these rates force: 1 − misses ≤ e^ε·alarms + δ, and the same with both exchanged.

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
    """ε from below, whatever the mechanism, from counted errors of a threshold that was fixed beforehand.

    >>> round(clopper_pearson_epsilon(0, 1000, 500, 1000, delta=1e-5), 2)
    4.08
    """
    return Rates.certified(false_alarms, absent, misses, present, confidence).epsilon(delta)


def gaussian_epsilon(
    false_alarms: int, absent: int, misses: int, present: int, delta: float, confidence: float = 0.999
) -> float:
    """ε from below for a mechanism that is Gaussian, such as full-batch DP-SGD (Nasr et al. 2023).

    One point of the trade-off between the two errors fixes the whole of a Gaussian trade-off, hence ε at any δ. Where
    the mechanism is not Gaussian, as with sampled draws, this is no bound: use `Claim.implied_epsilon`.

    >>> round(gaussian_epsilon(150, 1000, 150, 1000, delta=1e-5), 2)
    8.51
    """
    mu = Rates.certified(false_alarms, absent, misses, present, confidence).mu()
    return epsilon_of_mu(mu, delta)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism with sensitivity over noise μ (Balle and Wang 2018, Thm. 8)."""
    if mu == 0:
        return 0.0
    tail = math.exp(epsilon + float(stats.norm.logcdf(-epsilon / mu - mu / 2)))
    return max(0.0, float(stats.norm.cdf(-epsilon / mu + mu / 2)) - tail)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The ε at `delta` of the Gaussian mechanism with sensitivity over noise μ."""
    _require_delta(delta)
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    highest = mu * mu / 2 + 40 * mu + 1
    return float(optimize.brentq(lambda epsilon: delta_of_mu(mu, epsilon) - delta, 0.0, highest))


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The chance of at least `correct` right guesses if one run with random canaries were (ε, δ)-private.

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
    """ε from below after one run with random canaries; 0 where nothing can be said.

    >>> round(one_run_epsilon(1000, 100, 98, delta=1e-5), 2)
    2.71
    """
    error = 1 - _required_confidence(confidence)

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, LARGEST))


def _log_ratio(above: float, below: float) -> float:
    if above <= 0:
        return 0.0
    return math.inf if below == 0 else math.log(above / below)


def _require_counts(events: int, trials: int) -> None:
    if not 0 <= events <= trials or trials < 1:
        raise InvalidInput(f"events={events} must be in 0..trials={trials}, and trials >= 1")


def _require_error(error: float) -> None:
    if not 0 < error < 1:
        raise InvalidInput(f"error={error} must be in (0, 1): it is the chance that a bound fails")


def _require_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InvalidInput(f"delta={delta} must be in (0, 1)")


def _required_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InvalidInput(f"confidence={confidence} must be in (0, 1): 0.999 is usual for an audit")
    return confidence
