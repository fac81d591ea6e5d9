"""Makes the recipe of a case, calibrated to its ε by a proven price or by what its paper charges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tomli_w
from dp_accounting import DpEvent

from sordino import recipes
from sordino.accounting import Budget, calibration, pricing
from sordino.errors import InvalidInput
from sordino.lab.experiments.cases import ACCOUNTINGS, Case, Options
from sordino.lab.experiments.problem import Split, released_first
from sordino.lab.importing import call_recipe
from sordino.names import from_toml
from sordino.parts import Constant, Flat
from sordino.recipe import Optimizer, Recipe

MOST_STEPS = 100_000
SELECTIVE = ("dpsur", "screening")
"""Recipes whose papers count only accepted updates."""
_ACCOUNTANTS = {
    "dpis": "rdp-filter",
    "dynamic": "gdp",
    "growing_mu": "gdp",
    "noise_decay": "zcdp-epoch",
    "screening": "rdp-classic",
    "sensitivity_decay": "gdp",
}
"""Which accountant prices a recipe in its own paper; all others use RDP."""
_BASELINES = dict.fromkeys(("tb-cnn", "tb-linear", "tb-relu", "tb-scatter-cnn"), "rdp-classic")
"""The accountant of plain DP-SGD in Tramèr and Boneh's runs, and in the table of noise screening that repeats them.

It is not in their configurations: another key there would rename their proven results.
"""
_PARTS = {"clip_schedule": Constant, "noise_schedule": Constant, "validation_schedule": Constant, "weighing": Flat}
Runs = list[tuple[DpEvent, int]]


def accountant_of(case: Case) -> str:
    """Name the accountant of the case: PLD (the filter for DPIS) if a proof is asked for, else the paper's."""
    name = str(case.recipe["name"])
    if case.accounting == "proven":
        return "rdp-filter" if name == "dpis" else "pld"
    return case.published or _BASELINES.get(case.method) or _ACCOUNTANTS.get(name, "rdp")


def is_priced_alike(case: Case) -> bool:
    """Whether the paper's accounting gives the same recipe as the proven one, so that one run stands for both.

    This holds for DPIS (the filter) and for DP-SGD-JL: its theorem holds, and PLD does the same as composing its
    trade-off functions. Only the ε that the paper prints for few projections is not a bound.
    """
    if case.recipe["name"] in SELECTIVE:
        return False
    proven, published = (replace(case, accounting=accounting) for accounting in ACCOUNTINGS)
    return accountant_of(proven) == accountant_of(published)


def recipe_of(case: Case, records: int, public: Split | None = None) -> Recipe:
    """Make the calibrated recipe of a case on `records` records; `public` are those that it may look at.

    If neither steps nor epochs are given, it has as many steps as the budget pays for at the given noise; otherwise the
    least noise. Releases before training, such as statistics for normalising, are paid from the same budget.
    """
    recipe = build_recipe(case, case.recipe, records, public)
    budget = Budget(case.epsilon, case.delta, accountant=accountant_of(case))
    spent = released_first(case)
    if not spent and (recipe.selection.constant or recipe.steps or recipe.epochs):
        return recipe.calibrate(budget, records=records)
    if recipe.sampler is not None:
        raise InvalidInput(
            f"features noise={case.features['noise']} and {recipe.name}: no filter holds both; use groups"
        )
    ready = replace(recipe.for_records(records), budget=budget)
    if ready.steps is not None:
        return _find_noise(ready, budget, spent)
    if ready.selection.constant:
        event = replace(ready, steps=1).terms(0).event
        return replace(ready, steps=calibration.steps_for(budget, event, spent=spent))
    return _find_length(ready, budget, spent)


def _find_noise(recipe: Recipe, budget: Budget, spent: Runs) -> Recipe:
    if recipe.noise_multiplier is not None:
        return recipe
    found = calibration.noise_for(budget, lambda noise: [*spent, *replace(recipe, noise_multiplier=noise).plan()])
    return replace(recipe, noise_multiplier=found.noise_multiplier)


def _find_length(recipe: Recipe, budget: Budget, spent: Runs) -> Recipe:
    """Find by bisection how many attempts the budget pays for if attempts differ in price."""
    low, high = 1, MOST_STEPS
    while low < high:
        middle = (low + high + 1) // 2
        plan = [*spent, *replace(recipe, steps=middle).plan()]
        price = pricing.epsilon(plan, budget.delta, budget.accountant, budget.adjacency)
        low, high = (middle, high) if price <= budget.epsilon else (low, middle - 1)
    return replace(recipe, steps=low)


def build_recipe(case: Case, table: Options, records: int, public: Split | None = None) -> Recipe:
    """Build the recipe that `table` describes, with the case's optimizer, before it is priced."""
    options = dict(table)
    name = str(options.pop("name"))
    if ":" in name:
        return _call_own(case, name, options, records)
    if name not in recipes.__all__:
        raise InvalidInput(f"recipe={name!r} is not known: choose one of {', '.join(recipes.__all__)}")
    builder: Callable[..., Recipe] = getattr(recipes, name)
    parts = {key: _read_part(options.pop(key), default) for key, default in _PARTS.items() if key in options}
    if "validation_schedule" in parts:
        options["validation_schedule"] = parts.pop("validation_schedule")
    if name in SELECTIVE:
        options["accounting"] = case.accounting
    if name == "dpsur":
        options.setdefault("validation_share", None)  # the paper's test, unless a configuration asks for ours
    if name == "screening" and public is not None and len(public[1]):
        options |= {"public": public, "public_name": "some held-out records"}
    if name == "noise_decay" and "steps" in options:
        options["epochs"] = options.pop("steps") * options["batch_size"] / records
    try:
        recipe = builder(**options)
    except TypeError as error:
        raise InvalidInput(f"recipe {name} of method {case.method}: {error}") from error
    return replace(recipe, optimizer=optimizer_of(case), **parts)


def _call_own(case: Case, code: str, options: dict[str, Any], records: int) -> Recipe:
    """Call a user's function for its recipe; if it chooses an optimizer, that one counts."""
    if "steps" in options and "epochs" not in options:
        options["epochs"] = options.pop("steps") * options["batch_size"] / records
    made = call_recipe(code, **options)
    return made if made.optimizer != Optimizer() else replace(made, optimizer=optimizer_of(case))


def optimizer_of(case: Case) -> Optimizer:
    """Make the optimizer of a case; the runner takes care of ``decay``."""
    options = {key: value for key, value in case.optimizer.items() if key != "decay"}
    try:
        return Optimizer(**options)
    except TypeError as error:
        raise InvalidInput(f"[optimizer] of method {case.method}: {error}") from error


def _read_part(table: Any, default: type) -> Any:
    """Read a part that a configuration describes as a table, such as ``{part = "growing-mu", ratio = 2.0}``."""
    return from_toml(tomli_w.dumps(table), default)
