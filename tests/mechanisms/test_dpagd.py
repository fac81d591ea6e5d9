"""Step lengths by report-noisy-minimum: its privacy, its price and its choices (DPAGD)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy import stats
from torch import nn

from sordino import Budget, InvalidInput, Private, Recipe, recipes
from sordino.accounting import pricing
from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.mechanisms.dpagd import StepLength
from tests.helpers import classification, cross_entropy, mlp, private

DELTA = 1e-5


def dpagd(records: int = 64, **changes: Any) -> Recipe:
    options: dict[str, Any] = {"batch_size": 16, "steps": 6, "noise_multiplier": 1.0, "validation_size": 16, **changes}
    return recipes.dpagd(**options).for_records(records)


def length(run: Private) -> float:
    return float(nn.utils.parameters_to_vector(run.bench.objective.model.parameters()).detach().double().norm())


# -- privacy of one choice


def frequencies(selection: StepLength, totals: list[float], seed: int, tries: int = 400_000) -> np.ndarray:
    normals = np.random.default_rng(seed).standard_normal((2, tries, len(totals)))
    chosen = selection.choose(np.broadcast_to(np.array(totals), (tries, len(totals))), normals)
    return np.bincount(chosen, minlength=len(totals))


def worst_ratio(selection: StepLength, moved: list[float]) -> float:
    """The largest certified log-ratio of a choice's probabilities, over neighbours whose totals differ by `moved`."""
    totals, tries, best = [0.0, 1.0, 2.0], 400_000, 0.0
    one = frequencies(selection, totals, 1)
    two = frequencies(selection, [t + m for t, m in zip(totals, moved, strict=True)], 2)
    for a, b in ((one, two), (two, one)):
        for x, y in zip(a, b, strict=True):
            least, most = stats.beta.ppf(5e-4, max(x, 1), tries - x + 1), stats.beta.ppf(1 - 5e-4, y + 1, tries - y)
            best = max(best, math.log(least / most))
    return best


@pytest.mark.parametrize("moved", [[3.0, 0.0, 0.0], [0.0, 3.0, 3.0], [3.0, 0.0, 3.0], [0.0, 0.0, 3.0]])
def test_a_choice_changes_by_at_most_epsilon(moved: list[float]) -> None:
    selection = StepLength(epsilon=1.0, loss_clip=3.0, candidates=3)
    assert worst_ratio(selection, moved) <= 1.0


def test_the_comparison_has_power_and_notices_sums_that_move_too_far() -> None:
    selection = StepLength(epsilon=1.0, loss_clip=3.0, candidates=3)
    assert worst_ratio(selection, [0.0, 3.0, 3.0]) > 0.8
    assert worst_ratio(selection, [0.0, 6.0, 6.0]) > 1.0


def test_the_noise_is_exponential() -> None:
    normals = np.random.default_rng(3).standard_normal((2, 100_000))
    assert stats.kstest((normals**2).sum(axis=0) / 2, "expon").pvalue > 1e-3


# -- its price


def test_a_choice_composes_as_randomized_response() -> None:
    choice = NoisyMinimum(0.1)
    assert pricing.epsilon([(choice, 1)], 1e-12) == pytest.approx(0.1, abs=2e-4)
    assert pricing.epsilon([(choice, 400)], DELTA) < 40
    rho = 400 * 0.1**2 / 2
    assert pricing.epsilon([(choice, 400)], DELTA) < rho + 2 * math.sqrt(rho * math.log(1 / DELTA))


def test_a_draw_amplifies_a_choice() -> None:
    drawn = PoissonSampledDpEvent(0.01, NoisyMinimum(1.0))
    assert pricing.epsilon([(drawn, 1)], 1e-12) == pytest.approx(math.log(1 + 0.01 * (math.e - 1)), abs=2e-4)


