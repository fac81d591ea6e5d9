"""Recipes survive a round trip through TOML; a document cannot name anything outside the package."""

from dataclasses import dataclass

import pytest

from sordino import Budget, InvalidInput, Recipe, recipes
from sordino.sampling import Foreign

RECIPES = [
    recipes.dpsgd(batch_size=32, epochs=2.5),
    recipes.dpadam(batch_size=32, steps=7, noise_multiplier=0.1 + 0.2).for_records(100),
    recipes.automatic(batch_size=8, steps=3, sampler=Foreign()),
    recipes.dpsgd(batch_size=64, epochs=1).calibrate(Budget(epsilon=1.5, delta=1e-6), records=1000),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_round_trip_gives_an_equal_recipe(recipe: Recipe) -> None:
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_a_recipe_written_by_hand_needs_no_part_names_at_the_top() -> None:
    recipe = Recipe.from_toml('batch_size = 32\nepochs = 2.0\n[weighing]\npart = "weighing.Automatic"\n')
    assert recipe.weighing == recipes.automatic().weighing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = ", "not a TOML document"),
        ("batchsize = 3", "has no field 'batchsize'"),
        ('[weighing]\npart = "os.system"', "is not a part of Sordino"),
        ('[weighing]\npart = "private.Private"', "is not a part of Sordino"),
        ("[weighing]\ngamma = 1.0", "must name its class"),
        ("clip = -1.0", "clip=-1.0 must be > 0"),
    ],
)
def test_a_bad_document_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Recipe.from_toml(text)
    assert "\n" not in str(caught.value)


def test_parts_of_the_user_stay_in_code() -> None:
    @dataclass(frozen=True)
    class Mine:
        def __call__(self, step: int, steps: int) -> float:
            return 1.0

    with pytest.raises(InvalidInput, match="only parts of Sordino"):
        Recipe(clip_schedule=Mine()).to_toml()
    assert Recipe(clip_schedule=Mine()).fingerprint()
