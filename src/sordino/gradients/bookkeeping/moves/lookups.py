"""By index: lookups, gathering, scattering, assignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sordino.gradients.bookkeeping.following import Sight
from sordino.gradients.bookkeeping.moves.tools import Answer, insist, keep, positive, shift
from sordino.gradients.bookkeeping.places import Move, Place, guess, index_places, put_in_order


def lookup(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """embedding and one_hot: a vector for each token."""
    return at.join([(input, keep(lambda place: True))])


def bags(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """embedding_bag of [N, length]."""
    insist(input.dim() == 2)
    return at.join([(input, keep(lambda place: place.dim == 0))])


def get_item(at: Sight, result: Tensor, input: Tensor, index: Any) -> Answer:
    """``x[index]``."""
    return at.join([(input, lambda place: index_places(place, input.shape, index, at.size, input.device))])


def set_item(at: Sight, result: Tensor, input: Tensor, index: Any, value: Any) -> Answer:
    """``x[index] = value``: the value's examples are where those of ``x[index]`` are."""
    if id(value) not in at.carriers:
        return at.join([(input, keep(lambda place: True))])
    target = find_target(at, input)
    region = index_places(target, input.shape, index, at.size, input.device)
    written = input.detach()[index]

    def move(place: Place) -> Place:
        insist(shift(value, written)(place).equals(region))
        return target

    return at.join([(input, keep(lambda place: True)), (value, move)])


def find_target(at: Sight, input: Tensor) -> Place:
    """Where the examples are, or probably are, in a tensor that others are written into."""
    place = at.places.get(id(input)) or guess(input.shape, at.size)
    if place is None and input.dim() and len(input) % at.size == 0:
        place = Place(0, inner=len(input) // at.size)
    insist(place is not None)
    assert place is not None
    return place


def index_select(at: Sight, result: Tensor, input: Tensor, dim: int, index: Tensor) -> Answer:
    """Entries along a dimension, in the order of the index."""
    mine = positive(dim, input)

    def move(place: Place) -> Place:
        if place.dim != mine:
            return place
        return put_in_order(mine, place.list_owners(at.size, index.device)[index], at.size)

    return at.join([(input, move)])


def gather(at: Sight, result: Tensor, input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """Entries along a dimension, each example's by its own indices."""
    mine = positive(dim, input)
    return at.join(
        [(input, keep(lambda place: place.dim != mine and index.shape[place.dim] == input.shape[place.dim]))]
    )


def take_along(at: Sight, result: Tensor, input: Tensor, indices: Tensor, dim: Any = None, **kwargs: Any) -> Answer:
    """gather, with its arguments in another order."""
    return gather(at, result, input, dim, indices)


def scatter(
    at: Sight, result: Tensor, input: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, **kwargs: Any
) -> Answer:
    """Entries written or added along a dimension, each example's where its own indices say."""
    mine = positive(dim, input)
    sources = [each for each in (src, kwargs.get("value")) if isinstance(each, Tensor)]

    def whole(tensor: Tensor) -> Move:
        return keep(
            lambda place: (
                place.dim != mine and index.shape[place.dim] == tensor.shape[place.dim] == result.shape[place.dim]
            )
        )

    return at.join([(input, keep(lambda place: place.dim != mine)), *((each, whole(each)) for each in sources)])


def index_add(
    at: Sight, result: Tensor, input: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: Any
) -> Answer:
    """Slices added along a dimension: along the examples', every slice must go to its own example."""
    mine = positive(dim, input)
    given = at.places.get(id(source))
    if given is None or given.dim != mine or id(source) not in at.carriers:
        return at.join((each, keep(lambda place: place.dim != mine)) for each in (input, source))
    target = find_target(at, input)
    insist(target.dim == mine)
    goes = target.list_owners(at.size, index.device)[index]
    insist(torch.equal(goes, given.list_owners(at.size, index.device)))
    return at.join([(input, keep(lambda place: True)), (source, lambda place: target)])
