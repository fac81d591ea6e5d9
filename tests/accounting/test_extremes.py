"""Prices at the edges: hardly any noise, a tiny δ, a huge ε, very many steps. Sound, in seconds, in bounded memory."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
)
from dp_accounting.pld import PLDAccountant

from sordino.accounting import calibration, extremes, pld
from sordino.accounting.budget import Budget
from sordino.accounting.erasure import Erasure
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.accounting.pricing import ACCOUNTANTS, delta, epsilon
from sordino.accounting.unlisted import Unlisted
from sordino.errors import InvalidInput


def _sampled(rate: float, noise: float) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


NOISES = (0.3, 0.1, 0.03, 0.01, 2e-3, 1e-3, 5e-4, 1e-5, 1e-8, 1e-100, 1e-300)


def test_less_noise_never_costs_less_down_to_none() -> None:
    prices = [epsilon([(_sampled(0.01, noise), 100)], 1e-5) for noise in NOISES]
    assert prices == sorted(prices)
    assert all(math.isfinite(price) for price in prices[:-2])
    assert prices[-1] == math.inf  # 1/(2σ²) is beyond every double


@pytest.mark.parametrize("noise", NOISES[:-2])
@pytest.mark.parametrize("target", [1e-5, 1e-30])
def test_a_gaussian_never_costs_less_than_its_closed_form(noise: float, target: float) -> None:
    price = epsilon([(GaussianDpEvent(noise), 1)], target)
    assert price >= gaussian_epsilon(1 / noise, target) * (1 - 1e-9)
    assert price <= gaussian_epsilon(1 / noise, target) * 1.01


@pytest.mark.parametrize("noise", [0.002, 1e-3])
def test_a_draw_with_hardly_any_noise_costs_at_least_that_it_was_in_one(noise: float) -> None:
    """One step at rate q: the record was drawn with probability q, and then the answer is N(1, σ²) against N(0, σ²)."""
    rate, price = 0.01, epsilon([(_sampled(0.01, noise), 1)], 1e-5)
    unsampled = math.log1p(math.expm1(min(price, 700)) / rate) if price < 700 else price - math.log(rate)
    assert rate * gaussian_delta(1 / noise, unsampled) <= 1e-5 * (1 + 1e-6)
    assert delta([(_sampled(0.01, noise), 1)], price * 0.98) > 1e-5


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.05, 0.25, 20), (0.5, 0.4, 50)])
def test_a_coarser_grid_is_never_below_dp_accounting(rate: float, noise: float, steps: int) -> None:
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    theirs.compose(_sampled(rate, noise), steps)
    ours = epsilon([(_sampled(rate, noise), steps)], 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("event", [_sampled(0.01, 1.0), GaussianDpEvent(20.0), _sampled(0.3, 8.0)])
def test_a_tiny_delta_is_not_impossible_and_never_cheaper(event: DpEvent) -> None:
    targets = (1e-5, 1e-9, 1e-12, 1e-14, 1e-16, 1e-20, 1e-30, 1e-100)
    prices = [epsilon([(event, 500)], target) for target in targets]
    assert prices == sorted(prices)
    assert math.isfinite(prices[-1])
    assert delta([(event, 500)], prices[-2]) <= 1e-30 * (1 + 1e-6)


def test_many_steps_are_priced_and_more_cost_more() -> None:
    prices = [epsilon([(_sampled(0.01, 1.0), steps)], 1e-5) for steps in (10**4, 10**8, 10**12)]
    assert prices == sorted(prices)
    assert math.isfinite(prices[-1])


def test_quiet_events_add_to_the_others() -> None:
    others = [(_sampled(0.01, 1.0), 100), (Erasure(0.01, 2.0, 0.01, 0.2, 0.6), 5)]
    for quiet in (_sampled(0.01, 1e-8), LaplaceDpEvent(1e-8), NoisyMinimum(1e8), Erasure(0.01, 1e-6, 0.01, 0.2, 0.6)):
        together = epsilon([*others, (quiet, 2)], 1e-5)
        assert epsilon(others, 1e-5) + 2 * 0.99e8 <= together < math.inf
        assert delta([*others, (quiet, 2)], together * 2.1) <= 1e-5
    assert epsilon([*others, (NonPrivateDpEvent(), 1)], 1e-5) == math.inf


@pytest.mark.parametrize("name", [name for name in ACCOUNTANTS if name != "rdp-filter"])
@pytest.mark.parametrize("noise", [1e-8, 1e-200, 1e-308])
def test_no_accountant_has_a_traceback(name: str, noise: float) -> None:
    for events in ([(_sampled(0.01, noise), 3)], [(GaussianDpEvent(noise), 3)]):
        assert epsilon(events, 1e-5, name) > 1e10
        assert 0 < delta(events, 1.0, name) <= 1


def test_many_different_tiny_noises_end() -> None:
    """A ladder of noises has no rungs there; looking for one went on for ever."""
    events = [(_sampled(0.01, 1e-8 * (1 + k / 100)), 1) for k in range(40)]
    assert epsilon(events, 1e-5) > 1e15


def test_a_large_epsilon_is_calibrated_in_seconds() -> None:
    start = time.process_time()
    for target in (1_000.0, 1e7):
        found = calibration.calibrate_noise(Budget(target, 1e-5), 0.01, 1_000)
        assert found.epsilon <= target
        assert found.noise_multiplier == calibration.LEAST_NOISE or found.epsilon >= 0.998 * target
    assert time.process_time() - start < 15


def test_an_endless_budget_is_refused_not_a_traceback() -> None:
    with pytest.raises(InvalidInput, match="is not used up"):
        calibration.calibrate_steps(Budget(1e6, 1e-5), 1e-9, 1e3)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc/self/status")
def test_memory_is_bounded() -> None:
    """σ = 0.001 asked for 38 GiB; in a process of its own. (`ru_maxrss` would count the parent's peak as well.)"""
    program = (
        "from pathlib import Path; from sordino.accounting.pricing import epsilon;"
        "from dp_accounting import GaussianDpEvent as G, PoissonSampledDpEvent as S;"
        "[epsilon([(S(q, G(s)), n)], 1e-5) for q, s, n in "
        "[(.01, .001, 1000), (.3, .05, 10**6), (.01, 1.0, 10**9), (.5, .02, 50)]];"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    peak = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(peak.stdout) * 1024 < 500e6


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("noise", [30.0, 2.0])
def test_gaussians_beside_names_cost_in_closed_form_what_the_grid_says(
    adjacency: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [(GaussianDpEvent(noise), 2), (ComposedDpEvent([GaussianDpEvent(2 * noise), Unlisted(1e-6)]), 2)]
    price = epsilon(events, 1e-5, adjacency=adjacency)
    assert delta(events, price, adjacency=adjacency) == pytest.approx(1e-5, rel=1e-6)
    monkeypatch.setattr(extremes, "find_beside", lambda events, adjacency: None)
    pld._epsilon.cache_clear()
    grid = epsilon(events, 1e-5, adjacency=adjacency)
    pld._epsilon.cache_clear()
    assert price <= grid * (1 + 1e-9)
    assert price == pytest.approx(grid, rel=1e-4)


def test_names_that_cost_more_than_delta_have_no_price_and_draws_keep_their_amplification() -> None:
    assert epsilon([(GaussianDpEvent(2.0), 1), (Unlisted(2e-5), 1)], 1e-5) == math.inf
    drawn = [(_sampled(0.01, 1.0), 10), (Unlisted(1e-7), 1)]
    assert epsilon(drawn, 1e-5) == pytest.approx(epsilon(drawn[:1], 1e-5), rel=0.02)
