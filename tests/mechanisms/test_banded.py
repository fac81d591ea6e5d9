"""Correlated noise: its coefficients, its shape, the participation that its price rests on, and one band as DP-SGD."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy.linalg import toeplitz
from torch import Tensor

from sordino import Budget, InvalidInput, Recipe, recipes
from sordino.accounting.ledger import Receipt
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.audit import AuditFailed, Instance, audit_recipe
from sordino.mechanisms.banded import Banded, Cyclic, find_roots, measure_error, optimise
from sordino.mechanisms.dynamic import GrowingMu, SensitivityDecay
from sordino.noise import Independent, Seeded, Settling, Source
from sordino.parts import Draw, Poisson
from tests.helpers import calibrated, private

STEPS, BANDS = 11, 4


def matrix(coefficients: Any, size: int) -> np.ndarray[Any, Any]:
    column = np.zeros(size)
    column[: len(coefficients)] = coefficients
    return toeplitz(column, np.zeros(size))


def small(bands: int = BANDS, steps: int = STEPS, **options: Any) -> Recipe:
    chosen = {"batch_size": 8, "steps": steps, "noise_multiplier": 1.3, **options}
    return recipes.banded(bands=bands, **chosen).for_records(64)


# -- coefficients -----------------------------------------------------------------------------------------------------


def test_the_square_root_squares_to_summation() -> None:
    root = matrix(find_roots(20), 20)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((20, 20))), atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("changing", [False, True])
def test_the_error_is_that_of_dense_matrices_and_its_gradient_is_right(momentum: float, changing: bool) -> None:
    steps, c = 30, np.array([1.0, 0.45, 0.3])
    rates = np.linspace(1.0, 0.1, steps) if changing else None
    updates = matrix(momentum ** np.arange(steps), steps) if momentum else np.eye(steps)
    scaled = updates if rates is None else np.diag(rates) @ updates
    noise = np.tril(np.ones((steps, steps))) @ scaled @ np.linalg.inv(matrix(c, steps))
    found, slope = measure_error(c, steps, momentum, rates)
    assert found == pytest.approx((noise**2).sum() / steps)
    for place in range(3):
        moved = np.eye(3)[place] * 1e-6
        above, below = (measure_error(c + by, steps, momentum, rates)[0] for by in (moved, -moved))
        assert slope[place] == pytest.approx((above - below) / 2e-6, rel=1e-5)


def test_optimised_coefficients_are_better_and_no_small_change_betters_them() -> None:
    def value(c: Any, momentum: float = 0.0) -> float:
        return measure_error(np.asarray(c), 200, momentum)[0] * float(np.dot(c, c))

    best = optimise(6, 200)
    assert value(best) < 0.95 * value(find_roots(6)) < 0.5 * value([1.0])
    generator = np.random.default_rng(0)
    for size in (1e-2, 1e-3):
        assert all(value(best + size * generator.normal(size=6)) > value(best) for _ in range(20))
    assert value(optimise(6, 200, 0.9), 0.9) < value(best, 0.9)


def test_the_momentum_of_the_recipe_and_a_schedule_of_rates_reach_the_coefficients() -> None:
    found = {}
    for name, options in {
        "plain": {},
        "momentum": {"momentum": 0.9},
        "rates": {"rates": SensitivityDecay(50.0)},
    }.items():
        noise = small(steps=60, **options).noise
        assert isinstance(noise, Banded)
        found[name] = noise.coefficients
    assert found["plain"] == pytest.approx(optimise(BANDS, 60), abs=1e-6)
    assert found["momentum"] == pytest.approx(optimise(BANDS, 60, 0.9), abs=1e-6)
    assert found["rates"] == pytest.approx(optimise(BANDS, 60, 0.0, SensitivityDecay(50.0)), abs=1e-6)
    assert len(set(found.values())) == 3
    told = small(steps=60, momentum=0.9)
    plain = replace(told, optimizer=recipes.dpsgd().optimizer).for_records(64).noise
    assert isinstance(plain, Banded)
    assert plain.coefficients == found["plain"]


# Made with jax-privacy 2.0.0 in double precision: toeplitz.optimize_banded_toeplitz(n, bands), loss(coefficients, n);
# for optimal_max_error_strategy_coefs(bands), loss and minsep_sensitivity_squared with turns `bands` apart.
REFERENCE: dict[tuple[int, int], dict[str, Any]] = {
    (64, 4): {
        "optimised": [0.70806, 0.47455, 0.39774, 0.33948],
        "loss": 10.501447,
        "sqrt_loss": 11.230087,
        "minsep": 16,
    },
    (500, 8): {
        "optimised": [0.53761, 0.39082, 0.35193, 0.3292, 0.31155, 0.29527, 0.27771, 0.25424],
        "loss": 37.041278,
        "sqrt_loss": 45.340396,
        "minsep": 62.866096,
    },
    (2000, 32): {
        "optimised": [0.43527, 0.26665, 0.22709, 0.20797, 0.19621, 0.18798, 0.18175, 0.17676],
        "loss": 42.024655,
        "sqrt_loss": 56.838147,
        "minsep": 62.897047,
    },
}


@pytest.mark.parametrize(("steps", "bands"), list(REFERENCE))
def test_coefficients_and_sensitivities_are_those_of_jax_privacy(steps: int, bands: int) -> None:
    known = REFERENCE[steps, bands]
    root, best = find_roots(bands), optimise(bands, steps)
    assert measure_error(root, steps)[0] * (root @ root) == pytest.approx(known["sqrt_loss"], rel=1e-6)
    assert measure_error(best, steps)[0] * (best @ best) == pytest.approx(known["loss"], rel=1e-6)
    np.testing.assert_allclose((best / np.linalg.norm(best))[:8], known["optimised"], atol=2e-5)
    found = find_largest_movement(root / np.linalg.norm(root), steps, bands)
    assert found == pytest.approx(known["minsep"], rel=1e-6)


def find_largest_movement(c: Any, steps: int, apart: int) -> float:
    """‖C·u‖² for a record that joins from the start on, every `apart` steps: of its columns no two meet."""
    joined = np.zeros(steps)
    joined[::apart] = 1.0
    return float(np.square(matrix(c, steps) @ joined).sum())


# -- the noise --------------------------------------------------------------------------------------------------------


def add_to_zero(noise: Banded, steps: int, entries: int, seed: int = 0, **gaps: Any) -> np.ndarray[Any, Any]:
    source, state, released = Seeded(seed), noise.start(), []
    for number in range(1, steps + 1):
        total = [torch.full((entries,), 3.0, dtype=torch.float64)]
        sequence = number + (number > gaps.get("after", steps))
        noise.add(source, Receipt(sequence, GaussianDpEvent(1.0)), total, 2.0, state)
        released.append((total[0] - 3.0).numpy())
    return np.array(released)


@pytest.mark.parametrize("strategy", ["sqrt", "optimised"])
def test_the_noise_is_the_inverse_of_the_strategy_on_fresh_normals(strategy: str) -> None:
    noise = Banded(BANDS, strategy).for_steps(STEPS)
    assert noise.coefficients is not None
    c = np.array(noise.coefficients) / np.linalg.norm(noise.coefficients)
    source = Seeded(0)
    fresh = np.array([source.gaussian(Receipt(n, GaussianDpEvent(1.0)), 5, 2.0).numpy() for n in range(1, STEPS + 1)])
    np.testing.assert_allclose(add_to_zero(noise, STEPS, 5), np.linalg.inv(matrix(c, STEPS)) @ fresh, atol=1e-10)


def test_the_sum_of_the_noise_is_smaller_than_that_of_independent_noise() -> None:
    steps = 64
    correlated = add_to_zero(Banded(16).for_steps(steps), steps, 400).cumsum(axis=0)
    independent = add_to_zero(Banded(1).for_steps(steps), steps, 400).cumsum(axis=0)
    expected = measure_error(optimise(16, steps), steps)[0] * np.square(optimise(16, steps)).sum()
    assert np.square(correlated).mean() / 4 == pytest.approx(expected, rel=0.1)
    assert np.square(correlated).mean() < 0.4 * np.square(independent).mean()


def test_a_step_that_was_charged_and_not_released_breaks_the_chain() -> None:
    """Else the rows of a record's two turns would meet."""
    noise = Banded(3, "sqrt").for_steps(6)
    whole, broken = (add_to_zero(noise, 6, 4, **gaps) for gaps in ({}, {"after": 3}))
    assert np.array_equal(whole[:3], broken[:3])
    assert noise.coefficients is not None
    c = np.array(noise.coefficients) / np.linalg.norm(noise.coefficients)
    blocks = np.zeros((6, 6))
    blocks[:3, :3] = blocks[3:, 3:] = np.linalg.inv(matrix(c, 3))
    fresh = matrix(c, 6) @ whole
    np.testing.assert_allclose(broken, blocks @ fresh, atol=1e-10)


