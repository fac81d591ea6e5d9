"""Closed forms for Gaussian answers: the limit theorem, which is no bound, and what the noise-decay papers charge."""

from __future__ import annotations

import math

import numpy as np
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
from sordino.accounting.gaussian import Truncated, amplify, gaussian_delta, gaussian_epsilon, limit_mu, starting_noise
from sordino.accounting.rdp import rdp_curve
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


DELTA = 1 / 600_000


@given(st.floats(1e-5, 10.0), st.floats(1.5, 500.0), st.floats(1e-10, 0.1))
def test_the_conversion_is_the_best_order_below_omega(rho: float, omega: float, delta: float) -> None:
    orders = 1 + np.geomspace(1e-6, omega - 1, 20_001)
    best = float(np.min(rho * orders + math.log(1 / delta) / (orders - 1)))
    found = Truncated(rho, omega).epsilon(delta)
    assert found <= best * (1 + 1e-9)
    assert found == pytest.approx(best, rel=1e-3)


@given(st.floats(1e-5, 10.0), st.floats(1.5, 500.0), st.floats(1e-10, 0.1))
def test_delta_inverts_epsilon(rho: float, omega: float, delta: float) -> None:
    part = Truncated(rho, omega)
    assert part.delta(part.epsilon(delta)) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(
    ("target", "rho", "noise"), [(0.4, 0.0030, 58), (0.6, 0.0066, 39), (1.2, 0.0259, 20), (2.0, 0.0700, 12)]
)
def test_why_noise_decay_fails_in_the_papers_table(target: float, rho: float, noise: float) -> None:
    """20 epochs without amplification leave ρ/20 per epoch, and a noise at which nothing is learnt."""
    assert Truncated(rho).epsilon(DELTA) == pytest.approx(target, rel=0.01)
    epochs = [(sampled(noise, 0.01), 100 * 20)]
    assert epsilon(epochs, DELTA, "zcdp-epoch") == pytest.approx(target, rel=0.03)


def test_yu_et_al_stop_after_sixty_epochs() -> None:
    """σ_e = 10·e^(−0.0138 e), at most ρ = 0.78125 in all: 60 epochs, ε = 6.78 at δ = 1e-5."""
    rho, epochs = 0.0, 0
    while rho + 1 / (2 * (10 * math.exp(-0.0138 * epochs)) ** 2) <= 0.78125:
        rho += 1 / (2 * (10 * math.exp(-0.0138 * epochs)) ** 2)
        epochs += 1
    assert epochs == 60
    events = [(GaussianDpEvent(10 * math.exp(-0.0138 * epoch)), 1) for epoch in range(epochs)]
    assert epsilon(events, 1e-5, "zcdp") == pytest.approx(Truncated(rho).epsilon(1e-5))
    assert Truncated(0.78125).epsilon(1e-5) == pytest.approx(6.78, abs=0.005)


@pytest.mark.parametrize("noise", [3.0, 10.0])
def test_zcdp_is_a_bound_with_or_without_draws(noise: float) -> None:
    assert ACCOUNTANTS["zcdp"].basis == "proven"
    for events in ([(sampled(noise, 0.2), 5)], [(GaussianDpEvent(noise), 5)]):
        for adjacency in ("add-or-remove-one", "replace-one"):
            assert epsilon(events, DELTA, "zcdp", adjacency) >= epsilon(events, DELTA, "pld", adjacency)


def test_charging_an_epoch_of_poisson_draws_once_is_no_bound() -> None:
    """With few records in all, one of them may well be in several draws of an 'epoch'."""
    events = [(sampled(0.5, 0.5), 2)]
    assert ACCOUNTANTS["zcdp-epoch"].basis == "published"
    assert epsilon(events, 1e-5, "zcdp-epoch") < epsilon(events, 1e-5, "zcdp")
    assert epsilon([(sampled(2.0, 0.05), 20)], 1e-5, "zcdp-epoch") == pytest.approx(Truncated(1 / 8).epsilon(1e-5))


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("noise", [2.3, 4.0, 20.0])
def test_the_tcdp_theorem_holds_for_poisson_draws_where_it_was_tried(rate: float, noise: float) -> None:
    part = amplify(rate, 1 / (2 * noise**2))
    assert math.isfinite(part.rho)
    orders = np.unique(np.geomspace(2, math.floor(part.omega), 25).astype(int)).astype(float).tolist()
    curve = rdp_curve(sampled(noise, rate), "add-or-remove-one", orders)
    assert np.all(curve <= part.rho * np.array(orders))
    assert np.any(curve > part.rho / 13 * np.array(orders))  # without its constant it would not hold


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 5.0), (0.01, 2.0), (0.1, 2.24)])
def test_outside_its_conditions_tcdp_has_no_price(rate: float, noise: float) -> None:
    rho = 1 / (2 * noise**2)
    fails = rate > 0.1 or rho > 0.1 or math.log(1 / rate) < 3 * rho * (2 + math.log2(1 / rho))
    assert math.isinf(epsilon([(sampled(noise, rate), 1)], 1e-5, "tcdp")) == fails


def test_tcdp_is_published_and_composes_with_the_smallest_order() -> None:
    events = [(sampled(4.0), 1000), (sampled(10.0), 500), (GaussianDpEvent(50.0), 1)]
    parts = [amplify(RATE, 1 / 32), amplify(RATE, 1 / 200)]
    total = Truncated(1000 * parts[0].rho + 500 * parts[1].rho + 1 / 5000, parts[0].omega)
    assert ACCOUNTANTS["tcdp"].basis == "published"
    assert epsilon(events, DELTA, "tcdp") == pytest.approx(total.epsilon(DELTA))


@pytest.mark.parametrize("name", ["zcdp", "zcdp-epoch", "tcdp"])
def test_every_accountant_is_total(name: str) -> None:
    assert epsilon([], 1e-5, name) == 0
    assert epsilon([(sampled(1.0, 0.0), 5)], 1e-5, name) == 0
    assert epsilon([(sampled(0.0), 1)], 1e-5, name) == math.inf
    assert ACCOUNTANTS[name].delta([(sampled(0.0), 1)], 1.0, "add-or-remove-one") == 1
    assert ACCOUNTANTS[name].delta([], 1.0, "add-or-remove-one") == 0
    with pytest.raises(InvalidInput, match="no CDP price"):
        epsilon([(LaplaceDpEvent(1.0), 1)], 1e-5, name)
