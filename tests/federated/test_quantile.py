"""Adaptive clipping finds its quantile, its votes are noised as claimed, and both answers together cost one event."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sordino import Budget, InvalidInput, recipes
from sordino.accounting import merge
from sordino.federated.rounds import SENSITIVITY, Quantile
from sordino.terms import Terms
from tests.federated.common import QUIET_NOISE, mechanism, rounds, vector


def terms(noise: float, divisor: float = 100) -> Terms:
    return Terms(step=0, clip=1.0, noise_multiplier=noise, divisor=divisor, event=GaussianDpEvent(noise))


@given(noise=st.floats(0.01, 50), factor=st.floats(0.51, 100))
def test_updates_and_votes_merge_to_the_recipe_event(noise: float, factor: float) -> None:
    quantile = Quantile(count_noise=factor * noise)
    shared = quantile.share(terms(noise), clip=0.1)
    votes = GaussianDpEvent(quantile.deviation(terms(noise)) / SENSITIVITY)
    both = merge(GaussianDpEvent(shared.noise_multiplier), votes)
    assert both.noise_multiplier == pytest.approx(noise, rel=1e-9)
    assert shared.event == GaussianDpEvent(noise)
    assert shared.clip == 0.1


@given(noise=st.floats(0.01, 1000), divisor=st.floats(1, 1e6))
def test_the_default_count_noise_always_leaves_nearly_all_for_the_updates(noise: float, divisor: float) -> None:
    assert noise < Quantile().share(terms(noise, divisor), 1.0).noise_multiplier < 1.04 * noise


def test_votes_that_alone_would_spend_the_budget_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(InvalidInput, match=r"count_noise=1.0 must be > noise_multiplier/2 = 2"):
        mechanism(rounds(noise=4.0), adaptive=Quantile(count_noise=1.0))


def test_two_hands_on_the_bound_are_refused() -> None:
    recipe = recipes.dynamic(batch_size=4, steps=3, noise_multiplier=1.0).for_records(8)
    with pytest.raises(InvalidInput, match="both would move the bound"):
        mechanism(recipe, adaptive=Quantile())


@pytest.mark.parametrize("target", [0.25, 0.5, 0.9])
def test_the_bound_finds_the_quantile_of_the_norms(target: float) -> None:
    norms = np.linspace(0.01, 2.0, 200)
    run = mechanism(rounds(200, 200, steps=80, noise=0.1), adaptive=Quantile(target=target))
    for _ in range(80):
        current = run.begin(range(200))
        for user in current.drawn:
            run.add(current, user, vector(0.0), within=bool(norms[user] <= current.terms.clip))
        run.release(current)
    assert run.clip == pytest.approx(np.quantile(norms, target), rel=0.15)


def votes_released(count_noise: float, steps: int = 2000) -> np.ndarray:
    """The noise on the votes, read back from how the bound moved; nobody votes."""
    quantile = Quantile(rate=0.01, count_noise=count_noise)
    run, seen = mechanism(rounds(1000, 1000, steps=steps, noise=1.0), adaptive=quantile), []
    for _ in range(steps):
        before = run.clip
        run.release(run.begin([]))
        fraction = quantile.target - math.log(run.clip / before) / quantile.rate
        seen.append((fraction - 0.5) * 1000)
    return np.array(seen)


def test_the_votes_have_the_claimed_noise_and_no_other() -> None:
    noise = votes_released(50.0)
    assert stats.kstest(noise / 50.0, "norm").pvalue > 0.001
    assert stats.kstest(noise / 40.0, "norm").pvalue < 0.001
    assert stats.kstest(noise / 60.0, "norm").pvalue < 0.001


def test_adaptive_clipping_charges_what_the_recipe_planned_and_the_noise_follows_the_bound() -> None:
    budget = Budget(2.0, 1e-4)
    recipe = recipes.growing_mu(batch_size=20, steps=6, clip=1.0, lr=1.0).calibrate(budget, records=40)
    run = mechanism(recipe, adaptive=Quantile())
    for step in range(6):
        current = run.begin(range(40))
        whole = recipe.terms(step, {})
        assert current.terms.event == whole.event
        assert current.terms.noise_multiplier > whole.noise_multiplier
        assert current.terms.noise_std == pytest.approx(current.terms.noise_multiplier * run.clip)
        run.release(current)
    assert run.run.ledger.events() == recipe.plan()
    assert run.run.guarantee().epsilon <= 2.0


@pytest.mark.parametrize("vote", [0, 1])
def test_missing_votes_pull_the_fraction_to_one_half_and_no_further(vote: int) -> None:
    run = mechanism(rounds(10, 10, noise=QUIET_NOISE), adaptive=Quantile(count_noise=1e-6))
    current = run.begin(range(10))
    for user in range(4):
        run.add(current, user, vector(0.0), within=bool(vote))
    run.release(current)
    expected = 0.5 + (0.2 if vote else -0.2)
    assert run.clip == pytest.approx(math.exp(-0.2 * (expected - 0.5)), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target=0.0 must lie in"),
        ({"target": 1.5}, "target=1.5 must lie in"),
        ({"rate": 0.0}, "rate=0.0 must be > 0"),
        ({"count_noise": 0.0}, "count_noise=0.0 must be > 0"),
        ({"count_noise": math.inf}, "count_noise=inf must be > 0"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Quantile(**options)