def test_other_parameters_than_before_break_the_chain_and_an_interrupt_too() -> None:
    noise, source = Banded(3, "sqrt").for_steps(6), Seeded(0)
    state = noise.start()

    def add(sequence: int, size: int) -> Tensor:
        total = [torch.zeros(size, dtype=torch.float64)]
        noise.add(source, Receipt(sequence, GaussianDpEvent(1.0)), total, 1.0, state)
        return total[0]

    add(1, 4)
    add(2, 4)
    assert len(state.noises) == 2
    add(3, 5)
    assert len(state.noises) == 1

    class Interrupting(Seeded):
        def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noise.add(Interrupting(1), Receipt(4, GaussianDpEvent(1.0)), [torch.zeros(5).double()], 1.0, state)
    assert state.noises == []


def test_at_most_one_buffer_less_than_bands_is_kept_and_nothing_of_it_is_saved(tmp_path: Path) -> None:
    with private(small(), run=tmp_path / "run") as run:
        for _ in run.steps():
            assert len(run.bench.states.noise.noises) <= BANDS - 1
        run.save()
        assert len(run.bench.states.noise.noises) == BANDS - 1
        assert run.state_dict()["released"] == {}


# -- who joins, and the price -----------------------------------------------------------------------------------------


def draw_all(recipe: Recipe, records: int, steps: int, seed: int) -> list[list[int]]:
    sampler, source, drawn = recipe.sampler, Seeded(seed), []
    assert isinstance(sampler, Cyclic)
    state = sampler.start()

    class Bench:
        states = type("States", (), {"sampler": state})

    for step in range(steps):
        sampler.prepare(Bench(), step)  # type: ignore[arg-type]
        drawn.append(sampler.draw(records, source, state).indices.tolist())
    return drawn


