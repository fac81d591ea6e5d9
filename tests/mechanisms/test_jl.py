"""DP-SGD-JL as a whole: training, calibration, what is refused, and an attack that few projections do not survive."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import PoissonSampledDpEvent
from scipy import stats
from torch import Tensor, nn

from sordino import Budget, Recipe
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.errors import InvalidInput
from sordino.gradients import Objective
from sordino.mechanisms.dpis import Importance
from sordino.mechanisms.dpsur import Selective
from sordino.mechanisms.dynamic import GrowingMu, Levels
from sordino.mechanisms.jl import CHOICES, ProjectedNorms, jl
from sordino.noise import Seeded
from sordino.parts import Automatic, Draw, Exact, Flat, Foreign, Norms
from tests.helpers import batch_of, classification, private

BUDGET = Budget(epsilon=3.0, delta=1e-5)


def calibrate(recipe: Recipe, budget: Budget = BUDGET, records: int = 2000) -> Recipe:
    assert isinstance(recipe.norms, ProjectedNorms)
    return recipe.norms.calibrate(recipe.for_records(records), budget)


def spent(recipe: Recipe, budget: Budget = BUDGET) -> float:
    return recipe.price(budget.delta)


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_charges_projected_events_and_learns(optimizer: str) -> None:
    recipe = jl(optimizer=optimizer, projections=24, lr=0.1, batch_size=32, steps=40, noise_multiplier=0.3)
    x, y = classification(records=200)
    with private(recipe.for_records(200), dataset=(x, y), lr=0.5) as run:
        model = run.bench.objective.model
        before = nn.functional.cross_entropy(model(x), y).item()
        list(run.steps())
        after = nn.functional.cross_entropy(model(x), y).item()
        events = run.bench.ledger.events()
    assert after < 0.8 * before
    assert events == [(PoissonSampledDpEvent(0.16, ProjectedGaussian(0.3, 24)), 40)]


def test_projections_are_fresh_at_every_draw_and_the_seed_repeats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def watch(self: Flat, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        seen.append(norms)
        return torch.zeros_like(norms)  # the model stays the same but for the noise

    monkeypatch.setattr(Flat, "weights", watch)
    for seed in (1, 1, 2):
        recipe = jl(projections=2, batch_size=64, steps=3, noise_multiplier=1e-9).for_records(64)
        with private(recipe, seed=seed) as run:
            list(run.steps())
    first, second, third = seen[:3]
    assert (first / second - 1).abs().max() > 0.01
    assert (second / third - 1).abs().max() > 0.01
    torch.testing.assert_close(seen[5], third)
    assert (seen[8] / third - 1).abs().max() > 0.01


def test_the_recipe_survives_toml() -> None:
    for recipe in (jl(epochs=2), jl(optimizer="adam", projections=24, epochs=2)):
        assert Recipe.from_toml(recipe.to_toml()) == recipe


# -- calibration ----------------------------------------------------------------------------------------------------


def test_the_smallest_noise_for_given_projections() -> None:
    recipe = calibrate(jl(projections=40, batch_size=100, epochs=3))
    assert 0.998 * BUDGET.epsilon <= spent(recipe) <= BUDGET.epsilon
    less = replace(recipe, noise_multiplier=0.99 * recipe.noise_multiplier)
    assert spent(less) > BUDGET.epsilon


def test_auto_takes_the_fewest_projections_near_exact_noise() -> None:
    recipe = jl(batch_size=100, epochs=3)
    found = calibrate(recipe)
    exact = calibrate_exactly(recipe)
    number = found.norms.projections
    assert number in CHOICES
    assert spent(found) <= BUDGET.epsilon
    assert exact < found.noise_multiplier <= 1.05 * exact * 1.001
    fewer = ProjectedNorms(CHOICES[CHOICES.index(number) - 1])
    assert spent(replace(found, norms=fewer, noise_multiplier=1.05 * exact)) > BUDGET.epsilon


def test_a_looser_factor_takes_fewer_projections() -> None:
    recipe = jl(batch_size=100, epochs=3)
    loose = calibrate(replace(recipe, norms=ProjectedNorms("auto", factor=1.3)))
    assert loose.norms.projections < calibrate(recipe).norms.projections


def test_a_factor_out_of_reach_is_refused() -> None:
    with pytest.raises(InvalidInput, match="out of reach"):
        calibrate(replace(jl(batch_size=100, epochs=3), norms=ProjectedNorms("auto", factor=1.0001)))


@pytest.mark.slow
def test_where_no_noise_is_enough_the_error_says_which_projections_would_be() -> None:
    with pytest.raises(InvalidInput, match=r"projections=1 cannot meet .* projections=\d+ do with noise_multiplier"):
        calibrate(jl(projections=1, batch_size=100, epochs=1000), Budget(epsilon=0.5, delta=1e-8))


def test_auto_without_calibration_is_refused() -> None:
    with pytest.raises(InvalidInput, match="settled while the noise is calibrated"):
        jl(noise_multiplier=1.0, steps=3, batch_size=10).for_records(100).plan()


def test_schedules_combine_as_staircases() -> None:
    recipe = replace(jl(projections=64, batch_size=100, epochs=4), noise_schedule=Levels(GrowingMu(2.0), 3))
    found = calibrate(recipe)
    assert len(found.plan()) == 3
    assert 0.998 * BUDGET.epsilon <= spent(found) <= BUDGET.epsilon
    smooth = replace(recipe, noise_schedule=GrowingMu(2.0))
    with pytest.raises(InvalidInput, match="Levels"):
        calibrate(smooth)


def calibrate_exactly(recipe: Recipe) -> float:
    found = replace(recipe, norms=Exact()).calibrate(BUDGET, records=2000).noise_multiplier
    assert found is not None
    return found


# -- what has no proof ----------------------------------------------------------------------------------------------


class ByNorm(Flat):
    """Stands for importance weights: any weighing that is not known may divide by more than the norm."""


def test_parts_without_a_proof_are_refused() -> None:
    recipe = jl(projections=24)
    fine: list[dict[str, Any]] = [{}, {"weighing": Automatic()}, {"sampler": Foreign()}]
    for change in fine:
        replace(recipe, **change)
    with pytest.raises(InvalidInput, match="selection"):
        replace(recipe, selection=Selective())
    with pytest.raises(InvalidInput, match="weighing"):
        replace(recipe, weighing=ByNorm())
    with pytest.raises(InvalidInput, match="sampler"):
        replace(recipe, sampler=Importance())


@pytest.mark.parametrize("projections", [0, -3, "many"])
def test_numbers_of_projections_that_make_no_sense(projections: Any) -> None:
    with pytest.raises(InvalidInput, match="projections"):
        jl(projections=projections)


# -- the audit ------------------------------------------------------------------------------------------------------

RATE, STEPS, NOISE = 256 / 60_000, 1172, 1.3
FALSE_ALARMS = 8e-13
PAPERS_EPSILON = 2.4
"""What the paper prints for one projection, MNIST, five epochs."""


def detections(norms: Norms, runs: int) -> int:
    """In how many runs some release lies further along a record's gradient of length 20 C than noise ever does.

    Steps that do not draw the record release noise alone and pass the threshold with probability FALSE_ALARMS in all.
    """
    model = nn.Linear(10, 1, bias=False)
    objective = Objective(model, lambda m, batch: m(batch[0]).squeeze(1))
    record = batch_of(20 * torch.eye(10)[:1], torch.zeros(1))
    engine = norms.engine("jvp" if isinstance(norms, ProjectedNorms) else "auto", Seeded(5))
    coins = np.random.default_rng(5)
    threshold = NOISE * stats.norm.isf(FALSE_ALARMS / STEPS)

    def released() -> float:
        norms.prepare(engine)
        found = engine.differentiate(objective, list(model.parameters()), record)
        (total,) = found.weighted_sum(Flat().weights(found.norms, 1.0, Draw(torch.tensor([0]))))
        return float(total[0, 0]) + NOISE * coins.standard_normal()

    def is_caught() -> bool:
        return any(released() > threshold for _ in range(coins.binomial(STEPS, RATE)))

    return sum(is_caught() for _ in range(runs))


def certified(caught: int, runs: int) -> float:
    """ε that any (ε, 1e-5) guarantee must exceed, with confidence 99.9 % (Clopper & Pearson for the detections)."""
    if caught == 0:
        return 0.0
    at_least = stats.beta.ppf(0.001, caught, runs - caught + 1)
    return max(0.0, math.log(max(at_least - 1e-5, FALSE_ALARMS) / FALSE_ALARMS))


def printed(norms: Norms) -> float:
    recipe = replace(jl(projections=1, batch_size=256, noise_multiplier=NOISE, steps=STEPS), norms=norms)
    return recipe.for_records(60_000).price(1e-5)


def test_one_projection_leaks_far_more_than_the_paper_prints_and_we_say_so() -> None:
    bound = certified(detections(ProjectedNorms(1), runs=150), 150)
    assert bound > 10 * PAPERS_EPSILON
    assert printed(ProjectedNorms(1)) > bound


@pytest.mark.parametrize("norms", [ProjectedNorms(24), Exact()], ids=["24 projections", "exact"])
def test_the_same_attack_finds_nothing_where_the_price_is_small(norms: Norms) -> None:
    assert certified(detections(norms, runs=30), 30) == 0.0
    assert printed(norms) < 1
