"""Pricing through the ladder is never below the exact composition, and close to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from sordino.accounting import Budget, delta, epsilon, levels, noise_for, rdp
from sordino.accounting.events import ADJACENCIES, Adjacency, DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.levels import Charge, noise_at, rung_of, share_of, split

DELTA = 1 / 600_000
RATE = 256 / 60_000
Runs = list[tuple[DpEvent, int]]

noises = st.floats(0.05, 1e6)


def sampled(noise: float, rate: float = RATE) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


def growing(mu: float, ratio: float, distinct: int, each: int, rate: float = RATE) -> Runs:
    """`distinct` noises, falling by `ratio` in all, each for `each` steps."""
    return [(sampled(ratio ** (-t / distinct) / mu, rate), each) for t in range(distinct)]


def one_by_one(monkeypatch: pytest.MonkeyPatch, events: Runs, accountant: str = "pld") -> float:
    """Without the ladder; the last event costs nothing, and keeps this price apart from others that are remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(levels, "MOST_DISTINCT", len(events))
        return epsilon([*events, (GaussianDpEvent(1e9), 1)], DELTA, accountant)


def divergence(mu: float, rate: float, threshold: float, adjacency: Adjacency, direction: int) -> float:
    """∫ max(0, P − threshold·Q) over a fine grid: an oracle that shares nothing with the code."""
    x = np.linspace(-9 - mu, 9 + mu, 100_001)
    absent = (1 - rate) * norm.pdf(x)
    p = absent + rate * norm.pdf(x - mu)
    q = absent + rate * norm.pdf(x + mu) if adjacency == "replace-one" else norm.pdf(x)
    if direction == 1:
        p, q = q, p
    return float(np.maximum(p - threshold * q, 0.0).sum() * (x[1] - x[0]))


@given(noises)
def test_the_rungs_of_a_noise_enclose_it(noise: float) -> None:
    rung = rung_of(noise)
    assert noise_at(rung) >= noise >= noise_at(rung + 1)
    assert noise_at(rung) / noise_at(rung + 1) < math.sqrt(levels.GROWTH)


@given(noises, st.floats(1.0, 1.2), st.sampled_from(ADJACENCIES))
def test_more_noise_is_never_charged_more(noise: float, factor: float, adjacency: Adjacency) -> None:
    def place(sigma: float) -> tuple[int, float]:
        rung = rung_of(sigma)
        return rung, share_of(sigma, rung, adjacency)

    rung, share = place(noise * factor)
    assert (rung, share) <= place(noise)
    assert 0 < share <= 1


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 3.1), (0.01, 0.83), (0.2, 1.27), (0.03, 0.45), (0.9, 0.6)])
def test_a_blend_dominates_at_every_threshold(
    adjacency: Adjacency, direction: int, rate: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "GROWTH", 2.0)  # wide rungs, so that the sum can tell the two apart
    rung = rung_of(noise)
    share = share_of(noise, rung, adjacency)
    slack = []
    for loss in (-2.0, -0.5, -0.05, -0.004, 0.0, 0.002, 0.03, 0.3, 1.0, 2.5):
        threshold = math.exp(loss)
        exact, noisy, quiet = (
            divergence(1 / sigma, rate, threshold, adjacency, direction)
            for sigma in (noise, noise_at(rung), noise_at(rung + 1))
        )
        slack.append((1 - share) * noisy + share * quiet - exact)
    assert min(slack) > -1e-7
    assert max(slack) > 1e-6  # the oracle is fine enough to see a difference at all


def test_a_blend_with_too_small_a_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "GROWTH", 2.0)
    noise, adjacency = 1.27, ADJACENCIES[0]
    rung = rung_of(noise)
    share = 0.8 * share_of(noise, rung, adjacency)
    exact, noisy, quiet = (
        divergence(1 / sigma, 0.2, 1.0, adjacency, 0) for sigma in (noise, noise_at(rung), noise_at(rung + 1))
    )
    assert (1 - share) * noisy + share * quiet < exact - 1e-6


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("mu", "ratio", "each"), [(0.35, 1.25, 100), (0.2, 2.0, 300), (0.4, 0.5, 60)])
def test_the_ladder_is_above_the_exact_composition_but_hardly(
    mu: float, ratio: float, each: int, accountant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = growing(mu, ratio, 40, each)
    exact = one_by_one(monkeypatch, events, accountant)
    assert exact * (1 - 1e-9) <= epsilon(events, DELTA, accountant) <= 1.01 * exact


def test_a_ladder_that_rounds_noise_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    events = growing(0.35, 1.25, 40, 101)
    exact = one_by_one(monkeypatch, events)
    with monkeypatch.context() as patch:
        patch.setattr(levels, "share_of", lambda noise, rung, adjacency: 1e-9)
        assert epsilon(events, DELTA) < 0.99 * exact


def test_replace_one_is_grouped_soundly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    events = growing(0.3, 1.5, 34, 40)
    grouped = epsilon(events, DELTA, adjacency="replace-one")
    monkeypatch.setattr(levels, "MOST_DISTINCT", len(events))
    exact = epsilon([*events, (GaussianDpEvent(1e9), 1)], DELTA, adjacency="replace-one")
    assert exact * (1 - 1e-9) <= grouped <= 1.01 * exact


@settings(max_examples=8)
@given(st.integers(0, 39), st.floats(1.0, 3.0))
def test_more_noise_anywhere_never_raises_the_price(step: int, factor: float) -> None:
    events = growing(0.3, 2.0, 40, 20)
    noisier = [*events[:step], (sampled(factor * 2 ** (-step / 40) / 0.3), 20), *events[step + 1 :]]
    assert epsilon(noisier, DELTA) <= epsilon(events, DELTA) * (1 + 1e-9)


def test_a_longer_ledger_never_costs_less() -> None:
    events = growing(0.3, 2.0, 48, 20)
    prices = [epsilon(events[:length], DELTA) for length in range(28, 49, 4)]
    assert prices == sorted(prices)


def test_the_order_of_events_does_not_matter() -> None:
    events = growing(0.3, 2.0, 40, 20)
    assert split(events, "add-or-remove-one") == split(events[::-1], "add-or-remove-one")


def test_only_crowded_rates_are_grouped() -> None:
    crowded, few = growing(0.3, 2.0, 40, 3), growing(0.3, 2.0, 5, 3, rate=0.01)
    others: Runs = [(GaussianDpEvent(4.0), 2), (sampled(0.0), 1), (PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0)), 1)]
    single, ladders = split([*crowded, *few, *others], "add-or-remove-one")
    assert single == [*few, *others]
    assert [ladder.rate for ladder in ladders] == [RATE]
    assert sum(charge.count for charge in ladders[0].charges) == 120


