"""Every recipe of the library meets the same attackers; every sabotaged twin is caught, by the detector that is named.

"attack" is the empirical audit: error rates that the claimed curve does not allow, at 99.9 % confidence. "books" is the
witness at the noise source, which compares what was drawn with what the ledger says. "probe" is the validation of model
and loss before anything is spent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from sordino import Budget, Private, Recipe, UnsupportedModel, recipes
from sordino.audit.auditing import Audit, AuditFailed, audit_recipe
from sordino.audit.conformance import build_examples
from sordino.audit.instances import LOUD, Instance, choose_instances
from sordino.mechanisms.dynamic import GrowingMu
from sordino.noise import Seeded, Source
from tests.audit import sabotage
from tests.helpers import calibrated, classification, cross_entropy

COMMON: dict[str, Any] = {"batch_size": 4, "steps": 4}
ALL = Instance("all records", lanes=128)
SAMPLED = Instance("sampled records", lanes=256, rate=0.5)
CROWD = Instance("against a crowd", lanes=1, crowd=3, pull=2.0, canary=-LOUD, steps=1)
NOT_A_NUMBER = Instance("not a number", lanes=1, crowd=6, pull=2.0, canary=float("nan"), steps=1, trials=100)
ALONE = Instance("alone", lanes=1, crowd=1, steps=1)
SEVERAL = Instance("several attempts", lanes=1, crowd=1, steps=6)

PUBLIC = torch.ones(2, 1)


DRAWN_BY_NORM = Instance("drawn by norm", lanes=1, crowd=63, pull=1.0, aside=True, rate=0.125, steps=4, trials=80)


@cache
def dpis() -> Recipe:
    """Calibrated, because DPIS chooses its noise as it goes."""
    return recipes.dpis(momentum=0.0, **COMMON).calibrate(Budget(epsilon=12.0, delta=1e-5), records=64)


@dataclass(frozen=True)
class Case:
    """A recipe, the noise at which it is attacked, and by which instances."""

    recipe: Recipe
    noise: float | None = 1.0
    instances: tuple[Instance, ...] = (ALL, SAMPLED, CROWD, NOT_A_NUMBER)
    source: Callable[[int], Source] = Seeded
    arrange: Callable[[Private], None] | None = None
    trials: int = 1000
    single_trials: int = 150

    def audit(self, seed: int = 1) -> Audit:
        return audit_recipe(
            self.recipe,
            noise_multiplier=self.noise,
            instances=self.instances,
            trials=self.trials,
            single_trials=self.single_trials,
            seed=seed,
            source=self.source,
            arrange=self.arrange,
            check=False,
        )


COUPLED = (ALONE, CROWD, NOT_A_NUMBER)
DPSUR = recipes.dpsur(validation_clip=1e-7, validation_noise=1.0, **COMMON)


def default(recipe: Recipe) -> Case:
    return Case(recipe) if choose_instances(recipe)[0].together else Case(recipe, instances=COUPLED)


HEALTHY: dict[str, Case] = {
    **{name: default(recipe) for name, recipe in build_examples().items()},
    "dpsgd with momentum": Case(recipes.dpsgd(momentum=0.9, **COMMON)),
    "jl": Case(recipes.jl(projections=24, **COMMON), instances=(ALL, CROWD)),
    "dynamic": Case(recipes.dynamic(mu_ratio=2.0, **COMMON)),
    "growing_mu": Case(recipes.growing_mu(ratio=2.0, **COMMON)),
    "noise_decay": Case(recipes.noise_decay(kind="step", batch_size=4, epochs=2)),
    "dpsur": Case(DPSUR, instances=COUPLED),
    "screening, public": Case(recipes.screening(public=PUBLIC, public_name="ones", **COMMON), instances=COUPLED),
    "screening": Case(recipes.screening(validation_noise=1.0, temperature=1e6, **COMMON), instances=COUPLED),
    "dpagd": Case(recipes.dpagd(choice_epsilon=0.5, candidates=5, **COMMON), instances=COUPLED),
    "dpis": Case(dpis(), noise=None, instances=(DRAWN_BY_NORM,)),
}


def sgd(**changes: Any) -> Recipe:
    return replace(recipes.dpsgd(**COMMON), **changes)


# name: (the sabotage, which detector catches it, the healthy recipe beside it)
BROKEN: dict[str, tuple[Case, str, str]] = {
    "noise halved": (Case(sgd(), instances=(ALL,), source=sabotage.Halved), "attack", "dpsgd"),
    "noise reused across steps": (Case(sgd(), instances=(SAMPLED,), source=sabotage.Repeated), "attack", "dpsgd"),
    "noise shared among microbatches": (
        Case(sgd(), instances=(ALL,), source=sabotage.SharedAmongParts),
        "attack",
        "dpsgd",
    ),
    "some coordinates without noise": (
        Case(sgd(), noise=4.0, instances=(ALL,), source=sabotage.SomeCoordinates),
        "attack",
        "dpsgd",
    ),
    "one-sided noise": (Case(sgd(), noise=2.0, instances=(ALL,), source=sabotage.OneSided), "attack", "dpsgd"),
    "clipping off": (Case(sgd(weighing=sabotage.Unclipped()), instances=(ALL,)), "attack", "dpsgd"),
    "twice the sensitivity": (Case(sgd(weighing=sabotage.TwiceTheBound()), instances=(ALL,)), "attack", "dpsgd"),
    "clipping by batch": (Case(sgd(weighing=sabotage.ByTheMean()), instances=(CROWD,)), "attack", "dpsgd"),
    "divisor is the realised batch": (
        Case(sgd(selection=sabotage.DividesByTheDraw()), noise=0.7, instances=(CROWD,), single_trials=700),
        "attack",
        "dpsgd",
    ),
    "a bad record silences all": (
        Case(sgd(weighing=sabotage.NothingFromABatchWithNaN()), instances=(NOT_A_NUMBER,)),
        "attack",
        "dpsgd",
    ),
    "a shuffled loader priced as Poisson": (
        Case(sgd(sampler=sabotage.Shuffled(0.5)), noise=0.3, instances=(replace(SAMPLED, steps=2),)),
        "attack",
        "dpsgd",
    ),
    "draws more than it says": (
        Case(sgd(sampler=sabotage.MoreThanItSays(0.25)), noise=0.5, instances=(replace(SAMPLED, rate=0.25),)),
        "attack",
        "dpsgd",
    ),
    "a schedule ledgered at its first noise": (
        Case(
            replace(recipes.growing_mu(ratio=8.0, **COMMON), norms=sabotage.LedgeredAtTheStart(2.0)),
            noise=2.0,
            instances=(ALL,),
        ),
        "attack",
        "growing_mu",
    ),
    "the same, in the books": (
        Case(sgd(noise_schedule=GrowingMu(1.2), norms=sabotage.LedgeredAtTheStart()), instances=(ALL,)),
        "books",
        "growing_mu",
    ),
    "JL with one projection priced as exact": (
        Case(
            replace(recipes.jl(projections=1, **COMMON), norms=sabotage.PricedAsExact(1)), noise=1.0, instances=(ALL,)
        ),
        "attack",
        "jl",
    ),
    "two answers on one draw priced apart": (
        Case(sgd(selection=sabotage.AnswersTwice()), instances=(SAMPLED,)),
        "books",
        "dpsgd",
    ),
    "every other charge forgotten": (Case(sgd(), instances=(ALL,), arrange=sabotage.forgetful), "books", "dpsgd"),
    "the ledger is written afterwards": (Case(sgd(), instances=(ALL,), arrange=sabotage.late), "books", "dpsgd"),
    "rejected attempts free": (
        Case(
            recipes.dpsur(validation_clip=1e-7, validation_noise=1.0, accounting="published", **COMMON),
            instances=(replace(SEVERAL, trials=30),),
        ),
        "books",
        "dpsur",
    ),
    "momentum keeps rejected gradients": (
        Case(
            replace(DPSUR, selection=sabotage.KeepsMomentum(test=DPSUR.selection.test)),
            instances=(replace(SEVERAL, trials=30),),
        ),
        "books",
        "dpsur",
    ),
    "DPIS without the cap on its bounds": (
        Case(
            replace(dpis(), sampler=sabotage.WithoutCap(**vars(dpis().sampler))),
            noise=None,
            instances=(DRAWN_BY_NORM,),
        ),
        "attack",
        "dpis",
    ),
}


LENGTHY = (
    "screening",
    "jl",
    "dpis",
    "dynamic",
    "growing_mu",
    "dpagd",
    "averaged",
    "kalman",
    "low_pass",
    "adam_bc",
    "sensitivity_decay",
    "noise_decay",
    "dpsgd with momentum",
    "automatic",
    "screening, public",
)
"""They are attacked in the slow tests; the suite has their conformance, and their sabotaged twins."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LENGTHY else ()) for name in HEALTHY]
)
def test_every_recipe_keeps_its_claim(name: str) -> None:
    audit = HEALTHY[name].audit()
    assert audit.passed, f"{audit} {audit.findings}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("DPIS without the cap") else ()) for name in BROKEN],
)
def test_every_sabotage_is_caught(name: str) -> None:
    case, detector, healthy = BROKEN[name]
    assert healthy in HEALTHY
    audit = case.audit()
    assert not audit.passed
    if detector == "attack":
        assert any(attack.refuted for attack in audit.measured), audit
        assert audit.strongest.epsilon_implied is None or audit.epsilon_lower > audit.epsilon_claimed
    else:
        assert audit.findings
    with pytest.raises(AuditFailed):
        audit.require_passed()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("screening", "dpis") else ()) for name in HEALTHY]
)
def test_half_the_noise_is_in_the_books_of_every_recipe(name: str) -> None:
    """Also where the attack has too little power to see it: proposals that are tested, and DPIS."""
    instances = tuple(replace(instance, trials=20) for instance in HEALTHY[name].instances[:1])
    audit = replace(
        HEALTHY[name], instances=instances, trials=20, single_trials=20, arrange=sabotage.asking_for_half
    ).audit()
    assert any("the ledger says noise multiplier" in finding for finding in audit.findings), audit


def test_batch_normalisation_left_in_is_caught_by_the_probe() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModel):
        Private(model, optimizer, classification(), cross_entropy, calibrated())
    healthy = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    Private(healthy, torch.optim.SGD(healthy.parameters(), lr=0.1), classification(), cross_entropy, calibrated())


def test_every_recipe_of_the_library_is_in_the_table() -> None:
    assert set(recipes.__all__) <= set(HEALTHY)


def test_sixteen_sabotages_at_least() -> None:
    assert len(BROKEN) >= 16
