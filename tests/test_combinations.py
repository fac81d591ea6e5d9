"""What is proven together can be built, and what is not is refused with its reason; every rule is read here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest

from sordino import InvalidInput, Recipe, mechanisms, recipes
from sordino.combinations import SETTINGS, Needs
from sordino.parts import Always, Foreign, Poisson, Sampler

FACTS = {"processes": 2, "workers": 1, "name": "user"}


def rules() -> list[tuple[str, Needs]]:
    own = [
        (name, rule)
        for parts in mechanisms.find_parts().values()
        for name, part in parts.items()
        for rule in getattr(part, "needs", ())
    ]
    return own + [(setting, rule) for setting, needed in SETTINGS.items() for rule in needed]


@pytest.mark.parametrize(("owner", "rule"), rules(), ids=lambda value: value if isinstance(value, str) else value.slot)
def test_every_rule_is_about_a_slot_and_says_in_one_line_what_is_wrong(owner: str, rule: Needs) -> None:
    assert rule.slot in {field.name for field in fields(Recipe)}
    assert sum(map(bool, (rule.proven, rule.refused, rule.says))) == 1
    said = rule.refusal.format(slot=rule.slot, part=Always(), kind="Kind", owner=owner, **FACTS)
    assert "\n" not in said
    assert "{" not in said


@pytest.mark.parametrize("name", mechanisms.find_all())
def test_every_mechanism_may_be_built(name: str) -> None:
    mechanism = mechanisms.find_all()[name]
    recipe = mechanism.recipe(batch_size=4, epochs=4, **mechanism.example)
    recipe.require()
    assert recipe.name == name


@dataclass(frozen=True)
class Rarer(Poisson):
    """A subclass may do something else."""


def test_a_subclass_is_another_part_unless_the_rule_says_otherwise() -> None:
    selective = recipes.dpsur(batch_size=4, steps=4, noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match=r"Rarer\(rate=0.5\) with selection=Selective has no proven price"):
        replace(selective, sampler=Rarer(0.5))
    plain = recipes.dpsgd(batch_size=4, steps=4, noise_multiplier=1.0, sampler=Rarer(0.5))
    plain.require("loop with workers", **FACTS)
    with pytest.raises(InvalidInput, match="must be Poisson, or another that is proven for users"):
        plain.require("federated")


def test_a_setting_refuses_what_it_is_not_proven_for() -> None:
    foreign = recipes.dpsgd(batch_size=4, steps=4, noise_multiplier=1.0, sampler=Foreign())
    with pytest.raises(InvalidInput, match=r"sampler=Foreign\(\) cannot be used by 2 processes"):
        foreign.require("several processes", **FACTS)
    with pytest.raises(InvalidInput, match="a loader of your own goes with"):
        foreign.require("loop")
    foreign.require("loop over a foreign loader")
    with pytest.raises(InvalidInput, match="selection=StepLength cannot be used on a sharded model"):
        recipes.dpagd(batch_size=4, steps=4).require("sharded")


def test_a_part_of_the_users_own_may_say_what_it_needs() -> None:
    class Mine(Sampler):
        needs = (Needs("clip", "clip={part:g} must be whole: {owner} counts", (int,)),)

    assert math.isclose(Recipe(sampler=Mine(), clip=2).clip, 2)
    with pytest.raises(InvalidInput, match=r"clip=1\.5 must be whole: Mine counts"):
        Recipe(sampler=Mine(), clip=1.5)