def test_a_record_joins_at_most_every_bandth_draw_and_as_often_as_is_charged() -> None:
    steps, recipe = 400, small(steps=400)
    drawn = draw_all(recipe, 64, steps, seed=3)
    turns: dict[int, list[int]] = {}
    for step, indices in enumerate(drawn):
        for index in indices:
            turns.setdefault(index, []).append(step)
    assert set(turns) == set(range(64))
    for taken in turns.values():
        assert {step % BANDS for step in taken} == {taken[0] % BANDS}
        assert all(later - earlier >= BANDS for earlier, later in pairwise(taken))
    share = np.mean([len(taken) for taken in turns.values()]) / (steps / BANDS)
    assert share == pytest.approx(BANDS * 8 / 64, abs=0.03)
    assert np.mean([len(indices) for indices in drawn]) == pytest.approx(8, abs=0.8)


def test_a_run_costs_one_draw_of_its_group_for_each_cycle() -> None:
    recipe = small()
    turn = PoissonSampledDpEvent(BANDS * 8 / 64, GaussianDpEvent(1.3))
    plan = [event for event, count in recipe.plan() for _ in range(count)]
    assert [event for event in plan if not isinstance(event, PaidByEpoch)] == [turn] * math.ceil(STEPS / BANDS)
    assert plan[::BANDS] == [turn] * 3
    plain = recipes.dpsgd(batch_size=32, steps=3, noise_multiplier=1.3).for_records(64)
    assert recipe.price(1e-5) == pytest.approx(plain.price(1e-5), rel=1e-12)
    with private(recipe) as run:
        list(run.steps())
        assert [event for _, event, *_ in run.run.ledger.history()] == plan
        assert run.guarantee(1e-5).epsilon == pytest.approx(recipe.price(1e-5))


