"""Schedules say what their equations say, and a recipe with one costs what its steps cost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.accounting import Budget
from sordino.errors import InvalidInput
from sordino.mechanisms.dynamic import (
    DECAYS,
    ExponentialDecay,
    GrowingMu,
    Levels,
    PerEpoch,
    PolynomialDecay,
    SensitivityDecay,
    StepDecay,
    TimeDecay,
    VarianceDecay,
    dynamic,
    growing_mu,
    noise_decay,
    sensitivity_decay,
)
from sordino.parts import Constant, Schedule, factor_at
from sordino.recipe import Common, Recipe
from sordino.recipes import dpsgd

ALL: list[Schedule] = [
    Constant(),
    GrowingMu(3.3),
    SensitivityDecay(10.0),
    ExponentialDecay(0.0138),
    TimeDecay(0.0281),
    StepDecay(0.7008),
    PolynomialDecay(3.5277),
    VarianceDecay(0.99),
    PerEpoch(GrowingMu(2.0), 20),
    Levels(GrowingMu(10.0), 16),
]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_every_schedule_starts_at_one_and_never_rises(schedule: Schedule) -> None:
    factors = [factor_at(schedule, step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(factors))


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        (GrowingMu(4.0), 4.0**-0.3),  # Dynamic DP-SGD, Eq. 13
        (SensitivityDecay(4.0), 4.0**-0.3),  # Eq. 14
        (ExponentialDecay(0.02), math.exp(-0.6)),
        (TimeDecay(0.02), 1 / 1.6),
        (StepDecay(0.7, 12), 0.49),
        (PolynomialDecay(2.0, 0.2), 0.8 * 0.49 + 0.2),
        (VarianceDecay(0.9), 0.9**15),
        (PerEpoch(ExponentialDecay(0.5), 10), math.exp(-1.5)),
        (PerEpoch(GrowingMu(16.0), 4), 16.0**-0.25),
    ],
    ids=repr,
)
def test_the_equations_at_step_30_of_100(schedule: Schedule, factor: float) -> None:
    assert schedule(30, 100) == pytest.approx(factor)


@given(st.integers(0, 999))
def test_ratio_one_is_the_constant_schedule(step: int) -> None:
    assert GrowingMu(1)(step, 1000) == SensitivityDecay(1)(step, 1000) == Constant()(step, 1000)


def test_per_epoch_changes_once_per_epoch_and_is_on_the_safe_side() -> None:
    """20 epochs of 4,687 steps: within an epoch one value, never below the noise that the formula gives."""
    exact, stepped = GrowingMu(3.0), PerEpoch(GrowingMu(3.0), 20)
    values = [stepped(step, 4687) for step in range(4687)]
    assert len(set(values)) == 20
    assert all(value >= exact(step, 4687) * (1 - 1e-12) for step, value in enumerate(values))


@pytest.mark.parametrize("inner", [GrowingMu(10.0), TimeDecay(0.1), Constant(), PerEpoch(GrowingMu(2.0), 5)], ids=repr)
@pytest.mark.parametrize("steps", [1, 3, 16, 500])
def test_levels_spend_as_much_as_what_they_replace(inner: Schedule, steps: int) -> None:
    """Σ factor⁻² over each level is that of the steps it replaces, up to one constant that calibration finds."""
    staircase = Levels(inner, 16)
    levels: dict[float, list[float]] = {}
    for step in range(steps):
        levels.setdefault(staircase(step, steps), []).append(inner(step, steps) ** -2)
    assert len(levels) <= 16
    constants = [sum(replaced) / (len(replaced) * level**-2) for level, replaced in levels.items()]
    assert constants == pytest.approx([constants[0]] * len(constants))


def test_levels_hold_about_equal_shares_of_what_is_spent() -> None:
    schedule, steps = Levels(GrowingMu(10.0), 8), 4000
    spent: dict[float, float] = {}
    for step in range(steps):
        spent[schedule(step, steps)] = spent.get(schedule(step, steps), 0.0) + schedule(step, steps) ** -2
    assert len(spent) == 8
    assert max(spent.values()) / min(spent.values()) < 1.01


def _halving(step: int, steps: int) -> float:
    return float(0.5 ** (step / steps))


def test_a_function_is_a_schedule() -> None:
    recipe = replace(dpsgd(batch_size=10, steps=50, noise_multiplier=2.0), noise_schedule=_halving).for_records(1000)
    assert recipe.terms(25).noise_multiplier == pytest.approx(2 * 0.5**0.5)
    assert len(recipe.plan()) == 50
    assert Levels(_halving, 4)(0, 50) == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_schedule_without_noise_is_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="at step 3 of 10"):
        factor_at(lambda step, steps: value, 3, 10)


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf])
@pytest.mark.parametrize("part", [GrowingMu, SensitivityDecay, StepDecay, PolynomialDecay, VarianceDecay])
def test_impossible_constants_are_refused(part: type, value: float) -> None:
    with pytest.raises(InvalidInput, match="must be > 0"):
        part(value)


def test_more_impossible_constants() -> None:
    with pytest.raises(InvalidInput, match="rate"):
        ExponentialDecay(-0.1)
    with pytest.raises(InvalidInput, match="rate"):
        TimeDecay(math.nan)
    with pytest.raises(InvalidInput, match="epochs"):
        PerEpoch(Constant(), 0)
    with pytest.raises(InvalidInput, match="count"):
        Levels(Constant(), 0)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_dynamic_is_algorithm_2() -> None:
    recipe = dynamic(mu_ratio=2, clip_ratio=4, clip=1.5, batch_size=10, steps=100, noise_multiplier=3.0)
    terms = recipe.for_records(1000).terms(50)
    assert terms.clip == pytest.approx(1.5 * 4**-0.5)
    assert terms.noise_std == pytest.approx(1.5 * 3.0 * 8**-0.5)


def test_sensitivity_decay_costs_nothing() -> None:
    parts: Common = {"batch_size": 10, "steps": 100, "noise_multiplier": 3.0}
    static, decaying = (make(**parts).for_records(1000) for make in (dpsgd, sensitivity_decay))
    assert decaying.plan() == static.plan()


def test_growing_mu_with_ratio_one_is_dpsgd() -> None:
    parts: Common = {"batch_size": 10, "steps": 100, "noise_multiplier": 3.0}
    static, growing = dpsgd(**parts).for_records(1000), growing_mu(ratio=1, **parts).for_records(1000)
    assert growing.price(1e-5) == static.price(1e-5)


def test_a_growing_mu_costs_more_from_the_same_start() -> None:
    parts: Common = {"batch_size": 10, "steps": 100, "noise_multiplier": 3.0}
    prices = [growing_mu(ratio=ratio, **parts).for_records(1000).price(1e-5) for ratio in (1, 1.5, 2)]
    assert prices == sorted(set(prices))


@pytest.mark.parametrize("kind", DECAYS)
def test_noise_decays_once_per_epoch(kind: str) -> None:
    recipe = noise_decay(kind=kind, batch_size=100, epochs=20, noise_multiplier=10.0).for_records(1000)
    assert len(recipe.plan()) in (2, 20)  # step decay changes every ten epochs
    assert sum(count for _, count in recipe.plan()) == 200


def test_unknown_decay_and_missing_epochs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="kind='cubic'"):
        noise_decay(kind="cubic", epochs=3)
    with pytest.raises(InvalidInput, match="epochs"):
        dynamic(per_epoch=True, steps=100)


def test_calibration_of_a_staircase_and_of_a_schedule_come_out_alike() -> None:
    budget = Budget(0.4, 1e-5)
    recipe = growing_mu(ratio=1.5, batch_size=100, steps=400)
    exact = recipe.calibrate(budget, records=10_000)
    staircase = replace(recipe, noise_schedule=Levels(GrowingMu(1.5), 16)).calibrate(budget, records=10_000)
    for found in (exact, staircase):
        assert 0.99 * 0.4 <= found.price(1e-5) <= 0.4
    spent = [sum(found.terms(t).noise_multiplier ** -2 for t in range(400)) for found in (exact, staircase)]
    assert spent[0] == pytest.approx(spent[1], rel=0.02)


@pytest.mark.parametrize(
    "recipe",
    [dynamic(epochs=3, per_epoch=True), noise_decay(kind="polynomial", epochs=5), growing_mu(steps=10)],
    ids=lambda recipe: recipe.name,
)
def test_recipes_with_schedules_survive_toml(recipe: Recipe) -> None:
    assert Recipe.from_toml(recipe.to_toml()) == recipe
