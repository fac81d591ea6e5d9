"""The audit has power, hardly ever cries wolf, and says plainly what it found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino import Budget, recipes
from sordino.audit.auditing import AuditFailed, audit_recipe
from sordino.audit.bounds import Claim, Scores, certify
from sordino.audit.instances import Instance
from tests.audit.sabotage import Halved

STEPS = 4


def dpsgd(epsilon: float, records: int = 64, rate: float = 1.0) -> recipes.Recipe:
    recipe = recipes.dpsgd(batch_size=round(rate * records), steps=STEPS)
    return recipe.calibrate(Budget(epsilon=epsilon, delta=1e-5), records=records)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0, 8.0])
def test_the_lower_bound_reaches_half_of_the_true_epsilon(epsilon: float, loss: str) -> None:
    instance = Instance("all records", lanes=256, loss=loss)
    audit = audit_recipe(dpsgd(epsilon), instances=[instance], trials=6000, seed=7, steps=STEPS)
    assert audit.epsilon_claimed == pytest.approx(epsilon, rel=2e-3)
    assert 0.5 * epsilon <= audit.epsilon_lower <= audit.epsilon_claimed


def test_a_failure_is_loud_and_says_both_numbers() -> None:
    with pytest.raises(AuditFailed, match=r"claim BROKEN, .* <= ε with 99.9% confidence, 4\.\d+ claimed") as failure:
        audit_recipe(dpsgd(4.0), instances=[Instance("all records")], source=Halved, seed=1)
    plain = json.loads(json.dumps(failure.value.audit.to_dict(), allow_nan=False))
    assert plain["passed"] is False
    assert plain["epsilon_lower"] > plain["epsilon_claimed"]
    assert plain["attacks"][0]["best"]["rule"]["statistic"] == "log-likelihood ratio"


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    audit_recipe(
        dpsgd(4.0),
        instances=[Instance("all records")],
        trials=256,
        seed=1,
        progress=lambda name, done, total: told.append((name, done, total)),
    )
    assert told == [("all records", 1, 2), ("all records", 2, 2)]


def alarms(claim: Claim, sigma: float, rate: float, repetitions: int, trials: int) -> int:
    """How often simulated releases of noise `sigma` refute `claim`."""
    generator = np.random.default_rng(5)
    found = 0
    for _ in range(repetitions):
        absent = generator.normal(0.0, sigma, trials)
        present = generator.normal(0.0, sigma, trials) + (generator.random(trials) < rate)
        rules = certify(Scores({"x": absent}, {"x": present}), claim, 0.999)
        found += any(claim.refuted_by(rule.rates) for rule in rules)
    return found


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_false_alarms_are_rare(rate: float) -> None:
    claim = Claim([(PoissonSampledDpEvent(rate, GaussianDpEvent(1.0)), 1)])
    assert alarms(claim, 1.0, rate, repetitions=60, trials=400) == 0
    assert alarms(claim, 0.4, rate, repetitions=5, trials=2000) == 5, "the twin with less noise is always found"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_false_alarms_at_most_one_in_a_thousand(rate: float) -> None:
    claim = Claim([(PoissonSampledDpEvent(rate, GaussianDpEvent(1.0)), 1)])
    assert alarms(claim, 1.0, rate, repetitions=10_000, trials=400) <= 10
