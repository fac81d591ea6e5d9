"""Follows the examples through the operations of a loss, as vmap does, without running anything.

The outputs of uses are divided among the examples, and every operation from them to the losses says where the examples
are in its result, if each example's part of it was made from that example's parts alone. If the losses come out as one
entry for each example, in order, then loss i depends on part i of every use's output and on nothing else that a
gradient can reach: its gradient is zero in all other parts. That is what a use's rule needs, for this very batch.

Only tensors that carry gradients must be followed. Any other one is a number as far as gradients go, whatever it was
made from; where the examples are in it is a hint, which says where to look for them in the first use's output. A
wrong hint, like a wrong guess, ends in losses that are not in order, and then backward passes have to prove the places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping.places import Lost, Move, Place, find_data, guess, place_of, put_in_order
from sordino.gradients.rules.base import list_layouts

Rule = Callable[..., "Place | list[Place | None] | None"]
"""From the arguments' places, the result and the arguments of a function to the places of what it returns."""


PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors on which torch's functions do what they say; others may have functions of their own."""


def is_plain(tensor: Tensor) -> bool:
    """Whether torch's functions do to this tensor what they say."""
    kind = type(tensor)
    return kind in PLAIN or (
        issubclass(kind, nn.Parameter)
        and kind.__torch_function__ is nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


class Sight:
    """The places of the arguments of one operation, seen before it runs: it may change them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: dict[int, Place] = {}
        self.carriers: set[int] = set()
        self.lost = False

    def join(self, moves: Iterable[tuple[Tensor | None, Move]]) -> Place | None:
        """The place on which all arguments that carry gradients agree; if there are none, where a hint puts it."""
        agreed: Place | None = None
        hint: Place | None = None
        left = set(self.carriers)
        for tensor, move in moves:
            place = self.places.get(id(tensor))
            if place is None:
                continue
            if id(tensor) not in self.carriers:
                if hint is None and agreed is None:
                    hint = try_move(move, place)
                continue
            left.discard(id(tensor))
            moved = move(place)
            if agreed is not None and not agreed.equals(moved):
                raise Lost("two arguments hold the examples differently")
            agreed = moved
        if left:
            raise Lost("an argument carries examples to where no rule follows them")
        return agreed or hint


def try_move(move: Move, place: Place) -> Place | None:
    """A hint, moved if it can be."""
    try:
        return move(place)
    except Exception:  # noqa: BLE001 – only a hint, of whatever the user's tensor is
        return None


def find_state(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor was written to, and the number of the operation to which its gradient returns."""
    made_by = tensor.grad_fn
    return tensor._version, -1 if made_by is None else made_by._sequence_nr()


def find_dim(whole: Tensor, view: Tensor, dim: int) -> int | None:
    """The dimension of a contiguous tensor that a dimension of one of its views is, entry by entry; None if none is.

    Entry e of the dimension starts at e strides, and what the view's other dimensions add stays within a stride or
    goes by whole dimensions.
    """
    stride, length = view.stride(dim), view.shape[dim]
    alike = (i for i in range(whole.dim()) if (whole.stride(i), whole.shape[i]) == (stride, length))
    mine = next(alike, None)
    if mine is None or not whole.is_contiguous() or not view.numel() or view.dtype != whole.dtype:
        return None  # of another type, such as a complex tensor seen as a real one, strides count other entries
    span = stride * length
    others = [(s, n) for i, (s, n) in enumerate(zip(view.stride(), view.shape, strict=True)) if i != dim and n > 1]
    within = (view.storage_offset() - whole.storage_offset()) % span + sum(s * (n - 1) for s, n in others if s < stride)
    return mine if within < stride and all(s < stride or s % span == 0 for s, _ in others) else None


class Follower:
    """The places of the tensors of one forward pass, each for the tensor as it was when its place was found.

    A tensor that was written to since has another version, and one that a custom function made its output another
    place in the graph: it may be the same numbers, and yet its gradient may come back in another way.
    """

    def __init__(self, size: int, data: Any, tracked: dict[int, Any]) -> None:
        self.size, self.tracked = size, tracked
        self.gave_up = self.crossed = False
        self.found: dict[int, tuple[ref[Tensor], tuple[int, int], Place]] = {}
        for tensor in find_data(data):
            if not tensor.is_nested:  # it has no shape
                self.put(tensor, guess(tensor.shape, size))

    def put(self, tensor: Tensor, place: Place | None) -> None:
        """Remember a place; weakly, as another tensor may take this one's place in memory and then its id."""
        if place is None or tensor.is_inference() or not place.fits(tensor.shape, self.size):
            return
        self.found[id(tensor)] = (ref(tensor), find_state(tensor), place)

    def place(self, tensor: Tensor) -> Place | None:
        """Where the examples are, if that is known for the tensor in its present state."""
        found = self.found.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != find_state(tensor):
            return None
        return found[2]

    def look(self, tensors: Sequence[Tensor]) -> Sight | None:
        """What is known about the arguments; None if the result is an ordinary number."""
        sight: Sight | None = None
        for tensor in tensors:
            place = self.place(tensor)
            carries = tensor.requires_grad and id(tensor) not in self.tracked
            plain = is_plain(tensor)
            if place is None and not carries and plain:
                continue
            sight = sight or Sight(self.size)
            if place is not None and plain:
                sight.places[id(tensor)] = place
                if carries:
                    sight.carriers.add(id(tensor))
            else:
                sight.lost = True
        return sight

    def follow(self, sight: Sight | None, rule: Rule | None, results: Any, args: Any, kwargs: Any) -> Place | None:
        """Place the results of an operation; the place of the first one is returned."""
        several = isinstance(results, (tuple, list))
        if sight is None or rule is None or sight.lost or kwargs.get("out") is not None:
            return None
        if not several and not isinstance(results, Tensor):
            return None
        try:
            place = rule(sight, results, *args, **kwargs)
        except Lost:
            self.crossed = self.crossed or bool(sight.carriers)
            return None
        except Exception:  # noqa: BLE001 – it was called in a way that its rule does not know
            return None
        if not several:
            assert not isinstance(place, list)
            self.put(results, place)
            if place is not None and args and results is args[0] and results._is_view():
                self.put_whole(results, place)
            return place
        places = place if isinstance(place, list) else [place] * len(results)
        for each, where in zip(results, places, strict=False):
            if isinstance(each, Tensor):
                self.put(each, where)
        return places[0] if places else None

    def put_whole(self, view: Tensor, place: Place) -> None:
        """Place the tensor of which a part was just written, if nothing of it, or the same examples, carried before."""
        whole = view._base
        made_by = None if whole is None else whole.grad_fn
        if whole is None or made_by is None or type(made_by).__name__ != "CopySlices":
            return
        before, dim = made_by.next_functions[0][0], find_dim(whole, view, place.dim)
        if dim is None:
            return
        if before is not None:  # it carried gradients before this write
            found = self.found.get(id(whole))
            state = whole._version - 1, before._sequence_nr()
            if found is None or found[0]() is not whole or found[1] != state or not found[2].equals(place.at(dim)):
                return
        self.put(whole, place.at(dim))

    def guess(self, shape: tuple[int, ...], batch_dims: int, result: Any) -> Place | None:
        """Where the examples probably are in the output of a use on what is known of no example."""
        layouts = list_layouts(shape, self.size, batch_dims)
        if not layouts or not isinstance(result, Tensor):
            return None
        try:
            place = place_of(layouts[0], shape, self.size).reshape(shape, result.shape, self.size)
        except Lost:
            return None
        self.put(result, place)
        return place

    def place_use(self, place: Place, shape: tuple[int, ...], result: Any, composed: bool, mixed: int) -> Place | None:
        """Where the examples are in a use's output, from where they are in the result of its operation.

        The uses of composed operations have the examples first, others the result's entries in the same order; or their
        first dimensions are those of the result, of which the operation treats all but the last `mixed` alone.
        """
        if composed:
            return place.at(0)
        if not isinstance(result, Tensor):
            return None
        alike = len(shape) == result.dim() and place.dim < len(shape) - mixed
        if mixed and alike and shape[: place.dim + 1] == result.shape[: place.dim + 1]:
            return place
        if result.numel() != math.prod(shape):
            return None
        try:
            return place if result.shape == shape else place.reshape(result.shape, shape, self.size)
        except Lost:
            return None

    def place_sequences(self, states: Tensor, order: Tensor | None) -> Place | None:
        """Where the examples are in a use on packed sequences: the rule has them as they were before they were sorted.

        States [layers, sequences, features] have them sorted; `order` is how they were, if they were.
        """
        place = self.place(states)
        if place is None or order is None:
            return place
        owners = place.list_owners(self.size, order.device)
        return put_in_order(0, torch.empty_like(owners).index_copy_(0, order, owners), self.size)

    def reaches(self, losses: Tensor) -> bool:
        """Whether there is known to be one loss for each example, in order."""
        place = self.place(losses)
        return place is not None and place.equals(Place()) and not self.gave_up
