"""A user's own recipe, ``file.py:function``: how it is made, and how a run that follows it gets it back.

Sordino calls the function with `batch_size` and `epochs`, like those of `sordino.recipes`, and it returns a `Recipe`.
Its parts may have no name that a file could hold, so a configuration keeps the function and the numbers chosen for it.
The parts come from the code, which runs only if the user says that it may.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sordino.accounting import Budget
from sordino.errors import InvalidInput
from sordino.lab.importing import call_recipe
from sordino.recipe import Optimizer, Recipe

_NUMBERS = ("batch_size", "epochs", "steps", "clip", "noise_multiplier", "records")
_KNOWN = ("code", *_NUMBERS, "optimizer", "budget")


@dataclass(frozen=True)
class OwnRecipe:
    """The function that makes a recipe, and the numbers chosen for it."""

    code: str
    settings: dict[str, Any]

    def to_table(self) -> dict[str, Any]:
        """Return the table [recipe] of a configuration."""
        return {"code": self.code, **self.settings}


def parse_own(table: dict[str, Any], path: Path) -> OwnRecipe:
    """Read a table [recipe] with code in it; nothing is run."""
    if unknown := sorted(set(table) - set(_KNOWN)):
        raise InvalidInput(
            f"configuration {path}: [recipe] with code has no {unknown[0]!r}: it has {', '.join(_KNOWN)}"
        )
    if not isinstance(table["code"], str) or ":" not in table["code"]:
        raise InvalidInput(f"configuration {path}: [recipe] code={table['code']!r} must be file.py:function")
    return OwnRecipe(table["code"], {key: value for key, value in table.items() if key != "code"})


def locate(code: str) -> str:
    """Name the function by the full path of its file, so that a run finds it from wherever it is resumed."""
    where, _, function = code.rpartition(":")
    return f"{Path(where).resolve()}:{function}" if Path(where).suffix == ".py" else code


def note(code: str, recipe: Recipe) -> OwnRecipe:
    """Return what a configuration must keep of a complete recipe."""
    numbers = {name: value for name in _NUMBERS if (value := getattr(recipe, name)) is not None}
    plain = Optimizer(**{name: getattr(recipe.optimizer, name) for name in Optimizer.__dataclass_fields__})
    budget = {} if recipe.budget is None else {"budget": asdict(recipe.budget)}
    return OwnRecipe(code, {**numbers, "optimizer": asdict(plain), **budget})


def rebuild(own: OwnRecipe) -> Recipe:
    """Make the recipe as it was when its run began: the code's parts with the numbers chosen then."""
    settings = dict(own.settings)
    try:
        optimizer, budget = Optimizer(**settings.pop("optimizer", {})), settings.pop("budget", None)
        limit = None if budget is None else Budget(**budget)
        records = settings.pop("records")
        length = {"epochs": settings["epochs"]} if "epochs" in settings else {"epochs": 1}
        made = call_recipe(own.code, batch_size=settings["batch_size"], **length)
        recipe = replace(made, **{"epochs": None, **settings}, optimizer=made.optimizer.adopt(optimizer))
    except (TypeError, KeyError) as error:
        raise InvalidInput(f"the [recipe] of {own.code} is not whole ({error}): start a new run") from None
    return recipe.for_records(records) if limit is None else recipe.calibrate(limit, records=records)
