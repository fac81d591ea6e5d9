"""Concentrated privacy: the conversions, what each paper charges, and what that is worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.accounting import ACCOUNTANTS, epsilon
from sordino.accounting.cdp import Truncated, amplified
from sordino.accounting.events import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from sordino.accounting.rdp import rdp_curve
from sordino.errors import InvalidInput

DELTA = 1 / 600_000
RATE = 256 / 60_000


def sampled(noise: float, rate: float = RATE) -> DpEvent:
    return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))


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
    part = amplified(rate, 1 / (2 * noise**2))
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
    parts = [amplified(RATE, 1 / 32), amplified(RATE, 1 / 200)]
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
