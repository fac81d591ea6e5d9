"""Which datasets count as neighbours: the same dataset with one unit more or less, or with one unit exchanged."""

from __future__ import annotations

from typing import Literal, get_args

from sordino.errors import InvalidInput

Adjacency = Literal["add-or-remove-one", "replace-one"]
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


def required_adjacency(adjacency: str) -> Adjacency:
    """`adjacency` itself, or an error that lists the known ones."""
    for known in ADJACENCIES:
        if adjacency == known:
            return known
    raise InvalidInput(f"adjacency={adjacency!r} is unknown: use one of {', '.join(ADJACENCIES)}")