@pytest.mark.parametrize("event", [NoisyMinimum(0.3), PoissonSampledDpEvent(0.1, NoisyMinimum(1.0))])
def test_both_accountants_agree_roughly_and_renyi_is_the_larger(event: Any) -> None:
    tight, loose = (pricing.epsilon([(event, 300)], DELTA, accountant=name) for name in ("pld", "rdp"))
    assert tight <= loose <= 1.3 * tight


def test_replacing_a_record_has_no_price() -> None:
    with pytest.raises(InvalidInput, match="add-or-remove-one"):
        pricing.epsilon([(NoisyMinimum(0.3), 1)], DELTA, adjacency="replace-one")


def test_an_attempt_costs_its_gradient_and_its_choice() -> None:
    run = private(dpagd())
    assert sum(1 for _ in run.steps()) == 6
    parts = [
        (PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0)), 6),
        (PoissonSampledDpEvent(0.25, NoisyMinimum(0.1)), 6),
    ]
    assert run.guarantee(DELTA).epsilon == pytest.approx(pricing.epsilon(parts, DELTA))
    assert run.guarantee().basis == "proven"


def test_a_budget_calibrates_it() -> None:
    recipe = recipes.dpagd(batch_size=16, steps=5, validation_size=16).calibrate(
        Budget(epsilon=3, delta=DELTA), records=64
    )
    assert 2.99 < recipe.price(DELTA) <= 3


# -- what it does


def test_without_noise_the_best_length_is_taken() -> None:
    """With hardly any noise the chosen point has the smallest loss of all candidates on the line."""
    recipe = dpagd(noise_multiplier=1e-3, choice_epsilon=1e9, validation_size=64, batch_size=64, steps=4)
    run, data = private(recipe), classification()
    for _ in run.steps():
        pass
    chosen = run.bench.states.selection.chosen
    assert chosen
    assert set(np.round(np.array(chosen) / 0.1, 6) % 1) <= {0.0}, "21 candidates between 0 and 2"
    with torch.no_grad():
        assert cross_entropy(run.bench.objective.model, data).mean() < cross_entropy(mlp(), data).mean()


def test_where_no_step_helps_the_model_stays_and_gradients_add_up() -> None:
    def worst(model: nn.Module, batch: Any) -> torch.Tensor:
        """Any move away from the start is bad, though the gradient says otherwise."""
        weight = model.weight.squeeze()
        return 100 * weight.abs() - 1e-3 * weight + 0 * batch.squeeze(1)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    recipe = dpagd(8, batch_size=8, validation_size=8, choice_epsilon=1e9, steps=3)
    run = private(recipe, model=model, dataset=torch.ones(8, 1), loss=worst, validate=False, engine="loop")
    for count in (1, 2, 3):
        run.step()
        assert model.weight.item() == 0
        assert run.bench.states.selection.averaged == count


def test_a_step_has_the_chosen_length() -> None:
    recipe = dpagd(choice_epsilon=1e-6, steps=20, longest=1.0, candidates=2)
    model = nn.Linear(6, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    run, moves = private(recipe, model=model), []
    for _ in run.steps():
        moves.append(length(run))
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    assert {0.0, 1.0} == {round(move, 4) for move in moves}, "a choice of pure noise takes either"


def test_the_longest_step_follows_the_last_ten() -> None:
    selection = StepLength(longest=2.0)
    run = private(dpagd())
    attempt: Any = type("Attempt", (), {"bench": run.bench})
    chosen = run.bench.states.selection.chosen
    chosen += [0.5] * 9
    assert selection._longest(attempt) == 2.0
    chosen += [0.6]
    assert selection._longest(attempt) == pytest.approx(0.66)
    chosen += [0.1] * 10
    assert selection._longest(attempt) == pytest.approx(0.11)


def test_recipes_survive_toml() -> None:
    assert Recipe.from_toml(dpagd().to_toml()) == dpagd()


@pytest.mark.parametrize(
    "changes",
    [{"choice_epsilon": 0.0}, {"loss_clip": 0.0}, {"longest": -1.0}, {"candidates": 1}, {"validation_size": 65}],
)
def test_impossible_choices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        dpagd(**changes).terms(0)
