"""The mechanisms by name, one constructor each: a paper is a choice of parts."""

from sordino.recipes.importance import dpis
from sordino.recipes.plain import automatic, dpadam, dpsgd
from sordino.recipes.projected import jl
from sordino.recipes.scheduled import dynamic, growing_mu, noise_decay, sensitivity_decay
from sordino.recipes.selective import dpagd, dpsur, screening

__all__ = [
    "automatic",
    "dpadam",
    "dpagd",
    "dpis",
    "dpsgd",
    "dpsur",
    "dynamic",
    "growing_mu",
    "jl",
    "noise_decay",
    "screening",
    "sensitivity_decay",
]
