"""Random allocation: the draws, what the ledger says, and attacks on it. The price is tested with its event."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from sordino import Budget, InvalidInput, Recipe, mechanisms, recipes
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.accounting.random_allocation import RandomAllocation
from sordino.audit import AuditFailed, Instance, audit_recipe
from sordino.mechanisms.allocation import Allocated
from sordino.mechanisms.dynamic import ExponentialDecay
from sordino.mechanisms.shuffled import Shuffled
from sordino.noise import Seeded
from sordino.parts import Draw
from tests.helpers import classification, private

BUDGET = Budget(epsilon=3, delta=1e-5)


def small(**changes: Any) -> Recipe:
    return recipes.allocation(**{"batch_size": 16, "steps": 8, "noise_multiplier": 1.0, **changes}).for_records(64)


def test_a_run_deals_every_record_once_an_epoch_and_charges_epochs() -> None:
    run = private(small(), dataset=classification(64))
    sampler, bench = run.bench.recipe.sampler, run.bench
    assert isinstance(sampler, Allocated)
    dealt = []
    for step in range(8):
        sampler.prepare(bench, step)
        dealt.append(sampler.draw(64, Seeded(step), bench.states.sampler).indices.tolist())
    for epoch in (dealt[:4], dealt[4:]):
        assert sorted(itertools.chain(*epoch)) == list(range(64))
    assert dealt[:4] != dealt[4:]

    run = private(small(), dataset=classification(64))
    for _ in run.steps():
        pass
    assert run.bench.ledger.events() == [(RandomAllocation(1.0, 4), 2), (PaidByEpoch(1.0), 6)]
    kinds = [type(event) for _, event, *_ in run.bench.ledger.history()]
    assert kinds == 2 * [RandomAllocation, *[PaidByEpoch] * 3]
    assert run.guarantee(1e-5).epsilon == pytest.approx(small().price(1e-5))


def test_the_same_draws_cost_less_when_the_step_is_secret() -> None:
    open_steps = replace(small(), sampler=Shuffled(4))
    assert small().price(1e-5) < 0.9 * open_steps.price(1e-5)
    poisson = recipes.dpsgd(batch_size=16, steps=8, noise_multiplier=1.0).for_records(64)
    assert small().price(1e-5) < poisson.price(1e-5)


def test_noise_is_calibrated_and_the_least_of_an_epoch_prices_it() -> None:
    ready = recipes.allocation(batch_size=16, epochs=3).calibrate(BUDGET, records=64)
    assert 0.998 * 3 < ready.price(1e-5) <= 3
    assert Recipe.from_toml(ready.to_toml()) == ready
    falling = replace(small(), noise_schedule=ExponentialDecay(0.1))
    sigmas = [falling.terms(step).noise_multiplier for step in range(8)]
    paid = [event.noise_multiplier for event, _ in falling.plan() if isinstance(event, RandomAllocation)]
    assert paid == [min(sigmas[:4]), min(sigmas[4:])]


def test_what_is_not_proven_with_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is a way to sample"):
        recipes.allocation(sampler=Shuffled())
    others = (recipes.jl(projections=24), recipes.dpsur(), recipes.banded(bands=2))
    for slot, other in zip(("norms", "selection", "noise"), others, strict=True):
        with pytest.raises(InvalidInput, match="no proof with"):
            replace(recipes.allocation(), **{slot: getattr(other, slot)})


class EveryStep(Allocated):
    """A record is in every step of an epoch."""

    def draw(self, records: int, source: Any, state: Any) -> Draw:
        super().draw(records, source, state)
        return Draw(state.dealt.order)


def test_an_attack_finds_what_was_not_paid_for() -> None:
    recipe = recipes.allocation(batch_size=16, steps=8, noise_multiplier=0.5)
    options: dict[str, Any] = {
        "trials": 400,
        "instances": (Instance("a quarter of them", lanes=128, rate=0.25),),
        "seed": 1,
    }
    assert audit_recipe(recipe, **options).passed
    with pytest.raises(AuditFailed):
        audit_recipe(replace(recipe, sampler=EveryStep()), **options)


def test_it_is_one_of_the_mechanisms() -> None:
    assert mechanisms.find("allocation").sentence.startswith("random allocation: every record is in one step")
