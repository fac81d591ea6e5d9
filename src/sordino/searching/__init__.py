"""Searches for settings on private records, within a budget that includes the search: `sordino.tune`."""

from sordino.searching.search import Search, Winner, tune
from sordino.searching.spaces import Space, choices, integers, log_uniform, make_space, read_space, uniform
from sordino.searching.trials import Candidate

__all__ = [
    "Candidate",
    "Search",
    "Space",
    "Winner",
    "choices",
    "integers",
    "log_uniform",
    "make_space",
    "read_space",
    "tune",
    "uniform",
]
