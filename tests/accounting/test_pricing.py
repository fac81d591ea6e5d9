"""Prices: reference figures, dp_accounting's accountants, order and monotonicity, edges, purity and speed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
    ZCDpEvent,
    get_epsilon_gaussian,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting.events import merge
from sordino.accounting.pricing import ACCOUNTANTS, ORDERS, delta, epsilon, pld, rdp_curve, sampled_pld
from sordino.errors import InvalidInput

MNIST = PoissonSampledDpEvent(256 / 60_000, GaussianDpEvent(1.3))


def _sampled(rate: float, *noises: float) -> PoissonSampledDpEvent:
    gaussians = [GaussianDpEvent(noise) for noise in noises]
    return PoissonSampledDpEvent(rate, gaussians[0] if len(gaussians) == 1 else ComposedDpEvent(gaussians))


# -- reference figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "accountant", "adjacency", "expected"),
    [
        (1_172, "pld", "add-or-remove-one", 0.487),
        (3_516, "pld", "add-or-remove-one", 0.865),
        (3_515, "rdp", "add-or-remove-one", 0.954),
        (3_515, "rdp-classic", "add-or-remove-one", 1.192),
        (1_172, "pld", "replace-one", 0.851),
    ],
)
def test_plain_dpsgd_costs_what_privacy_md_says(steps: int, accountant: str, adjacency: str, expected: float) -> None:
    assert epsilon([(MNIST, steps)], 1e-5, accountant, adjacency) == pytest.approx(expected, abs=5e-4)


def test_law_3_two_answers_on_one_draw_merge_and_two_draws_would_undercount() -> None:
    separate = epsilon([(_sampled(0.01, 1.2), 500), (_sampled(0.01, 5.0), 500)], 1e-5)
    on_one_draw = epsilon([(_sampled(0.01, 1.2, 5.0), 500)], 1e-5)
    merged = merge(GaussianDpEvent(1.2), GaussianDpEvent(5.0))
    assert separate == pytest.approx(0.934, abs=5e-4)
    assert on_one_draw == pytest.approx(0.967, abs=5e-4)
    assert on_one_draw == pytest.approx(epsilon([(PoissonSampledDpEvent(0.01, merged), 500)], 1e-5), abs=1e-12)
    assert epsilon([(_sampled(0.01, 1.2, 5), 500)], 1e-5, "rdp") > epsilon([(_sampled(0.01, 1.2), 500)], 1e-5, "rdp")


# -- oracles ----------------------------------------------------------------------------------------------------------

SETTINGS = [(0.004, 1.3, 3_000), (0.02, 1.0, 500), (0.01, 0.8, 200), (0.5, 3.0, 50), (0.1, 5.0, 1_000)]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("rate", "noise", "steps"), SETTINGS)
def test_agrees_with_dp_accounting(rate: float, noise: float, steps: int, accountant: str) -> None:
    event = _sampled(rate, noise)
    theirs = PLDAccountant() if accountant == "pld" else RdpAccountant(list(ORDERS))
    theirs.compose(event, steps)
    for target in (1e-7, 1e-5, 1e-3):
        assert epsilon([(event, steps)], target, accountant) == pytest.approx(theirs.get_epsilon(target), abs=1e-6)
    assert delta([(event, steps)], 1.0, accountant) == pytest.approx(theirs.get_delta(1.0), abs=1e-8)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_mixed_compositions_agree_with_dp_accounting(accountant: str) -> None:
    events = [
        (_sampled(0.01, 1.0), 300),
        (GaussianDpEvent(8.0), 3),
        (LaplaceDpEvent(6.0), 2),
        (_sampled(0.02, 2.0), 200),
    ]
    theirs = PLDAccountant() if accountant == "pld" else RdpAccountant(list(ORDERS))
    for event, count in events:
        theirs.compose(event, count)
    assert epsilon(events, 1e-5, accountant) == pytest.approx(theirs.get_epsilon(1e-5), abs=2e-6)


def test_replace_one_agrees_with_dp_accounting() -> None:
    theirs = PLDAccountant(NeighboringRelation.REPLACE_ONE).compose(_sampled(0.02, 1.5), 300)
    assert epsilon([(_sampled(0.02, 1.5), 300)], 1e-5, adjacency="replace-one") == pytest.approx(
        theirs.get_epsilon(1e-5), abs=1e-6
    )


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_plain_gaussians_cost_the_closed_form(adjacency: str) -> None:
    sigma = 3.0 if adjacency == "add-or-remove-one" else 6.0  # replacing moves the sum twice as far
    events = [(GaussianDpEvent(sigma * 10), 75), (GaussianDpEvent(sigma * 2), 1)]
    exact = get_epsilon_gaussian(3.0, 1e-6)
    assert exact <= epsilon(events, 1e-6, "pld", adjacency) <= exact + 1e-6
    assert epsilon(events, 1e-6, "rdp", adjacency) >= exact


def test_small_losses_are_not_drowned_by_the_grid() -> None:
    """At rate 1e-5 the loss of a step is a hundredth of dp_accounting's grid, which then overcharges tenfold."""
    events = [(_sampled(1e-5, 10.0), 10**6)]
    coarse = PLDAccountant().compose(*events[0]).get_epsilon(1e-8)
    fine = PLDAccountant(value_discretization_interval=1e-6).compose(*events[0]).get_epsilon(1e-8)
    ours = epsilon(events, 1e-8)
    assert ours <= fine
    assert ours < coarse / 5
    assert epsilon(events, 1e-8, "rdp") > ours


