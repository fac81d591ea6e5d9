"""Choose statistic and threshold on one half of the trials, certify the errors on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sordino.audit.bounds import Rates
from sordino.audit.claims import Claim

Array = NDArray[np.float64]

THRESHOLDS = 100
RULES = 2
"""How many rules are certified: the one that says most about the claim, and the one that separates best."""


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
    """A rule, how many errors it made in how many fresh trials, and what bounds them."""

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


def certified(scores: Scores, claim: Claim, confidence: float) -> list[Certified]:
    """Certify at most `RULES` rules so that all their bounds hold together with this confidence."""
    each = 1 - (1 - confidence) / RULES
    first, second = (_half(scores, which) for which in (0, 1))
    return [_certify(second, rule, each) for rule in choose(first, claim, each)]


def _half(scores: Scores, which: int) -> Scores:
    """One half of the trials at random: neighbours may be alike, such as every fourth coordinate."""
    sides = (scores.absent, scores.present)
    parts = ({name: values[_shuffled(len(values))[which::2]] for name, values in side.items()} for side in sides)
    return Scores(*parts)


def _shuffled(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).permutation(count)


def choose(scores: Scores, claim: Claim, confidence: float) -> list[Rule]:
    """The best rules by these trials, as they would be certified by as many others."""
    error = (1 - confidence) / 2
    rules = list(_rules(scores))
    counted = [_errors(scores, rule) for rule in rules]
    false_alarms, misses = (np.array(column) for column in zip(*counted, strict=True))
    absent, present = (len(next(iter(side.values()))) for side in (scores.absent, scores.present))
    alarms, missed = _at_most(false_alarms, absent, error), _at_most(misses, present, error)
    separation = stats.norm.isf(alarms) - stats.norm.ppf(missed)
    best = {int(np.argmax(claim.excess(alarms, missed))), int(np.argmax(separation))}
    return [rules[place] for place in sorted(best)]


def _rules(scores: Scores) -> Iterator[Rule]:
    for name, absent in scores.absent.items():
        pooled = np.concatenate([absent, scores.present[name]])
        for threshold in np.unique(np.quantile(pooled, np.linspace(0.001, 0.999, THRESHOLDS))):
            yield Rule(name, 1, float(threshold))
            yield Rule(name, -1, float(-threshold))


def _errors(scores: Scores, rule: Rule) -> tuple[int, int]:
    alarms = rule.says_present(scores.absent[rule.statistic])
    found = rule.says_present(scores.present[rule.statistic])
    return int(alarms.sum()), int((~found).sum())


def _certify(scores: Scores, rule: Rule, confidence: float) -> Certified:
    false_alarms, misses = _errors(scores, rule)
    absent, present = len(scores.absent[rule.statistic]), len(scores.present[rule.statistic])
    rates = Rates.certified(false_alarms, absent, misses, present, confidence)
    return Certified(rule, false_alarms, misses, absent + present, rates)


def _at_most(events: NDArray[np.int64], trials: int, error: float) -> Array:
    bounds = stats.beta.isf(error, events + 1, np.maximum(trials - events, 1e-9))
    return np.where(events == trials, 1.0, bounds)
