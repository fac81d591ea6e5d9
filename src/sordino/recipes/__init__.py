"""The mechanisms by name, one constructor each: a paper is a choice of parts."""

from sordino.recipes.importance import dpis
from sordino.recipes.plain import automatic, dpadam, dpsgd
from sordino.recipes.selective import dpagd, dpsur, screening

__all__ = ["automatic", "dpadam", "dpagd", "dpis", "dpsgd", "dpsur", "screening"]
