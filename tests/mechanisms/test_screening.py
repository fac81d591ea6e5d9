"""Noise screening: the rule of acceptance, where the energy may come from, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy import stats
from torch import Tensor, nn

from sordino import InvalidInput, Private, Recipe, recipes
from sordino.accounting.erasure import AnnealedErasure, annealed_acceptance
from sordino.mechanisms.screening import Annealing
from tests.helpers import classification, cross_entropy, private

PUBLIC = classification(32, seed=5)
PROPOSAL = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))


def screening(records: int = 64, **changes: Any) -> Recipe:
    options: dict[str, Any] = {"batch_size": 16, "steps": 20, "noise_multiplier": 1.0, **changes}
    if not {"validation_noise", "validation_size"} & options.keys():
        options = {"public": PUBLIC, "public_name": "held out", **options}
    return recipes.screening(**options).for_records(records)


def weights(run: Private) -> Tensor:
    return nn.utils.parameters_to_vector(run.bench.objective.model.parameters()).detach().clone()


def energy(run: Private) -> float:
    with torch.no_grad():
        return float(cross_entropy(run.bench.objective.model, PUBLIC).double().mean())


@pytest.mark.parametrize(("gain", "temperature"), [(0.01, 50.0), (0.3, 10.0)])
def test_worse_proposals_pass_with_the_probability_of_equation_3(gain: float, temperature: float) -> None:
    tries = 100_000
    coins = np.random.default_rng(1).random(tries)
    passed = int(Annealing.passes(np.full(tries, gain), coins, temperature).sum())
    expected = float(np.exp(-gain * temperature))
    assert stats.binomtest(passed, tries, expected).pvalue > 1e-4
    assert stats.binomtest(passed, tries, float(np.exp(-1.1 * gain * temperature))).pvalue < 1e-4


def test_improvements_always_pass() -> None:
    assert Annealing.passes(np.array([-1e-9, -5.0, -1e9]), np.array([1.0, 1.0, 1.0]), 1e9).all()


def test_when_cold_only_improvements_pass_until_patience_ends() -> None:
    """At an immense Q0 every worse proposal is rejected, and the one after μ0 rejections is kept whatever it is."""
    patience, steps = 3, 60
    run = private(screening(temperature=1e12, patience=patience, steps=steps), lr=2.0)
    rejected, forced = 0, 0
    for _ in range(steps):
        before, now = weights(run), energy(run)
        run.step()
        if torch.equal(weights(run), before):
            rejected += 1
            assert rejected <= patience
        else:
            worse = energy(run) > now
            assert not worse or rejected == patience
            forced += worse
            rejected = 0
    assert forced > 0, "the test must have met a forced acceptance"


def test_on_public_energy_every_attempt_costs_its_proposal() -> None:
    run = private(screening())
    assert sum(1 for _ in run.steps()) == 20
    assert run.bench.ledger.events() == [(PROPOSAL, 20)]
    assert "public records (held out), which are not protected" in str(run.guarantee())


def test_on_private_energy_an_attempt_costs_an_annealed_erasure() -> None:
    recipe = screening(validation_size=16, validation_noise=1.3, validation_clip=0.1)
    run = private(recipe)
    assert sum(1 for _ in run.steps()) == 20
    assert run.bench.ledger.events() == [(AnnealedErasure(0.25, 1.0, 0.25, 1.3), 20)]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_private_energy_is_noised_before_it_decides(sign: float) -> None:
    """From a weight of 0 every move changes the loss beyond its clip; τ stays 1 where the memory is wiped."""
    steps = 300
    recipe = screening(8, batch_size=8, validation_size=8, validation_noise=1.0, validation_clip=0.1, steps=steps)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return sign * 1e6 * model(batch).abs().squeeze(1)

    model, accepted = nn.Linear(1, 1, bias=False), 0
    run = private(recipe, model=model, dataset=torch.ones(8, 1), loss=loss, validate=False, engine="loop")
    for _ in range(steps):
        nn.init.zeros_(model.weight)
        run.bench.states = recipe.start()
        run.step()
        accepted += int(model.weight.item() != 0)
    true, other = (annealed_acceptance(10.0 * 0.1, energy, 1.0) for energy in (sign, -sign))
    assert stats.binomtest(accepted, steps, true).pvalue > 1e-4
    assert stats.binomtest(accepted, steps, other).pvalue < 1e-4


@pytest.mark.parametrize("changes", [{}, {"validation_size": 16}])
def test_published_charges_accepted_updates_alone(changes: dict[str, Any]) -> None:
    run = private(screening(accounting="published", steps=12, temperature=1e6, **changes), lr=20.0)
    attempts = sum(1 for _ in run.steps())
    assert dict(run.bench.ledger.events())[PROPOSAL] == 12
    assert attempts > 12
    assert "CAUTION" in str(run.guarantee())


def test_private_energy_without_noise_is_for_published_alone() -> None:
    with pytest.raises(InvalidInput, match="without noise reveals"):
        screening(validation_size=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"patience": 0},
        {"public_name": None},
        {"public": PUBLIC, "public_name": "p", "validation_noise": 1.0},
        {"validation_noise": 0.0},
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        screening(**changes)


def test_published_screening_cannot_pass_for_proven() -> None:
    with pytest.raises(InvalidInput, match="must agree"):
        replace(screening(accounting="published"), basis="proven").terms(0)


def test_a_recipe_with_public_records_stays_in_code() -> None:
    with pytest.raises(InvalidInput, match="keep what uses your own in code"):
        screening().to_toml()
    private_energy = screening(validation_size=16, validation_noise=1.3)
    assert Recipe.from_toml(private_energy.to_toml()) == private_energy
