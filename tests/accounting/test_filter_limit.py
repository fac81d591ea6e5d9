"""All that a filter lets pass, as one event: its profile is above that of everything that it covers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp

from sordino.accounting import epsilon
from sordino.accounting.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    from_json,
    to_json,
)
from sordino.accounting.filter_limit import FilterLimit, FilterProfile
from sordino.accounting.filtered import Filter
from sordino.accounting.gaussian import gaussian_delta
from sordino.accounting.grids import Array
from sordino.accounting.pricing import delta
from sordino.accounting.rdp import rdp_curve
from sordino.accounting.selection import Selection, expect_trials
from sordino.errors import InvalidInput

EPSILONS: Array = np.linspace(-3.0, 12.0, 61)


def diverge(first: Array, second: Array, order: float) -> float:
    """The Rényi divergence of two laws on a few atoms, the larger one of both directions."""
    pairs = ((np.log(first), np.log(second)), (np.log(second), np.log(first)))
    return float(max(logsumexp(order * a + (1 - order) * b) / (order - 1) for a, b in pairs))


def is_bound(profile: FilterProfile, first: Array, second: Array) -> bool:
    found = np.maximum(first - np.exp(EPSILONS)[:, None] * second, 0).sum(1)
    return bool((found <= profile.delta(EPSILONS) + 1e-12).all())


@pytest.mark.parametrize("order", [1.5, 3.0, 12.0, 96.0])
def test_it_is_above_the_profile_of_every_pair_with_that_divergence(order: float) -> None:
    rng = np.random.default_rng(int(order))
    tried = missed = 0
    for size in (2, 3, 8):
        for _ in range(200):
            first, second = rng.dirichlet(np.full(size, 0.5), 2) + 1e-9
            first, second = first / first.sum(), second / second.sum()
            limit = diverge(first, second, order)
            assert is_bound(FilterProfile(order, limit), first, second)
            tried += 1
            missed += not is_bound(FilterProfile(order, 0.8 * limit), first, second)
    assert missed > 0.1 * tried  # a limit that is too small is seen


def test_it_is_above_that_of_gaussians_on_draws() -> None:
    step = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    for order in (2.0, 6.0, 20.0):
        limit = 20 * float(rdp_curve(step, "add-or-remove-one", [order])[0])
        profile = FilterProfile(order, limit)
        for eps in (0.0, 0.5, 1.0, 3.0):
            assert delta([(step, 20)], eps) <= profile.delta(np.array([eps]))[0]


def test_it_is_convex_and_meets_its_tangent() -> None:
    profile = FilterProfile(5.0, 1.0)
    near = profile.bend + np.array([-1e-9, 0.0, 1e-9])
    np.testing.assert_allclose(profile.delta(near), 1 / 5, rtol=1e-6)
    x = np.exp(np.linspace(-3, 6, 2001))
    slopes = np.diff(profile.delta(np.log(x))) / np.diff(x)
    assert (np.diff(slopes) > -1e-9).all()
    assert (slopes < 0).all()


def test_its_price_is_that_of_the_filter() -> None:
    for order, limit in ((3.0, 1.0), (16.0, 0.2)):
        event = FilterLimit(order, limit)
        assert epsilon([(event, 1)], 1e-5) == pytest.approx(Filter(order, limit).epsilon(1e-5), rel=1e-9)
        both = epsilon([(event, 2)], 1e-5)
        assert both <= Filter(order, 2 * limit).epsilon(1e-5) + 1e-9
        assert both > epsilon([(event, 1)], 1e-5)
        beside = epsilon([(event, 1), (GaussianDpEvent(20.0), 1)], 1e-5)
        assert epsilon([(event, 1)], 1e-5) < beside < both


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_search_of_what_it_covers_costs_less(eta: float) -> None:
    order, limit = 12.0, 0.3
    noise = (order / (2 * limit)) ** 0.5
    covering = expect_trials([(FilterLimit(order, limit), 1)], 10, eta)
    covered = Selection(GaussianDpEvent(noise), eta, covering.gamma)
    for at in (1e-3, 1e-5, 1e-7):
        assert epsilon([(covered, 1)], at) < epsilon([(covering, 1)], at) < 3 * epsilon([(covered, 1)], at)
    for eps in (0.5, 2.0):
        assert delta([(covered, 1)], eps) <= delta([(covering, 1)], eps)


def test_the_renyi_price_of_a_search_is_papernot_and_steinkes() -> None:
    """At α itself and with λ = α: B + log E[K]/(α−1) + (1+η)·((1−1/α)·B + log(1/γ)/α)."""
    order, limit = 6.0, 0.5
    event = expect_trials([(FilterLimit(order, limit), 1)], 10, 1.0)
    by_hand = limit + np.log(10) / (order - 1) + 2 * ((1 - 1 / order) * limit + np.log(1 / event.gamma) / order)
    found = rdp_curve(event, "add-or-remove-one", [order])[0]
    assert found == pytest.approx(by_hand)
    assert np.isinf(rdp_curve(event, "add-or-remove-one", [order + 1])[0])


def test_it_covers_what_passes_the_filter_in_whatever_order() -> None:
    event = FilterLimit(4.0, 1.0)
    each = GaussianDpEvent(2.0)  # 4/(2·4) = 1/2
    assert event.covers([(each, 1)])
    assert event.covers([(SelfComposedDpEvent(each, 2), 1)])
    assert event.covers([(Filter(4.0, 9.0).event(each), 2)])
    assert not event.covers([(each, 2), (GaussianDpEvent(1e3), 1)])


def test_bad_numbers_and_other_adjacencies_are_refused() -> None:
    with pytest.raises(InvalidInput, match="order=1"):
        FilterLimit(1.0, 1.0)
    with pytest.raises(InvalidInput, match="limit=0"):
        FilterLimit(2.0, 0.0)
    with pytest.raises(InvalidInput, match="not replace-one"):
        epsilon([(FilterLimit(2.0, 1.0), 1)], 1e-5, "pld", "replace-one")
    with pytest.raises(InvalidInput, match="no sampled_pld price"):
        epsilon([(PoissonSampledDpEvent(0.1, FilterLimit(2.0, 1.0)), 1)], 1e-5)


def test_it_is_written_and_read_back() -> None:
    event = Selection(FilterLimit(7.5, 0.25), 1.0, 0.1)
    assert from_json(to_json(event)) == event


def test_the_profile_of_a_gaussian_is_below() -> None:
    for mu, order in ((0.2, 30.0), (1.0, 6.0), (2.0, 2.5)):
        profile = FilterProfile(order, order * mu * mu / 2)
        for eps in (0.0, 0.5, 1.0, 2.0, 5.0):
            assert gaussian_delta(mu, eps) <= profile.delta(np.array([eps]))[0]
