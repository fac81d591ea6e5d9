"""Sordino trains PyTorch models that reveal almost nothing about any one record."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sordino import recipes
    from sordino.accounting import Budget, Guarantee
    from sordino.cli.loading import load
    from sordino.errors import BudgetExhausted, InvalidInput, SordinoError, UnsupportedModel
    from sordino.private import Private, Step
    from sordino.recipe import Recipe
    from sordino.searching import tune
    from sordino.tables.estimators import PrivateClassifier, PrivateRegressor
    from sordino.validation.fixing import fix

__version__ = "0.2.0"

__all__ = [
    "Budget",
    "BudgetExhausted",
    "Guarantee",
    "InvalidInput",
    "Private",
    "PrivateClassifier",
    "PrivateRegressor",
    "Recipe",
    "SordinoError",
    "Step",
    "UnsupportedModel",
    "fix",
    "load",
    "recipes",
    "tune",
]

_HOMES = {
    "Budget": "accounting",
    "BudgetExhausted": "errors",
    "Guarantee": "accounting",
    "InvalidInput": "errors",
    "Private": "private",
    "PrivateClassifier": "tables.estimators",
    "PrivateRegressor": "tables.estimators",
    "Recipe": "recipe",
    "SordinoError": "errors",
    "Step": "private",
    "UnsupportedModel": "errors",
    "fix": "validation.fixing",
    "load": "cli.loading",
    "tune": "searching",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: importing torch takes seconds, and ``sordino --help`` must not wait."""
    if name == "recipes":
        return import_module("sordino.recipes")
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino' has no attribute {name!r}")
    return getattr(import_module(f"sordino.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
