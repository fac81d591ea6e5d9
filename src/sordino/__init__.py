"""Sordino trains PyTorch models so that the model says almost nothing about any one record."""

from sordino import recipes
from sordino.accounting import Budget, Guarantee
from sordino.errors import BudgetExhausted, InvalidInput, SordinoError, UnsupportedModel
from sordino.private import Private, Step
from sordino.recipe import Recipe
from sordino.validation.fixing import fix

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetExhausted",
    "Guarantee",
    "InvalidInput",
    "Private",
    "Recipe",
    "SordinoError",
    "Step",
    "UnsupportedModel",
    "fix",
    "recipes",
]
