"""Where the examples are in a tensor, and where they go when it is reshaped, cut or indexed.

A tensor is *placed* when every entry belongs to one example: entry e of dimension `dim` belongs to example
``(e // inner) % size``, or to ``owners[e]`` where no such rule holds (tokens without padding, a permutation). Placed
tensors are what vmap calls batched ones, with two kinds of dimensions more: folded ones, and those in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.base import Kind, Layout, Owners


class Lost(Exception):
    """It is unknown where the examples are after this operation; a backward pass may still prove it."""


@dataclass(frozen=True, eq=False)
class Place:
    """Examples in dimension `dim`, which counts outer × examples × inner entries; or `owners`, one for each entry."""

    dim: int = 0
    outer: int = 1
    inner: int = 1
    owners: Tensor | None = None

    def at(self, dim: int) -> Place:
        """The same examples in another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Whether a tensor of this shape can hold `size` examples in this way."""
        length = self.outer * size * self.inner if self.owners is None else len(self.owners)
        return self.dim < len(shape) and shape[self.dim] == length

    def equals(self, other: Place) -> bool:
        """Whether two tensors of one shape hold the examples alike."""
        if self.dim != other.dim or (self.owners is None) is not (other.owners is None):
            return False
        if self.owners is not None and other.owners is not None:
            return self.owners is other.owners or torch.equal(self.owners, other.owners)
        return (self.outer, self.inner) == (other.outer, other.inner)

    def list_owners(self, size: int, device: torch.device) -> Tensor:
        """The owner of every entry of the dimension."""
        if self.owners is not None:
            return self.owners
        return torch.arange(size, device=device).repeat_interleave(self.inner).repeat(self.outer)

    def reshape(self, before: Sequence[int], after: Sequence[int], size: int) -> Place:
        """After ``x.reshape(after)`` of a tensor of shape `before`.

        In order of the entries there are ``left`` blocks of the dimension, and ``right`` entries for each of its own.
        The new dimension holds all of them that are neither in dimensions before nor after it.
        """
        whole = before[self.dim] if self.owners is not None else size
        left = math.prod(before[: self.dim]) * self.outer
        right = math.prod(before[self.dim + 1 :]) * self.inner
        ahead = 1
        for dim, length in enumerate(after):
            behind = math.prod(after[dim + 1 :])
            if ahead and behind and left % ahead == 0 and right % behind == 0:
                outer, inner = left // ahead, right // behind
                if length == outer * whole * inner:
                    if self.owners is None:
                        return Place(dim, outer, inner)
                    return Place(dim, owners=self.owners.repeat_interleave(inner).repeat(outer))
            ahead *= length
        raise Lost("a reshape cuts through the examples")

    def layout(self, size: int, device: torch.device) -> Layout:
        """The same place as a rule sees it; of what is folded in an unusual way, every entry is told its owner."""
        if self.owners is not None:
            return Layout(Kind.OWNED, self.dim, Owners(self.owners, size))
        if self.outer == self.inner == 1:
            return Layout(dim=self.dim)
        if self.dim or (self.outer > 1 and self.inner > 1):
            return Layout(Kind.OWNED, self.dim, Owners(self.list_owners(size, device), size))
        return Layout(Kind.MAJOR if self.outer == 1 else Kind.MINOR)


def place_of(layout: Layout, shape: Sequence[int], size: int) -> Place:
    """The reverse: a place from what a rule sees."""
    if layout.kind is Kind.MAJOR:
        return Place(0, inner=shape[0] // size)
    if layout.kind is Kind.MINOR:
        return Place(0, outer=shape[0] // size)
    return Place(layout.dim, owners=None if layout.owners is None else layout.owners.each)


def put_in_order(dim: int, owners: Tensor, size: int) -> Place:
    """A place by owners, which are forgotten if every example has as many entries and they are in order."""
    inner, rest = divmod(len(owners), size)
    if inner and not rest and torch.equal(owners, Place(inner=inner).list_owners(size, owners.device)):
        return Place(dim, inner=inner)
    return Place(dim, owners=owners)


def guess(shape: Sequence[int], size: int) -> Place | None:
    """Where the examples probably are in a tensor of the batch; a wrong guess is found out and costs a proof."""
    return next((Place(dim) for dim, length in enumerate(shape) if length == size), None)


def find_data(data: Any) -> Iterable[Tensor]:
    """The tensors of a batch, whatever it keeps them in."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from find_data(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from find_data(value)
    elif hasattr(data, "__dict__"):
        yield from (value for value in vars(data).values() if isinstance(value, Tensor))