def test_few_different_noises_stay_exact() -> None:
    events = growing(0.3, 2.0, levels.MOST_DISTINCT, 3)
    assert split([*events, *events], "add-or-remove-one") == ([*events, *events], ())


def test_renyi_curves_blend_between_their_ends() -> None:
    orders = rdp.ORDERS
    noisy, quiet = (rdp.rdp_curve(sampled(sigma), "add-or-remove-one", orders) for sigma in (2.0, 1.5))
    for share in (0.0, 0.25, 1.0):
        curve = levels.blend_curves(noisy, quiet, share, orders)
        assert np.all(curve >= noisy * (1 - 1e-12))
        assert np.all(curve <= quiet * (1 + 1e-12))
    assert levels.blend_curves(noisy, quiet, 0.0, orders) == pytest.approx(noisy)
    assert np.all(np.isposinf(levels.blend_curves(np.full(2, np.inf), np.full(2, np.inf), 1.0, (2.0, 3.0))))


def test_calibration_of_a_schedule_comes_back_within_a_per_cent() -> None:
    budget = Budget(0.5, DELTA)

    def plan(noise: float) -> Runs:
        return [(sampled(noise * 2 ** (-t / 1000), 0.01), 1) for t in range(1000)]

    found = noise_for(budget, plan, start=4.0)
    assert 0.99 * 0.5 <= found.epsilon <= 0.5
    # Rounding every noise *up* to one of 30 can only lower the price: a lower bound on the truth.
    coarse: Runs = [(sampled(found.noise_multiplier * 2 ** (-t / 30), 0.01), 33) for t in range(30)]
    assert 0.97 * found.epsilon <= epsilon(coarse, DELTA) <= found.epsilon


PAPER = [(1.2, 0.5, 1.28), (1.2, 0.3, 1.40), (1.2, 0.1, 2.07), (2.0, 0.5, 2.57), (2.0, 0.3, 3.22), (2.0, 0.1, 4.28)]


@pytest.mark.slow
@pytest.mark.parametrize(("claimed", "inverse_ratio", "true"), PAPER)
def test_the_papers_own_settings_cost_what_privacy_md_says(claimed: float, inverse_ratio: float, true: float) -> None:
    events = _claimed(claimed, inverse_ratio)
    proven = epsilon(events, DELTA)
    assert proven == pytest.approx(true, rel=0.01)
    assert epsilon(events, DELTA, "gdp") == pytest.approx(claimed, rel=1e-6)
    assert epsilon(events, DELTA, "rdp") > proven


def test_the_limit_theorem_understates_the_papers_setting() -> None:
    events = _claimed(1.2, 0.5)
    assert epsilon(events, DELTA) == pytest.approx(1.28, rel=0.01)


def _claimed(claimed: float, inverse_ratio: float) -> Runs:
    """The schedule that the extended limit theorem calibrates to `claimed` (T = 5,000, B = 256, N = 60,000)."""

    def plan(noise: float) -> Runs:
        return [(sampled(noise * inverse_ratio ** (t / 5000)), 1) for t in range(5000)]

    low, high = 0.3, 40.0
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(plan(middle), DELTA, "gdp") > claimed else (low, middle)
    return plan(high)


def test_a_charge_names_its_rung() -> None:
    (ladder,) = split(growing(0.3, 2.0, 40, 1), "add-or-remove-one")[1]
    events = ladder.events()
    assert all(
        isinstance(charge, Charge) and {charge.rung, charge.rung + 1} <= set(events) for charge in ladder.charges
    )


def _schedule(steps: int) -> list[tuple[PoissonSampledDpEvent, int]]:
    return [(PoissonSampledDpEvent(0.02, GaussianDpEvent(float(noise))), 1) for noise in np.geomspace(3.0, 1.5, steps)]


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", pytest.param("replace-one", marks=pytest.mark.slow)])
def test_the_ladder_is_an_upper_bound_and_close(monkeypatch: pytest.MonkeyPatch, adjacency: str) -> None:
    events = _schedule(40 if adjacency == "add-or-remove-one" else 34)
    assert levels.split(events, "add-or-remove-one")[1]  # enough different noises to be priced by the ladder
    by_ladder, small = epsilon(events, 1e-5, adjacency=adjacency), delta(events, 0.5, adjacency=adjacency)
    monkeypatch.setattr(levels, "MOST_DISTINCT", len(events))
    exact = epsilon([*events, (GaussianDpEvent(1e9), 1)], 1e-5, adjacency=adjacency)
    assert exact * (1 - 1e-9) <= by_ladder <= exact * 1.01
    assert delta([*events, (GaussianDpEvent(1e9), 1)], 0.5, adjacency=adjacency) <= small * (1 + 1e-9)