def test_a_cycle_is_charged_at_the_least_noise_of_its_turns() -> None:
    recipe = replace(small(), noise_schedule=GrowingMu(3.0))
    noises = [recipe.terms(step).noise_multiplier for step in range(STEPS)]
    charged = [event for event, _ in recipe.plan() if not isinstance(event, PaidByEpoch)]
    least = [min(noises[start : start + BANDS]) for start in range(0, STEPS, BANDS)]
    assert [event.event.noise_multiplier for event in charged] == pytest.approx(least)


def test_calibration_hits_its_budget() -> None:
    budget = Budget(epsilon=2, delta=1e-5)
    recipe = recipes.banded(bands=4, batch_size=16, epochs=4).calibrate(budget, records=640)
    assert 1.99 < recipe.price(1e-5) <= 2
    assert isinstance(recipe.noise, Banded)
    assert recipe.noise.coefficients is not None
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    longest = recipes.banded(bands=4, batch_size=16, noise_multiplier=2.0).calibrate(budget, records=640)
    assert longest.steps is not None
    assert longest.steps % 4 == 0
    assert isinstance(longest.noise, Banded)
    assert longest.noise.coefficients is not None


def test_one_band_is_dp_sgd_bit_for_bit() -> None:
    trained = []
    for recipe in (small(bands=1), calibrated(batch_size=8, steps=STEPS, noise_multiplier=1.3)):
        with private(recipe, seed=5) as run:
            list(run.steps())
            events = [event for _, event, *_ in run.run.ledger.history()]
            trained.append(([p.tolist() for p in run.bench.parameters()], events))
    assert trained[0] == trained[1]


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_opens_a_cycle_with_fresh_groups_and_noise_and_is_charged_for_it(tmp_path: Path) -> None:
    turn = PoissonSampledDpEvent(BANDS * 8 / 64, GaussianDpEvent(1.3))
    with private(small(), run=tmp_path / "run") as first:
        for step in first.steps():
            if step.number == 6:
                break
        first.save()
        groups = first.bench.states.sampler.groups
    with private(small()) as second:
        second.load(tmp_path / "run")
        assert second.bench.states.noise.noises == []
        assert second.bench.states.sampler.groups is None
        list(second.steps())
        assert second.position == STEPS
        charged = [event == turn for _, event, *_ in second.run.ledger.history()]
        assert not torch.equal(second.bench.states.sampler.groups, groups)
    assert charged == [n % BANDS == 0 for n in range(6)] + [n % BANDS == 0 for n in range(STEPS - 6)]


def test_a_resumed_run_within_a_budget_ends_where_the_budget_does(tmp_path: Path) -> None:
    recipe = recipes.banded(bands=4, batch_size=8, steps=12).calibrate(Budget(epsilon=3, delta=1e-5), records=64)
    for stop, reached in ((4, 12), (5, 9)):
        folder = tmp_path / str(stop)
        with private(recipe, run=folder) as first:
            for step in first.steps():
                if step.number == stop:
                    break
            first.save()
        with private(recipe) as second:
            second.load(folder)
            list(second.steps())
            assert second.position == reached
            assert second.guarantee().epsilon <= 3


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampler": Poisson(0.1)}, "a record must join at most every b-th draw"),
        ({"sampler": Cyclic(3)}, "as many bands as the noise has"),
        ({"sampler": None}, "a record must join at most every b-th draw"),
        ({"selection": recipes.dpsur().selection}, "no proven price|no proof with banded noise"),
        ({"norms": recipes.jl(projections=24).norms}, "no proof with projected norms"),
    ],
)
def test_parts_without_a_proof_beside_it_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        replace(small(), **change)


def test_bad_settings_are_refused_in_one_line() -> None:
    budget = Budget(epsilon=2, delta=1e-5)
    with pytest.raises(InvalidInput, match=r"bands=16 times batch_size=8 must be <= records=64: .* at most 8 bands"):
        recipes.banded(bands=16, batch_size=8, steps=4).calibrate(budget, records=64)
    for wrong, said in (
        ({"bands": 0}, "bands=0 must be >= 1"),
        ({"strategy": "best"}, "strategy='best' must be one of"),
        ({"sampler": Poisson(0.5)}, "needs its own cyclic draws"),
    ):
        with pytest.raises(InvalidInput, match=said):
            recipes.banded(**wrong)
    with pytest.raises(InvalidInput, match=r"momentum=1.0 must lie in \[0, 1\)"):
        Banded(2, momentum=1.0)
    with pytest.raises(InvalidInput, match="coefficients="):
        Banded(2, coefficients=(0.0, 1.0))
    with pytest.raises(InvalidInput, match="has no coefficients yet"):
        Banded(2).add(Seeded(0), Receipt(1, GaussianDpEvent(1.0)), [torch.zeros(1).double()], 1.0, Banded(2).start())
    small().require("federated")


