"""The conversion that noise screening and Tramèr & Boneh charge by: their figures, and a bound above the later one."""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import ACCOUNTANTS, Budget, calibrate_noise, calibrate_steps, delta, epsilon
from sordino.accounting.rdp import ORDERS, rdp_curve

DELTA = 1e-5
BUDGET = Budget(3.0, DELTA, "rdp-classic")


@pytest.mark.parametrize(
    ("records", "batch", "noise", "classic", "improved"),
    [
        (60_000, 512, 1.23, 4_698, 6_185),
        (60_000, 2048, 2.15, 1_157, 1_515),
        (50_000, 1024, 1.54, 1_435, 1_898),
    ],
)
def test_noise_screening_takes_as_many_updates_as_it_says(records, batch, noise, classic, improved):
    """τ at ε = 3 (docs/papers.md), and what the later conversion would have paid for."""
    assert calibrate_steps(BUDGET, batch / records, noise) == classic
    later = calibrate_steps(Budget(3.0, DELTA, "rdp"), batch / records, noise)
    assert later == pytest.approx(improved, rel=0.005)


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "noise"),
    [(60_000, 512, 40, 1.23), (60_000, 2048, 40, 2.15), (50_000, 1024, 30, 1.54), (60_000, 8192, 40, 4.05)],
)
def test_tramer_and_boneh_need_the_noise_that_they_print(records, batch, epochs, noise):
    """σ for ε = 3 (docs/papers.md; whole batches of an epoch); by the later conversion it is a tenth less."""
    steps = epochs * (records // batch)
    assert calibrate_noise(BUDGET, batch / records, steps).noise_multiplier == pytest.approx(noise, rel=0.005)
    later = calibrate_noise(Budget(3.0, DELTA, "rdp"), batch / records, steps).noise_multiplier
    assert later < 0.93 * noise


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-3, 0.1), st.floats(0.7, 8.0), st.integers(1, 5_000), st.floats(1e-9, 1e-2))
def test_it_is_the_formula_and_never_below_the_later_conversion(rate, noise, steps, target):
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    found = epsilon([(event, steps)], target, "rdp-classic")
    curve = steps * rdp_curve(event, "add-or-remove-one", ORDERS)
    by_hand = [r - math.log(target) / (o - 1) for o, r in zip(ORDERS, curve, strict=True) if o == int(o)]
    assert found == pytest.approx(min(by_hand), rel=1e-9)
    assert found >= compute_epsilon(ORDERS, curve.tolist(), target)[0]


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (4.0, 3), (0.3, 1)])
def test_epsilon_and_delta_are_one_curve(noise, count):
    events = [(GaussianDpEvent(noise), count)]
    assert ACCOUNTANTS["rdp-classic"].basis == "proven"
    spent = epsilon(events, DELTA, "rdp-classic")
    assert delta(events, spent, "rdp-classic") == pytest.approx(DELTA, rel=1e-6)
    assert delta(events, spent, "rdp-classic") >= delta(events, spent, "rdp")
    rho = count / (2 * noise**2)
    exact = rho + 2 * math.sqrt(rho * math.log(1 / DELTA))  # over all real orders
    assert exact <= spent <= 1.06 * exact
