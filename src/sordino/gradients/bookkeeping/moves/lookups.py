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


def find_rows(at: Sight, input: Tensor, dim: int) -> Place:
    """The same where they must be in this dimension; where they are not, what is written will not be their own."""
    place = at.places.get(id(input)) or Place(dim, inner=input.shape[dim] // at.size)
    insist(place.dim == dim and place.fits(input.shape, at.size))
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
    """Entries written or added along a dimension, each example's where its own indices say.

    Along the examples', every entry must go to its own example, as in `index_add`.
    """
    mine = positive(dim, input)
    sources = [each for each in (src, kwargs.get("value")) if isinstance(each, Tensor)]
    given = at.places.get(id(src)) if id(src) in at.carriers else None
    if given is not None and given.dim == mine:
        target = find_rows(at, input, mine)
        insist(index.shape == src.shape and len(sources) == 1)
        goes = target.list_owners(at.size, index.device)[index]
        owners = given.list_owners(at.size, index.device)
        insist(bool((goes == owners.reshape([-1 if d == mine else 1 for d in range(index.dim())])).all()))
        return at.join([(input, keep(lambda place: True)), (src, lambda place: target)])

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
    target = find_rows(at, input, mine)
    goes = target.list_owners(at.size, index.device)[index]
    insist(torch.equal(goes, given.list_owners(at.size, index.device)))
    return at.join([(input, keep(lambda place: True)), (source, lambda place: target)])


def pack(at: Sight, result: Any, input: Tensor, lengths: Any, batch_first: bool) -> list[Answer]:
    """pack_padded_sequence: the rows of all sequences at the first step, then at the second, ..."""
    examples = 0 if batch_first else 1
    counts = result[1].tolist()

    def move(place: Place) -> Place:
        insist(place.dim == examples)
        return pack_places(place, counts, at.size, input.device)

    return [at.join([(input, move)]), None]


def unpack(at: Sight, result: Any, data: Tensor, batch_sizes: Tensor, batch_first: bool, *args: Any) -> list[Answer]:
    """The reverse."""
    counts = batch_sizes.tolist()
    dim = 0 if batch_first else 1
    return [at.join([(data, lambda place: find_sequences(place, counts, dim, at.size, data.device))]), None]


def pack_places(place: Place, counts: list[int], size: int, device: torch.device) -> Place:
    """The place of packed rows, of which there are so many at each step, from that of the sequences."""
    owners = place.list_owners(size, device)
    return put_in_order(0, torch.cat([owners[:count] for count in counts]), size)


def find_sequences(place: Place, counts: list[int], dim: int, size: int, device: torch.device) -> Place:
    """The place of the sequences, in dimension `dim`, from that of packed rows: each has one owner at all steps."""
    insist(place.dim == 0)
    owners = place.list_owners(size, device)
    sequences = owners[: counts[0]]
    insist(torch.equal(owners, torch.cat([sequences[:count] for count in counts])))
    return put_in_order(dim, sequences, size)
