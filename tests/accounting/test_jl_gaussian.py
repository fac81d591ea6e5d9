"""The price of projected norms against reference values, an independent quadrature, and its limits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import integrate, stats
from scipy.special import ndtr

from sordino.accounting import pricing
from sordino.accounting.events import from_json, to_json
from sordino.accounting.jl_gaussian import ProjectedGaussian, _levels, tail_epsilon
from sordino.accounting.pld import pld
from sordino.errors import InvalidInput

RATE, NOISE, STEPS, DELTA = 256 / 60_000, 1.3, 1172, 1e-5


def price(projections: int, *, noise: float = NOISE, rate: float = RATE, steps: int = STEPS) -> float:
    return pricing.epsilon([(PoissonSampledDpEvent(rate, ProjectedGaussian(noise, projections)), steps)], DELTA)


def exact_price(noise: float = NOISE, rate: float = RATE, steps: int = STEPS) -> float:
    return pricing.epsilon([(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)], DELTA)


def oracle_delta(epsilon: float, noise: float, projections: int, rate: float, direction: str) -> float:
    """max over tests of P − e^ε Q, averaged over χ²_r by adaptive quadrature: shares nothing with the library."""

    def one(chi_square: float) -> float:
        shift = math.sqrt(projections / chi_square) / noise
        power = math.expm1(epsilon) if direction == "remove" else math.expm1(-epsilon)
        if 1 + power / rate <= 0:  # the likelihood ratio never crosses e^ε
            return -math.expm1(epsilon) if direction == "remove" else 0.0
        crossing = (math.log1p(power / rate) + shift**2 / 2) / shift
        if direction == "remove":
            above_without, above_with = ndtr(-crossing), ndtr(shift - crossing)
            return (1 - rate) * above_without + rate * above_with - math.exp(epsilon) * above_without
        below_without, below_with = ndtr(crossing), ndtr(crossing - shift)
        return below_without - math.exp(epsilon) * ((1 - rate) * below_without + rate * below_with)

    law = stats.chi2(projections)
    cuts = law.ppf([1e-14, 1e-10, 1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9])
    pieces = [
        integrate.quad(lambda x: law.pdf(x) * one(x), a, b, epsabs=0, epsrel=1e-8, limit=200)[0]
        for a, b in pairwise(cuts)
    ]
    return float(sum(pieces))


@pytest.mark.parametrize(("projections", "expected"), [(10, 5.09), (20, 0.74), (30, 0.56), (100, 0.50), (1000, 0.49)])
def test_reference_values(projections: int, expected: float) -> None:
    assert price(projections) == pytest.approx(expected, rel=0.02)


def test_few_projections_cost_infinitely_much_and_the_tail_says_how_much_about() -> None:
    assert price(4) == math.inf
    for projections, order in [(1, 5e10), (2, 1.5e5), (4, 290)]:
        assert tail_epsilon(NOISE, projections, RATE, STEPS, DELTA) == pytest.approx(order, rel=0.1)
    assert tail_epsilon(NOISE, 1, RATE, 1, 0.5) == 0.0


def test_many_projections_cost_what_exact_norms_do() -> None:
    gaps = [price(projections) / exact_price() - 1 for projections in (100, 1000, 10_000)]
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 1e-3


@pytest.mark.parametrize("rate", [RATE, 0.2, 1.0])
@pytest.mark.parametrize("projections", [3, 24])
def test_one_step_is_just_above_the_quadrature(projections: int, rate: float) -> None:
    event = PoissonSampledDpEvent(rate, ProjectedGaussian(NOISE, projections))
    for epsilon in (0.0, 0.002, 0.5, 3.0):
        truth = max(oracle_delta(epsilon, NOISE, projections, rate, way) for way in ("remove", "add"))
        found = pld(event, "add-or-remove-one").get_delta_for_epsilon(epsilon)
        assert truth * (1 - 1e-6) - 1e-12 <= found <= truth * 1.04 + 1e-12, epsilon


def test_the_quadrature_would_notice_a_wrong_number_of_projections() -> None:
    event = PoissonSampledDpEvent(RATE, ProjectedGaussian(NOISE, 24))
    found = pld(event, "add-or-remove-one").get_delta_for_epsilon(0.5)
    assert found < 0.7 * oracle_delta(0.5, NOISE, 22, RATE, "remove")
    assert found > 1.4 * oracle_delta(0.5, NOISE, 26, RATE, "remove")


def test_levels_are_rounded_up() -> None:
    event = ProjectedGaussian(NOISE, 12)
    shifts, weights, noiseless = _levels(event)
    assert weights.min() >= 0
    assert weights.sum() + noiseless == pytest.approx(1, abs=1e-12)
    law = stats.chi2(event.projections)
    for k in (1, 200, 400, 599):
        # Everything that is counted at or below a level truly lies there.
        below = law.sf(event.projections / (shifts[k] * NOISE) ** 2)
        assert weights[: k + 1].sum() <= below * (1 + 1e-9)


def test_the_price_falls_with_projections() -> None:
    """The paper's appendix C says that it does not; computed without losing the tail of Z_r, it does."""
    prices = [price(r) for r in (16, 18, 20, 30, 50, 100, 400)]
    assert prices == sorted(prices, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise", "steps"), [(RATE, NOISE, STEPS), (64 / 25_000, 0.5, 1953)])
def test_the_price_falls_with_projections_at_both_settings_of_figure_8(rate: float, noise: float, steps: int) -> None:
    numbers = (6, 7, 8, 9, 10, 12, 14, 16, 20, 25, 30, 40, 50, 70, 100, 200, 400, 1000)
    for delta in (1e-7, DELTA, 1e-3, 0.1):
        plans = [[(PoissonSampledDpEvent(rate, ProjectedGaussian(noise, r)), steps)] for r in numbers]
        prices = [pricing.epsilon(plan, delta) for plan in plans]
        assert prices == sorted(prices, reverse=True), delta


def test_curves_cross_only_where_hardly_any_privacy_is_left() -> None:
    def delta(projections: int, epsilon: float) -> float:
        return pld(ProjectedGaussian(0.1, projections), "add-or-remove-one").get_delta_for_epsilon(epsilon)

    assert delta(5, 10.0) < delta(50, 10.0) - 0.001  # more projections are worse here …
    assert delta(5, 10.0) > 0.9  # … where almost everything is revealed
    assert delta(5, 60.0) > delta(50, 60.0)
    assert delta(50, 60.0) < 0.5


def test_without_amplification_it_costs_more() -> None:
    plain = pricing.epsilon([(ProjectedGaussian(20.0, 64), 10)], DELTA)
    assert plain == pytest.approx(
        pricing.epsilon([(PoissonSampledDpEvent(1.0, ProjectedGaussian(20.0, 64)), 10)], DELTA)
    )
    assert plain > pricing.epsilon([(GaussianDpEvent(20.0), 10)], DELTA)
    assert plain > 2 * price(64, noise=20.0, rate=0.1, steps=10)


def test_renyi_accounting_is_refused_with_the_reason() -> None:
    event = ProjectedGaussian(NOISE, 100)
    for sampled in (event, PoissonSampledDpEvent(RATE, event)):
        with pytest.raises(InvalidInput, match="infinite at every order"):
            pricing.epsilon([(sampled, 1)], DELTA, accountant="rdp")


def test_replace_one_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="ties their lengths together"):
        pricing.epsilon([(ProjectedGaussian(NOISE, 100), 1)], DELTA, adjacency="replace-one")


def test_several_answers_on_one_draw_have_no_price() -> None:
    twice = PoissonSampledDpEvent(RATE, SelfComposedDpEvent(ProjectedGaussian(NOISE, 20), 2))
    with pytest.raises(InvalidInput, match="law 3"):
        pricing.epsilon([(twice, 1)], DELTA)


def test_the_event_survives_the_ledger() -> None:
    event = PoissonSampledDpEvent(RATE, ProjectedGaussian(NOISE, 20))
    assert from_json(to_json(event)) == event


@pytest.mark.parametrize(
    ("noise", "projections"), [(0.0, 20), (-1.0, 20), (math.inf, 20), (math.nan, 20), (1.0, 0), (1.0, 2.5)]
)
def test_events_that_make_no_sense_are_refused(noise: float, projections: int) -> None:
    with pytest.raises(InvalidInput, match=r"noise_multiplier|projections"):
        ProjectedGaussian(noise, projections)


def test_noise_beyond_reason_costs_nothing() -> None:
    assert price(40, noise=1e5, steps=1) == 0.0
    assert np.isfinite(price(40, noise=50.0))