def index_places(place: Place, shape: Sequence[int], index: Any, size: int, device: torch.device) -> Place:
    """After ``x[index]`` of a tensor of `shape`; along the examples' dimension the values of an index decide.

    Torch's rules: numbers go first, each takes a dimension away; tensors put their common dimensions where the first of
    them was, or first of all when something stands between them; a mask takes as many dimensions as it has.
    """
    source = out = middle = 0  # dimensions of the tensor, of the result without tensors, and of both but for numbers
    found: Place | None = None
    chosen: list[tuple[int, Tensor]] = []  # (dimension of the tensor, its indices)
    start, end = -1, -1
    for part in spell_out(index, len(shape)):
        if part is None:
            out, middle = out + 1, middle + 1
        elif isinstance(part, slice):
            if source == place.dim:
                found = slice_places(place, part, shape[source], out, size, device)
            source, out, middle = source + 1, out + 1, middle + 1
        elif isinstance(part, Tensor):
            start = out if start < 0 else start if end == middle else 0
            indices = part.nonzero().unbind(1) if is_mask(part) else (part,)
            chosen += [(source + i, one) for i, one in enumerate(indices)]
            source, middle = source + len(indices), middle + len(indices)
            end = middle
        else:  # a number
            if source == place.dim:
                raise Lost("one example is picked")
            source += 1
    made = len(torch.broadcast_shapes(*(one.shape for _, one in chosen)))
    mine = [one for dim, one in chosen if dim == place.dim]
    if mine:
        return pick_owners(place, mine[0], start + made, size)
    if found is None:
        raise Lost("an index leaves no dimension of examples")
    return found.at(found.dim + made) if chosen and found.dim >= start else found


def spell_out(index: Any, dims: int) -> list[Any]:
    """An index with one part for each dimension of the tensor, besides those for new dimensions; numbers as such."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if isinstance(index, list) and not all(isinstance(each, int) for each in index):
        raise Lost("a list that torch takes for a tuple, by what is in it")
    parts = [torch.tensor(part) if isinstance(part, (list, range)) else part for part in parts]
    parts = [0 if isinstance(part, Tensor) and part.dim() == 0 and not is_mask(part) else part for part in parts]
    known = (int, slice, type(...), type(None))
    if any(type(part) not in known and not (isinstance(part, Tensor) and part.dim()) for part in parts):
        raise Lost("an index of an unusual kind")
    taken = sum(count_dims(part) for part in parts if part is not None and part is not ...)
    rest = [slice(None)] * (dims - taken)
    where = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    return [*parts[:where], *rest, *parts[where + 1 :]]


def is_mask(part: Tensor) -> bool:
    """Whether an index says for every entry whether it is picked."""
    return part.dtype in (torch.bool, torch.uint8)


def count_dims(part: Any) -> int:
    """How many dimensions of the tensor a part of an index takes."""
    return part.dim() if isinstance(part, Tensor) and is_mask(part) else 1


def slice_places(place: Place, part: slice, length: int, out: int, size: int, device: torch.device) -> Place:
    """After a slice of the examples' dimension."""
    if any(isinstance(each, Tensor) for each in (part.start, part.stop, part.step)):
        part = slice(*(None if each is None else int(each) for each in (part.start, part.stop, part.step)))
    if part.indices(length) == (0, length, 1):
        return place.at(out)
    return put_in_order(out, place.list_owners(size, device)[part], size)


def pick_owners(place: Place, indices: Tensor, stop: int, size: int) -> Place:
    """After the entries `indices` of the examples' dimension were picked; their dimensions end before `stop`."""
    long = [dim for dim, length in enumerate(indices.shape) if length != 1] or [0]  # one entry: any dimension has it
    if len(long) != 1:
        raise Lost("an index spreads the examples over several dimensions")
    owners = place.list_owners(size, indices.device)[indices.flatten()]
    return put_in_order(stop - indices.dim() + long[0], owners, size)


Move = Callable[[Place], Place]
"""From the place of an argument to the place of a result."""
