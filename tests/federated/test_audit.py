"""Attack the round: one user is there or not. The honest round stays below its claim, broken ones are caught.

All users are drawn (rate 1), so that a round is a plain Gaussian mechanism and every round is a trial.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting import epsilon
from sordino.audit import gaussian_epsilon
from sordino.federated.rounds import Round, Rounds
from sordino.noise import Seeded
from tests.federated.common import mechanism, rounds, vector

TRIALS, DELTA, OTHERS = 500, 1e-5, 3
RECIPE = rounds(OTHERS + 1, OTHERS + 1, steps=TRIALS, noise=1.0)
LOUD, OPPOSED = 100.0, -1.0


def releases(kind: type[Rounds], canary: float | None, seed: int) -> NDArray[np.float64]:
    """What each of `TRIALS` rounds moves the model by; the others send 1, the canary is user number OTHERS."""
    run = mechanism(RECIPE, kind=kind, source=Seeded(seed))
    weight, moved = next(run.model.parameters()), []
    for _ in range(TRIALS):
        before = weight.item()
        current = run.begin(range(OTHERS + (canary is not None)))
        for user in current.drawn:
            run.add(current, user, vector(1.0 if user < OTHERS else float(canary or 0)), within=True)
        run.release(current)
        moved.append(before - weight.item())
    return np.array(moved)


def audited(kind: type[Rounds], canary: float) -> float:
    """ε at DELTA from below, at 99.9 % confidence, by the threshold halfway between the two medians."""
    absent, present = releases(kind, None, 1), releases(kind, canary, 2)
    sign = 1 if np.median(present) > np.median(absent) else -1
    threshold = sign * (np.median(absent) + np.median(present)) / 2
    alarms, misses = int((sign * absent > threshold).sum()), int((sign * present <= threshold).sum())
    return gaussian_epsilon(alarms, TRIALS, misses, TRIALS, DELTA)


def claim() -> float:
    return epsilon([(RECIPE.terms(0, {}).event, 1)], DELTA)


class TrustsClients(Rounds):
    """Believes that clients clipped."""

    def weight(self, update: Mapping[str, Tensor], clip: float) -> float:
        return 1.0


class DividesByAnswers(Rounds):
    """Averages over whoever answered, as federated averaging usually does."""

    def release(self, current: Round) -> None:
        answered = len(current.drawn) - len(current.waiting)
        object.__setattr__(current.terms, "divisor", float(max(1, answered)))
        super().release(current)


class WeighsByExamples(Rounds):
    """The trap: weights n_k/Σn, noise for an average of equals. The canary claims a hundred times as many examples."""

    def add(self, current: Round, user: int, update: Mapping[str, Tensor], within: bool) -> None:
        examples = 100.0 if user == OTHERS else 1.0
        everyone = OTHERS + 100.0 if OTHERS in current.drawn else float(OTHERS)
        share = examples / everyone * current.terms.divisor
        weight = share * self.weight(update, current.terms.clip)
        current.total["weight"] += weight * update["weight"].double()


class NoiseByWhoAnswers(Rounds):
    """Every client brings its part of the noise, and half of them drop out after their updates were counted."""

    def release(self, current: Round) -> None:
        object.__setattr__(current.terms, "noise_multiplier", current.terms.noise_multiplier * 0.5**0.5)
        super().release(current)


class NoiseForTheAverage(Rounds):
    """Divides first and then adds noise for a sensitivity of C/(2n): a slip of a factor of two."""

    def release(self, current: Round) -> None:
        object.__setattr__(current.terms, "clip", current.terms.clip / 2)
        super().release(current)


@pytest.mark.parametrize("canary", [LOUD, OPPOSED])
def test_the_honest_round_stays_below_its_claim_and_the_audit_has_power(canary: float) -> None:
    assert 0.5 * claim() < audited(Rounds, canary) <= claim()


@pytest.mark.parametrize(
    ("kind", "canary"),
    [
        (TrustsClients, LOUD),
        (DividesByAnswers, OPPOSED),
        (WeighsByExamples, OPPOSED),
        (NoiseByWhoAnswers, LOUD),
        (NoiseForTheAverage, LOUD),
    ],
)
def test_a_broken_round_is_caught(kind: type[Rounds], canary: float) -> None:
    assert audited(kind, canary) > claim()