# -- order and monotonicity -------------------------------------------------------------------------------------------

rates = st.floats(1e-4, 0.2)
sigmas = st.floats(0.8, 6.0)
counts = st.integers(1, 3_000)
deltas = st.sampled_from([1e-9, 1e-7, 1e-5, 1e-3])
few = settings(max_examples=8, deadline=None)


@few
@given(rates, sigmas, counts, deltas)
def test_rdp_is_never_below_pld(rate: float, noise: float, steps: int, target: float) -> None:
    events = [(_sampled(rate, noise), steps)]
    assert epsilon(events, target, "rdp") >= epsilon(events, target) * (1 - 1e-6)


@few
@given(rates, sigmas, counts, deltas, st.floats(1.01, 2.0))
def test_price_moves_the_right_way(rate: float, noise: float, steps: int, target: float, factor: float) -> None:
    price = epsilon([(_sampled(rate, noise), steps)], target)
    slack = 1e-9 + 1e-9 * price
    assert epsilon([(_sampled(rate, noise * factor), steps)], target) <= price + slack
    assert epsilon([(_sampled(rate / factor, noise), steps)], target) <= price + slack
    assert epsilon([(_sampled(rate, noise), math.ceil(steps * factor))], target) >= price - slack
    assert epsilon([(_sampled(rate, noise), steps)], target * factor) <= price + slack


@few
@given(rates, sigmas, counts, st.floats(0.1, 4.0))
def test_delta_and_epsilon_are_consistent(rate: float, noise: float, steps: int, target: float) -> None:
    events = [(_sampled(rate, noise), steps)]
    found = delta(events, target)
    if 1e-12 < found < 1:
        assert epsilon(events, found) == pytest.approx(target, rel=1e-5)
    assert delta(events, target, "rdp") >= found * (1 - 1e-6) - 1e-14


# -- structure and edges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_structure_does_not_change_the_price(accountant: str) -> None:
    a, b = _sampled(0.02, 1.0), GaussianDpEvent(5.0)
    nested = ComposedDpEvent([SelfComposedDpEvent(a, 100), b, NoOpDpEvent()])
    flat = epsilon([(a, 200), (b, 2)], 1e-5, accountant)
    assert epsilon([(nested, 2)], 1e-5, accountant) == flat
    assert epsilon([(b, 1), (a, 150), (b, 1), (a, 50)], 1e-5, accountant) == flat
    assert epsilon([(SelfComposedDpEvent(nested, 2), 1)], 1e-5, accountant) == flat


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-classic"])
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (GaussianDpEvent(0.0), math.inf),
        (_sampled(0.1, 0.0), math.inf),
        (NonPrivateDpEvent(), math.inf),
        (PoissonSampledDpEvent(0.1, NonPrivateDpEvent()), math.inf),
        (ComposedDpEvent([GaussianDpEvent(1.0), NonPrivateDpEvent()]), math.inf),
        (_sampled(0.1, 1.0, 0.0), math.inf),
        (_sampled(0.0, 0.0), 0.0),
        (_sampled(0.0, 1.0), 0.0),
        (NoOpDpEvent(), 0.0),
        (PoissonSampledDpEvent(0.1, NoOpDpEvent()), 0.0),
        (PoissonSampledDpEvent(0.1, ComposedDpEvent([])), 0.0),
        (GaussianDpEvent(math.inf), 0.0),
        (SelfComposedDpEvent(GaussianDpEvent(0.1), 0), 0.0),
    ],
)
def test_edges(event: DpEvent, expected: float, accountant: str) -> None:
    assert epsilon([(event, 3)], 1e-5, accountant) == expected
    assert delta([(event, 3)], 1.0, accountant) == pytest.approx(1.0 if expected else 0.0, abs=1e-14)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-classic"])
def test_full_rate_and_nothing_at_all(accountant: str) -> None:
    assert epsilon([(_sampled(1.0, 2.0), 4)], 1e-5, accountant) == epsilon(
        [(GaussianDpEvent(1.0), 1)], 1e-5, accountant
    )
    assert epsilon([], 1e-5, accountant) == 0
    assert epsilon([(MNIST, 0)], 1e-5, accountant) == 0


