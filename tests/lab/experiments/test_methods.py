"""Recipes by name, and by whom they are priced."""

from __future__ import annotations

import pytest
import torch

from sordino.lab.experiments import recipe_of
from sordino.lab.experiments.methods import accountant_of, is_priced_alike
from tests.lab.experiments.cases import small

SHARED = {"batch_size": 100, "steps": 8}
PUBLIC = (torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("recipe", "proven", "published"),
    [
        ({"name": "dpsgd"}, "pld", "rdp"),
        ({"name": "dynamic"}, "pld", "gdp"),
        ({"name": "noise_decay"}, "pld", "zcdp-epoch"),
        ({"name": "dpis"}, "rdp-filter", "rdp-filter"),
        ({"name": "dpsur"}, "pld", "rdp"),
        ({"name": "screening"}, "pld", "rdp-classic"),
    ],
)
def test_who_prices_a_recipe(recipe, proven, published):
    assert accountant_of(small(recipe=recipe)) == proven
    assert accountant_of(small(recipe=recipe, accounting="published")) == published
    if published != "rdp-filter":
        assert accountant_of(small(recipe=recipe, accounting="published", published="pld")) == "pld"


def test_a_baseline_is_priced_as_in_the_paper_that_ran_it():
    assert accountant_of(small("tb-linear", accounting="published")) == "rdp-classic"
    assert accountant_of(small("tb-linear", accounting="published", published="rdp")) == "rdp"
    assert accountant_of(small("tb-linear")) == "pld"


@pytest.mark.parametrize(
    ("recipe", "published", "alike"),
    [("dpsgd", None, False), ("dpis", None, True), ("jl", "pld", True), ("dpsur", "pld", False)],
)
def test_where_both_accountings_give_one_recipe(recipe, published, alike):
    for accounting in ("proven", "published"):
        assert is_priced_alike(small(recipe={"name": recipe}, published=published, accounting=accounting)) is alike


@pytest.mark.parametrize("name", ["dpsgd", "automatic", "dynamic", "noise_decay", "dpis", "screening"])
def test_every_recipe_is_calibrated_to_its_epsilon(name):
    recipe = recipe_of(small(recipe={"name": name, **SHARED}), 300, PUBLIC)
    assert recipe.steps == 8
    assert recipe.noise_multiplier is not None
    if name != "dpis":
        assert 2.9 < recipe.price(1e-5) <= 3


def test_with_noise_but_no_length_the_budget_decides_how_long():
    fixed = {
        "name": "dpsur",
        "batch_size": 100,
        "noise_multiplier": 4.0,
        "validation_noise": 2.0,
        "validation_size": 50,
    }
    proven = recipe_of(small(recipe=fixed), 1438)
    published = recipe_of(small(recipe=fixed, accounting="published"), 1438)
    assert proven.basis == "proven"
    assert published.basis == "published"
    assert 2.8 < proven.price(1e-5) <= 3
    assert proven.steps != published.steps


def test_statistics_released_before_leave_fewer_steps():
    fixed = {"name": "dpsgd", "batch_size": 100, "noise_multiplier": 4.0}
    before = {"kind": "scatter", "noise": 8.0, "clip": 1.0, "square_clip": 1.0}
    alone, after = recipe_of(small(recipe=fixed), 1438), recipe_of(small(recipe=fixed, features=before), 1438)
    assert after.steps < alone.steps


def test_parts_are_read_from_tables():
    recipe = {"name": "dpsgd", **SHARED, "noise_schedule": {"part": "schedules.GrowingMu", "ratio": 2.0}}
    made = recipe_of(small(recipe=recipe), 300)
    assert made.noise_schedule(4, 8) == pytest.approx(2**-0.5)