# -- against attacks --------------------------------------------------------------------------------------------------


class Swapping(Settling):
    """Lets out what another run let out, and remembers which value that stood for."""

    def __init__(self, others: list[Tensor] | None = None) -> None:
        self._source, self._others = Seeded(0), others
        self.values: list[Tensor] = []
        self.released: list[Tensor] = []

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return self._source.gaussian(receipt, size, std)

    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        self.values.append(value.clone())
        self.released.append(released.clone() if self._others is None else self._others[len(self.values) - 1])
        return self.released[-1]


def run_noise(recipe: Recipe, sums: list[Tensor], others: list[Tensor] | None = None) -> Swapping:
    source, state = Swapping(others), recipe.noise.start()
    for step, total in enumerate(sums):
        receipt, std = Receipt(step + 1, GaussianDpEvent(1.0)), recipe.terms(step).noise_std
        recipe.noise.add(source, receipt, [total.clone()], std, state)  # type: ignore[arg-type]
    return source


@pytest.mark.parametrize("group", range(3))
@pytest.mark.parametrize("schedules", [{}, {"noise_schedule": GrowingMu(2.0), "clip_schedule": SensitivityDecay(2.0)}])
def test_a_turn_of_a_record_is_one_gaussian_whatever_its_group(group: int, schedules: dict[str, Any]) -> None:
    """With the same releases, a record moves the rows up to its next turn by Σ (Δ/σ)² = 1/m², and no others."""
    steps, bands = 8, 3
    recipe = replace(small(bands, steps), **schedules)
    without = [torch.full((3,), 0.5, dtype=torch.float64) for _ in range(steps)]
    present = [total.clone() for total in without]
    for step in range(group, steps, bands):
        present[step][step % 2] += recipe.terms(step).clip
    first = run_noise(recipe, without)
    second = run_noise(recipe, present, first.released)
    stds = [recipe.terms(step).noise_std for step in range(steps)]
    moved = [float((b - a).norm()) / std for a, b, std in zip(first.values, second.values, stds, strict=True)]
    assert moved[:group] == [0.0] * group
    for start in range(group, steps, bands):
        block = math.hypot(*moved[start : start + bands]) * recipe.terms(start).noise_multiplier
        assert block == pytest.approx(1.0, rel=1e-9) if start + bands <= steps else block < 1


def test_a_record_that_joins_too_early_moves_its_rows_by_more_than_is_paid() -> None:
    recipe = small(3, 8)
    without = [torch.zeros(2, dtype=torch.float64) for _ in range(8)]
    present = [total.clone() for total in without]
    for step in (0, 2):
        present[step][0] += recipe.clip
    first = run_noise(recipe, without)
    second = run_noise(recipe, present, first.released)
    moved = [float((b - a).norm()) / recipe.clip for a, b in zip(first.values, second.values, strict=True)]
    assert math.hypot(*moved) > 1.1 * math.sqrt(2)  # two turns are paid for


def test_attacks_find_no_more_than_is_charged_and_twice_as_many_turns_are_found() -> None:
    recipe = recipes.banded(bands=2, batch_size=4, steps=4, noise_multiplier=1.0)
    alone = (Instance("all records", lanes=128),)
    assert audit_recipe(recipe, trials=600, instances=alone, seed=1).passed

    class Impatient(Cyclic):
        """Everybody joins every draw; charged is one turn in a cycle."""

        def draw(self, records: int, source: Source, state: Any) -> Draw:
            state.drawn = True
            return Draw(torch.arange(records))

    broken = replace(recipe, sampler=Impatient(2), noise=Independent())
    with pytest.raises(AuditFailed):
        audit_recipe(broken, trials=600, instances=alone, seed=1)