def test_dispatchers_price_compositions_themselves() -> None:
    composed = ComposedDpEvent([GaussianDpEvent(2.0), SelfComposedDpEvent(GaussianDpEvent(2.0), 3)])
    assert pld(composed, "add-or-remove-one").get_epsilon_for_delta(1e-5) == pytest.approx(
        get_epsilon_gaussian(1.0, 1e-5), abs=1e-5
    )
    assert rdp_curve(composed, "add-or-remove-one", (2.0, 4.0)).tolist() == pytest.approx([1.0, 2.0])
    assert rdp_curve(ZCDpEvent(0.5), "add-or-remove-one", (2.0,)).tolist() == pytest.approx([1.0])
    hopeless = SelfComposedDpEvent(NonPrivateDpEvent(), 2)
    assert pld(hopeless, "add-or-remove-one").get_delta_for_epsilon(9.0) == 1
    assert np.isinf(rdp_curve(hopeless, "add-or-remove-one")).all()


def test_an_event_of_ones_own_gets_a_price_by_registration() -> None:
    class Own(DpEvent):
        pass

    with pytest.raises(InvalidInput, match=r"Own.*sordino\.accounting\.pricing\.pld\.register"):
        pld(Own(), "add-or-remove-one")
    with pytest.raises(InvalidInput, match=r"sampled_pld\.register"):
        pld(PoissonSampledDpEvent(0.5, Own()), "add-or-remove-one")
    pld.register(Own)(lambda _event, adjacency, interval=1e-4: pld(GaussianDpEvent(1.0), adjacency, interval))
    assert pld(Own(), "add-or-remove-one").get_epsilon_for_delta(1e-5) == pytest.approx(
        get_epsilon_gaussian(1.0, 1e-5), abs=1e-6
    )
    with pytest.raises(InvalidInput):
        sampled_pld(Own(), 0.5, "add-or-remove-one")


@pytest.mark.parametrize(
    ("events", "accountant", "adjacency"),
    [
        ([(UnsupportedDpEvent(), 1)], "pld", "add-or-remove-one"),
        ([(UnsupportedDpEvent(), 1)], "rdp", "add-or-remove-one"),
        ([(GaussianDpEvent(-1.0), 1)], "pld", "add-or-remove-one"),
        ([(GaussianDpEvent(-1.0), 1)], "rdp", "add-or-remove-one"),
        ([(GaussianDpEvent(math.nan), 1)], "pld", "add-or-remove-one"),
        ([(_sampled(1.5, 1.0), 1)], "pld", "add-or-remove-one"),
        ([(_sampled(-0.1, 1.0), 1)], "rdp", "add-or-remove-one"),
        ([(PoissonSampledDpEvent(0.1, ComposedDpEvent([LaplaceDpEvent(1.0)] * 2)), 1)], "pld", "add-or-remove-one"),
        ([(_sampled(0.1, 1.0), 1)], "rdp", "replace-one"),
        ([(LaplaceDpEvent(1.0), 1)], "pld", "replace-one"),
        ([(LaplaceDpEvent(1.0), 1)], "rdp", "replace-one"),
        ([(MNIST, -1)], "pld", "add-or-remove-one"),
        ([(MNIST, 1)], "guess", "add-or-remove-one"),
        ([(MNIST, 1)], "pld", "none"),
    ],
)
def test_refusals_are_one_line(events: list[tuple[DpEvent, int]], accountant: str, adjacency: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        epsilon(events, 1e-5, accountant, adjacency)
    assert "\n" not in str(caught.value)
    assert ":" in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_refuses_a_delta_that_is_none(bad: float) -> None:
    with pytest.raises(InvalidInput, match="delta="):
        epsilon([(MNIST, 1)], bad)


@pytest.mark.parametrize("bad", [-0.1, math.inf, math.nan])
def test_refuses_an_epsilon_that_is_none(bad: float) -> None:
    with pytest.raises(InvalidInput, match="epsilon="):
        delta([(MNIST, 1)], bad)


# -- purity and speed -------------------------------------------------------------------------------------------------


def test_asking_changes_nothing() -> None:
    events = [(MNIST, 100), (GaussianDpEvent(20.0), 2)]
    before = list(events)
    prices = [epsilon(events, 1e-5) for _ in range(3)]
    epsilon([(MNIST, 5_000)], 1e-3)
    epsilon(events, 1e-5, "rdp")
    assert events == before
    assert {*prices, epsilon(events, 1e-5)} == {prices[0]}


def test_every_accountant_names_its_basis() -> None:
    for name, accountant in ACCOUNTANTS.items():
        assert accountant.name == name
        assert accountant.basis in ("proven", "asymptotic", "published")


def test_a_progress_bar_can_ask_after_every_step() -> None:
    epsilon([(MNIST, 19_990)], 1e-5)
    took = []
    for steps in range(19_991, 20_001):
        start = time.process_time()
        epsilon([(MNIST, steps)], 1e-5)
        took.append(time.process_time() - start)
    assert min(took) < 0.05
