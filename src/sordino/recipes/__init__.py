"""The mechanisms by name, one constructor each: a paper is a choice of parts."""

from sordino.recipes.plain import automatic, dpadam, dpsgd

__all__ = ["automatic", "dpadam", "dpsgd"]
