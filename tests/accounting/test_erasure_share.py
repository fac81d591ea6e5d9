"""Erasure where each record's share of the test is clipped: the curve against brute force, adversaries and the old one.

See docs/proofs/erasure.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from sordino import recipes
from sordino.accounting import pricing
from sordino.accounting.erasure import Erasure, addition_curve, removal_curve, surplus_curve
from sordino.accounting.events import from_json, to_json
from sordino.accounting.grids import Array

DELTA = 1e-5
EPSILONS = np.array([-2.0, -0.5, -0.02, 0.0, 0.003, 0.05, 0.4, 1.5])
Z = np.linspace(-10, 10, 3_001)
CELLS = np.exp(-(Z**2) / 2) / np.exp(-(Z**2) / 2).sum()

EVENTS = [
    Erasure(1024 / 60_000, 2.0, 256 / 60_000, float(ndtr(-2 / 2.6)), 0.5, shift=0.15),
    Erasure(0.3, 1.0, 0.2, 0.05, 0.93, shift=0.4),
    Erasure(1.0, 0.8, 1.0, 0.01, 0.2, shift=0.02),
    Erasure(1.0, math.inf, 0.5, 0.2, 0.8, shift=0.3),
    Erasure(0.05, 1.5, 1.0, 0.4, 0.9, shift=1e-9),
    Erasure(0.1, 1.0, 0.4, 1e-9, 1 - 1e-9, shift=1.0),
]


def likelihood(event: Erasure) -> Array:
    if math.isinf(event.noise_multiplier):
        return np.ones_like(Z)
    sigma = event.noise_multiplier
    return 1 - event.rate + event.rate * np.exp(Z / sigma - 1 / (2 * sigma**2))


def pairs(event: Erasure, count: int = 200) -> tuple[Array, Array]:
    """Very many (u, v) that a test can have, on the extreme curves: no tangent and no hull is used here."""
    low, high = ndtri(event.lowest), ndtri(event.highest)
    t = np.linspace(low, high, count)
    t = np.concatenate([t, np.clip([high - event.shift, low + event.shift], low, high)])
    u = np.concatenate([ndtr(t)] * 2)
    x = ndtr(np.concatenate([np.minimum(t + event.shift, high), np.maximum(t - event.shift, low)]))
    return u, (1 - event.test_rate) * u + event.test_rate * x


def brute_force(event: Erasure, epsilon: float, remove: bool) -> float:
    """The worst pair at every proposal z, without any closed form."""
    u, v = pairs(event)
    ratio, e = likelihood(event), math.exp(epsilon)
    best = np.zeros((2, len(Z)))
    for without, present in zip(u, v, strict=True):
        gap = ratio * present - e * without if remove else without - e * ratio * present
        best = np.maximum(best, np.stack([gap, -gap]))
    shown, hidden = (CELLS * best).sum(axis=1)
    return float(max(shown, 1 - e + hidden, 0.0, 1 - e))


@pytest.mark.parametrize("event", EVENTS)
def test_the_curve_is_never_below_brute_force_and_hardly_above(event: Erasure) -> None:
    remove, add = removal_curve(EPSILONS, event), addition_curve(EPSILONS, event)
    worst = replace(event, shift=math.inf)
    looser = removal_curve(EPSILONS, worst), addition_curve(EPSILONS, worst)
    for k, epsilon in enumerate(EPSILONS):
        for curve, loose, is_removal in ((remove, looser[0], True), (add, looser[1], False)):
            true = brute_force(event, epsilon, is_removal)
            assert curve[k] >= true - 1e-7
            assert curve[k] <= true + 0.05 * max(loose[k] - true, 0.0) + 1e-5
    assert surplus_curve(EPSILONS, event) == pytest.approx(remove + np.expm1(EPSILONS), abs=1e-12)


def random_adversary(event: Erasure, rng: np.random.Generator) -> tuple[Array, Array]:
    """P and Q over all outputs, the last of which is "rejected": acceptance functions of any shape within the share."""
    low, high = ndtri(event.lowest), ndtri(event.highest)
    shape = rng.integers(3)
    if shape == 0:  # steps at random places
        t = np.where(rng.choice([-1, 1]) * (Z - rng.normal()) > 0, *rng.uniform(low, high, 2))
        move = np.where(rng.choice([-1, 1]) * (Z - rng.normal()) > 0, 1.0, -1.0)
    elif shape == 1:
        t, move = rng.uniform(low, high, len(Z)), rng.choice([-1.0, 1.0], len(Z))
    else:  # smooth losses
        t = np.clip(rng.normal() + rng.normal() * Z + rng.normal() * Z**2, low, high)
        move = np.sign(rng.normal() + Z)
    u, x = ndtr(t), ndtr(np.clip(t + move * event.shift, low, high))
    p = CELLS * likelihood(event) * ((1 - event.test_rate) * u + event.test_rate * x)
    q = CELLS * u
    return np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())


def exceeded(shrink: float, tries: int) -> int:
    """How many random adversaries beat a curve whose share is `shrink` of theirs."""
    rng, found = np.random.default_rng(5), 0
    for _ in range(tries):
        event = EVENTS[rng.integers(4)]
        claimed = replace(event, shift=shrink * event.shift)
        remove, add = removal_curve(EPSILONS, claimed), addition_curve(EPSILONS, claimed)
        p, q = random_adversary(event, rng)
        e = np.exp(EPSILONS)[:, None]
        beats = np.maximum(p - e * q, 0).sum(axis=1) > remove + 1e-6
        beats |= np.maximum(q - e * p, 0).sum(axis=1) > add + 1e-6
        found += bool(beats.any())
    return found


def test_no_adversary_beats_the_curve_and_half_the_share_is_noticed() -> None:
    assert exceeded(1.0, 150) == 0
    assert exceeded(0.5, 150) > 5


# N = 60,000, B_t = 1024, B_v = 256, beta = -1, C_v = 0.001: noise of training and test, attempts, old and new price.
@pytest.mark.parametrize(
    ("sigma", "test", "attempts", "old", "new"), [(2.0, 1.3, 1_599, 1.164, 1.019), (1.35, 0.9, 5_006, 3.62, 3.234)]
)
def test_reference_points(sigma: float, test: float, attempts: int, old: float, new: float) -> None:
    for share, price in ((None, old), (0.39, new)):
        recipe = recipes.dpsur(
            batch_size=1024,
            noise_multiplier=sigma,
            validation_noise=test,
            validation_share=share,
            steps=attempts,
        ).for_records(60_000)
        assert recipe.price(DELTA) == pytest.approx(price, abs=1e-3)


def test_a_share_beyond_the_interval_is_the_old_event() -> None:
    old = Erasure(0.1, 1.0, 0.1, 0.2, 0.6)
    wide = replace(old, shift=50.0)
    assert np.array_equal(removal_curve(EPSILONS, wide), removal_curve(EPSILONS, old))
    curves = [removal_curve(EPSILONS, replace(old, shift=shift)) for shift in (1e-6, 0.01, 0.1, 0.5, 1.0, 50.0)]
    assert all(np.all(smaller <= larger + 1e-12) for smaller, larger in pairwise(curves))


def test_old_ledgers_are_read_with_the_old_price() -> None:
    event = Erasure(0.1, 1.0, 0.1, 0.2, 0.6)
    text = json.loads(to_json(event))
    del text["fields"]["shift"]
    assert from_json(json.dumps(text)) == event


# -- an audit in closed form: the best attack on one attempt, simulated -----------------------------------------


def certified(share: float, event: Erasure, runs: int, attempts: int) -> float:
    """A lower bound at 99.9 % on the ε (at δ = 1e-3) of the likelihood-ratio attack on a test that moves by `share`."""
    rng, sigma = np.random.default_rng(11), event.noise_multiplier
    low, high = ndtri(event.lowest), ndtri(event.highest)
    middle = (low + high) / 2
    towards = np.clip(middle + share, low, high), np.clip(middle - share, low, high)
    rejected = 1 - ndtr(middle)
    right = stats.norm.sf(0.5, 1.0, sigma)  # with the record a proposal beyond 1/2 is liked, any other disliked
    present_rejects = 1 - right * ndtr(towards[0]) - (1 - right) * ndtr(towards[1])
    scores = []
    for present in (True, False):
        w = rng.normal(float(present), sigma, (runs, attempts))
        accept = np.where(w > 0.5, ndtr(towards[0]), ndtr(towards[1])) if present else np.full_like(w, ndtr(middle))
        kept = rng.random(w.shape) < accept
        moved = np.where(w > 0.5, ndtr(towards[0]), ndtr(towards[1])) / ndtr(middle)
        ratio = np.where(kept, (w - 0.5) / sigma**2 + np.log(moved), np.log(present_rejects / rejected))
        scores.append(ratio.sum(axis=1))
    bounds = []
    for threshold in np.quantile(scores[0], [0.5, 0.9, 0.98]):
        hits, misses = (int((score > threshold).sum()) for score in scores)
        least = stats.beta.ppf(0.0005, hits, runs - hits + 1) - 1e-3
        bounds.append(math.log(least / stats.beta.ppf(0.9995, misses + 1, runs - misses)))
    return max(bounds)


def test_the_audit_stays_below_the_claim_and_notices_a_share_that_is_not_clipped() -> None:
    attempts, runs = 20, 40_000
    event = Erasure(1.0, 30.0, 1.0, float(ndtr(-1.0)), float(ndtr(1.0)), shift=0.05)
    claim = pricing.epsilon([(event, attempts)], 1e-3)
    assert 0.3 * claim < certified(0.05, event, runs, attempts) < claim
    assert certified(1.0, event, runs, attempts) > claim


@pytest.mark.parametrize(
    "event",
    [
        Erasure(0.1, 1.0, 1.0, 0.0, 0.6),
        Erasure(0.1, 1.0, 0.3, 0.0, 0.5, shift=0.1),
        Erasure(0.1, 1.0, 0.3, 0.3, 1.0, shift=0.1),
        Erasure(0.1, 1.0, 0.3, 0.3, 0.6, shift=1e-17),
    ],
)
def test_an_acceptance_that_rounds_to_an_end_and_a_share_below_rounding_have_a_price(event: Erasure) -> None:
    low, high = ndtri(max(event.lowest, 1e-300)), ndtri(min(event.highest, 1 - 1e-16))
    finite = replace(event, lowest=float(ndtr(low)), highest=float(ndtr(high)))
    for curve, remove in ((removal_curve, True), (addition_curve, False)):
        found = curve(EPSILONS, event)
        assert np.isfinite(found).all()
        assert all(found[i] >= brute_force(finite, e, remove) - 1e-7 for i, e in enumerate(EPSILONS))
    assert pricing.epsilon([(event, 3)], DELTA) > 0
