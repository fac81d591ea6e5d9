"""Tools of the rules that say where operations take the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sordino.gradients.bookkeeping.places import Lost, Move, Place

Answer = Place | None
"""The place of a result; None where it holds no examples, as far as anybody knows."""


def insist(condition: bool, why: str = "the operation works across examples") -> None:
    """Lose the examples unless the condition holds."""
    if not condition:
        raise Lost(why)


def shift(tensor: Tensor, result: Tensor) -> Move:
    """Dimensions are aligned at the end, as in broadcasting."""

    def move(place: Place) -> Place:
        dim = place.dim + result.dim() - tensor.dim()
        insist(dim >= 0 and result.shape[dim] == tensor.shape[place.dim])
        return place.at(dim)

    return move


def shift_to(tensor: Tensor, result: Tensor, dim: int) -> Move:
    """To a dimension of equal length."""

    def move(place: Place) -> Place:
        insist(result.shape[dim] == tensor.shape[place.dim])
        return place.at(dim)

    return move


def keep(where: Callable[[Place], bool]) -> Move:
    """The same dimension, if it is one where the operation treats entries apart."""

    def move(place: Place) -> Place:
        insist(where(place))
        return place

    return move


def positive(dim: int, tensor: Tensor) -> int:
    """A dimension counted from the first."""
    insist(isinstance(dim, int))
    return dim % max(1, tensor.dim())


def spread(first: Any, rest: Sequence[Any]) -> Sequence[Any]:
    """Arguments that may be given one by one or as a sequence."""
    return first if isinstance(first, (tuple, list)) else (first, *rest)
