"""The central limit theorem: its formula, its inverse, and that it is no bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.accounting import ACCOUNTANTS, Budget, calibrate_noise, epsilon
from sordino.accounting.events import (
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from sordino.accounting.gdp import gaussian_delta, gaussian_epsilon, limit_mu, starting_noise
from sordino.errors import InvalidInput

RATE = 256 / 60_000


def sampled(noise: float, rate: float = RATE) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


def test_equal_steps_are_equation_7() -> None:
    assert limit_mu([(sampled(1.3), 3515)]) == pytest.approx(RATE * math.sqrt(3515 * math.expm1(1.3**-2)))


def test_changing_steps_are_equation_9() -> None:
    events = [(sampled(1 / mu), 1) for mu in (0.2, 0.3, 0.5)]
    assert limit_mu(events) == pytest.approx(RATE * math.sqrt(sum(math.expm1(mu**2) for mu in (0.2, 0.3, 0.5))))


def test_gaussians_on_all_records_add_up_exactly() -> None:
    assert limit_mu([(GaussianDpEvent(2.0), 3), (sampled(2.0, 1.0), 1)]) == pytest.approx(1.0)
    assert epsilon([(GaussianDpEvent(2.0), 4)], 1e-5, "gdp") == pytest.approx(
        epsilon([(GaussianDpEvent(2.0), 4)], 1e-5, "pld"), rel=1e-3
    )


@given(st.floats(1e-3, 50.0), st.floats(1e-12, 0.3))
def test_epsilon_inverts_delta(mu: float, delta: float) -> None:
    found = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, found) <= delta * (1 + 1e-6)
    if found > 0:
        assert gaussian_delta(mu, found) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(
    ("target", "delta", "noise"),
    [
        (0.4, 1 / 600_000, 2.904),
        (0.6, 1 / 600_000, 2.053),
        (1.2, 1 / 600_000, 1.216),
        (0.4, 1 / 60_000, 2.530),
        (1.2, 1 / 60_000, 1.111),
    ],
)
def test_the_papers_noise_is_found(target: float, delta: float, noise: float) -> None:
    """20 epochs of MNIST at B = 256, as the authors' script computes them."""
    found = calibrate_noise(Budget(target, delta, accountant="gdp"), RATE, 4687)
    assert found.noise_multiplier == pytest.approx(noise, rel=2e-3)


def test_it_is_labelled_and_is_no_bound() -> None:
    events = [(sampled(1.2), 4687)]
    assert ACCOUNTANTS["gdp"].basis == "asymptotic"
    assert epsilon(events, 1e-5, "gdp") < epsilon(events, 1e-5, "pld")


@pytest.mark.parametrize("event", [LaplaceDpEvent(1.0), PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0))])
def test_other_events_are_refused(event: DpEvent) -> None:
    with pytest.raises(InvalidInput, match="no GDP price"):
        epsilon([(event, 1)], 1e-5, "gdp")


def test_replace_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="replace-one"):
        epsilon([(sampled(1.0), 1)], 1e-5, "gdp", "replace-one")


def test_extremes_are_total() -> None:
    assert epsilon([], 1e-5, "gdp") == 0
    assert epsilon([(NoOpDpEvent(), 3), (sampled(1.0, 0.0), 3), (GaussianDpEvent(math.inf), 1)], 1e-5, "gdp") == 0
    assert epsilon([(GaussianDpEvent(0.0), 1)], 1e-5, "gdp") == math.inf
    assert epsilon([(sampled(0.01), 1)], 1e-5, "gdp") == math.inf
    huge = epsilon([(GaussianDpEvent(1e-9), 1)], 1e-5, "gdp")
    assert huge == pytest.approx(5e17, rel=1e-3)
    assert gaussian_epsilon(1.0001e4, 1e-5) == pytest.approx(gaussian_epsilon(0.9999e4, 1e-5), rel=1e-3)
    assert ACCOUNTANTS["gdp"].delta([(GaussianDpEvent(0.0), 1)], 1.0, "add-or-remove-one") == 1
    assert ACCOUNTANTS["gdp"].delta([], 1.0, "add-or-remove-one") == 0


def test_calibration_starts_near_the_answer() -> None:
    factor = starting_noise([(SelfComposedDpEvent(sampled(1.0), 4687), 1)], 1.2, 1 / 600_000)
    assert factor == pytest.approx(1.216, rel=0.1)
    tenfold = starting_noise([(sampled(10 ** (-t / 500)), 10) for t in range(500)], 1.2, 1 / 600_000)
    assert tenfold == pytest.approx(1 / 0.126, rel=0.2)


def test_calibration_starts_at_one_where_the_limit_is_silent() -> None:
    for events in ([(LaplaceDpEvent(1.0), 1)], [], [(GaussianDpEvent(0.0), 1)]):
        assert starting_noise(events, 1.0, 1e-5) == 1
