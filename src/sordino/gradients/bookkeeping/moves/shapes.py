"""Shapes: the same entries in other dimensions, repeated, cut or joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sordino.gradients.bookkeeping.following import Sight
from sordino.gradients.bookkeeping.moves.dimensions import reduction
from sordino.gradients.bookkeeping.moves.tools import Answer, insist, keep, positive, shift, spread
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.bookkeeping.places import Place


def reshape(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: the same entries in the same order."""
    insist(result.numel() == input.numel() and result.numel() > 0)
    return at.join([(input, lambda place: place.reshape(input.shape, result.shape, at.size))])


def transpose(at: Sight, result: Tensor, input: Tensor, dim0: int, dim1: int) -> Answer:
    """Two dimensions change places."""
    first, second = positive(dim0, input), positive(dim1, input)
    return at.join([(input, lambda place: place.at({first: second, second: first}.get(place.dim, place.dim)))])


def last_two(at: Sight, result: Tensor, input: Tensor, *args: Any) -> Answer:
    """mT, t, adjoint; T of a matrix."""
    return transpose(at, result, input, -2, -1)


def reverse(at: Sight, result: Tensor, input: Tensor, *args: Any) -> Answer:
    """T: all dimensions in reverse order."""
    return at.join([(input, lambda place: place.at(input.dim() - 1 - place.dim))])


def permute(at: Sight, result: Tensor, input: Tensor, first: Any = None, *rest: Any, dims: Any = None) -> Answer:
    """Dimensions in another order."""
    order = [positive(dim, input) for dim in spread(first if dims is None else dims, rest)]
    return at.join([(input, lambda place: place.at(order.index(place.dim)))])


def movedim(at: Sight, result: Tensor, input: Tensor, source: Any, destination: Any) -> Answer:
    """Some dimensions go elsewhere, the others keep their order."""
    sources = [positive(dim, input) for dim in spread(source, ())]
    targets = [positive(dim, input) for dim in spread(destination, ())]
    others = iter(dim for dim in range(input.dim()) if dim not in sources)
    order = [sources[targets.index(dim)] if dim in targets else next(others) for dim in range(input.dim())]
    return permute(at, result, input, order)


def expand(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """expand and similar operations: new entries along dimensions of length 1, or new dimensions in front."""
    return at.join([(input, shift(input, result))])


def repeat(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """repeat and tile: the whole tensor again and again, along each dimension."""

    def move(place: Place) -> Place:
        dim = place.dim + result.dim() - input.dim()
        insist(dim >= 0)
        times = result.shape[dim] // max(1, input.shape[place.dim])
        if place.owners is not None:
            return Place(dim, owners=place.owners.repeat(times))
        return Place(dim, place.outer * times, place.inner)

    return at.join([(input, move)])


def repeat_interleave(
    at: Sight, result: Tensor, input: Tensor, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Answer:
    """Each entry along a dimension several times."""
    insist(dim is not None and isinstance(repeats, int))
    mine = positive(dim or 0, input)

    def move(place: Place) -> Place:
        if place.dim != mine:
            return place
        insist(place.owners is None)
        return Place(place.dim, place.outer, place.inner * repeats)

    return at.join([(input, move)])


def cut(at: Sight, result: Any, input: Tensor, how: Any = None, dim: int = 0, **kwargs: Any) -> Answer:
    """chunk, split, tensor_split, narrow: pieces along a dimension."""
    mine = positive(kwargs.get("axis", dim), input)
    return at.join([(input, keep(lambda place: place.dim != mine))])


def narrow(at: Sight, result: Tensor, input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Answer:
    """A piece along a dimension."""
    return cut(at, result, input, None, dim)


def drop(at: Sight, result: Any, input: Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> Answer:
    """select and unbind: one entry along a dimension, which goes."""
    return reduction(at, next(find_tensors((result,), {})), input, dim)


def unfold(at: Sight, result: Tensor, input: Tensor, dimension: int, size: int, step: int) -> Answer:
    """Windows along a dimension, in a new last one."""
    return cut(at, result, input, None, dimension)


def concatenate(at: Sight, result: Tensor, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Answer:
    """cat: along a dimension that is not the examples'; empty vectors count for nothing."""
    joined = positive(kwargs.get("axis", dim), result)
    whole = [tensor for tensor in tensors if tensor.numel() or tensor.dim() == result.dim()]
    insist(all(tensor.dim() == result.dim() for tensor in whole))
    return at.join((tensor, keep(lambda place: place.dim != joined)) for tensor in whole)


def stack(at: Sight, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Answer:
    """A new dimension."""
    new = positive(dim, result)
    return at.join((tensor, lambda place: place.at(place.dim + (place.dim >= new))) for tensor in tensors)
