"""Lower bounds cover the truth as often as they say, and reach it with enough trials."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy import stats

from sordino.accounting import pricing
from sordino.audit import bounds
from sordino.audit.bounds import Claim, Rates


def test_clopper_pearson_fails_no_more_often_than_it_says() -> None:
    generator, trials, truth, error = np.random.default_rng(0), 50, 0.1, 0.05
    counts = generator.binomial(trials, truth, 4000)
    limits = np.array([bounds.bound_above(count, trials, error) for count in range(trials + 1)])
    failures = np.mean(limits[counts] < truth)
    assert failures <= error
    too_bold = np.mean(np.array([bounds.bound_above(n, trials, 0.4) for n in range(trials + 1)])[counts] < truth)
    assert too_bold > error, "a bound with a larger error would be seen"


def test_clopper_pearson_closed_forms() -> None:
    assert bounds.bound_above(0, 100, 0.01) == pytest.approx(1 - 0.01 ** (1 / 100))
    assert bounds.bound_above(100, 100, 0.01) == 1.0
    assert bounds.bound_below(100, 100, 0.01) == pytest.approx(0.01 ** (1 / 100))


def test_epsilon_of_exact_rates() -> None:
    epsilon = 1.5
    wrong = 1 / (1 + math.exp(epsilon))  # randomised response
    assert Rates(wrong, wrong).epsilon(0.0) == pytest.approx(epsilon)
    assert Rates(0.5, 0.5).epsilon(1e-5) == 0.0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_mu_of_a_gaussian_and_its_price(sigma: float) -> None:
    threshold = 0.7
    rates = Rates(stats.norm.sf(threshold / sigma), stats.norm.cdf((threshold - 1) / sigma))
    assert rates.mu() == pytest.approx(1 / sigma)
    assert bounds.epsilon_of_mu(1 / sigma, 1e-5) == pytest.approx(
        pricing.epsilon([(GaussianDpEvent(sigma), 1)], 1e-5), rel=1e-3
    )


def test_one_run_is_valid_for_randomised_response_and_objects_to_twice_the_epsilon() -> None:
    """Answering every coin by ε-randomised response is ε-private: the audit may exceed ε in 5 % of the runs."""
    generator, canaries, epsilon = np.random.default_rng(1), 400, 1.0
    for factor, may_fail in ((1.0, True), (2.0, False)):
        right = 1 / (1 + math.exp(-factor * epsilon))
        correct = generator.binomial(canaries, right, 400)
        value = {c: bounds.one_run_epsilon(canaries, canaries, int(c), 0.0) for c in set(correct)}
        exceeded = np.mean([value[c] > epsilon for c in correct])
        assert (exceeded <= 0.05) == may_fail


def test_one_run_with_delta_against_the_sum_written_out() -> None:
    canaries, guesses, correct, epsilon, delta = 30, 20, 17, 1.0, 1e-3
    right = 1 / (1 + math.exp(-epsilon))
    masses = [math.comb(guesses, k) * right**k * (1 - right) ** (guesses - k) for k in range(guesses + 1)]
    beta = sum(masses[correct:])
    alpha = max(sum(masses[correct - i : correct]) / i for i in range(1, correct + 1))
    expected = beta + 2 * canaries * delta * alpha
    assert bounds.one_run_p_value(canaries, guesses, correct, epsilon, delta) == pytest.approx(expected)


def test_one_run_gives_the_values_that_the_paper_prints() -> None:
    """Steinke et al. 2023, App. D: 75 right of 100 guesses."""
    assert bounds.one_run_epsilon(1000, 100, 75, 1e-4) == pytest.approx(0.673, abs=5e-4)
    assert bounds.one_run_p_value(100, 100, 75, math.log(3), 0.0) == pytest.approx(0.553, abs=5e-4)


def test_one_run_reaches_most_of_the_truth_and_delta_costs() -> None:
    assert bounds.one_run_epsilon(1000, 1000, 1000, 0.0) > 5.0
    assert bounds.one_run_epsilon(1000, 1000, 900, 1e-5) < bounds.one_run_epsilon(1000, 1000, 900, 0.0)
    assert bounds.one_run_epsilon(1000, 1000, 510, 1e-5) == 0.0
    with pytest.raises(ValueError, match="correct=5"):
        bounds.one_run_epsilon(10, 4, 5, 1e-5)


def sampled(rate: float, sigma: float, steps: int) -> Claim:
    return Claim([(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)])


def test_a_claim_is_refuted_by_rates_below_its_curve_alone() -> None:
    claim = sampled(1.0, 1.0, 1)
    for threshold in (-1.0, 0.0, 0.5, 1.0, 2.0):
        on_the_curve = Rates(float(stats.norm.sf(threshold)), float(stats.norm.cdf(threshold - 1)))
        assert not claim.refuted_by(on_the_curve)
        below = Rates(float(stats.norm.sf(threshold / 0.8)), float(stats.norm.cdf((threshold - 1) / 0.8)))
        assert claim.refuted_by(below) == (0 < threshold < 1 or below.mu() > 1.05)


def test_the_implied_epsilon_finds_the_noise_that_was_really_there() -> None:
    claim, truth = sampled(0.5, 1.0, 1), 0.7
    threshold = 0.9
    alarms = float(stats.norm.sf(threshold / truth))
    misses = 0.5 * float(stats.norm.cdf(threshold / truth)) + 0.5 * float(stats.norm.cdf((threshold - 1) / truth))
    rates = Rates(alarms, misses)
    assert claim.refuted_by(rates)
    implied = claim.implied_epsilon(rates, 1e-5)
    assert implied == pytest.approx(sampled(0.5, truth, 1).epsilon(1e-5), rel=0.05)
    assert implied > claim.epsilon(1e-5)
    honest = sampled(0.5, truth, 1)
    assert not honest.refuted_by(rates)
    assert honest.implied_epsilon(rates, 1e-5) <= honest.epsilon(1e-5) * 1.01


def test_bounds_and_claims_do_not_load_torch() -> None:
    code = "import sys, sordino.audit, sordino.audit.bounds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
