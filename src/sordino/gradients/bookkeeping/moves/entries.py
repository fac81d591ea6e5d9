"""Entry by entry: arithmetic, activations, casts, and losses that are not reduced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sordino.gradients.bookkeeping.following import Sight
from sordino.gradients.bookkeeping.moves.tools import Answer, insist, keep, shift
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.bookkeeping.places import Move, Place


def elementwise(at: Sight, result: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """Every entry from the entries of the arguments that broadcast to it."""
    insist(isinstance(result, Tensor))
    return at.join((tensor, shift(tensor, result)) for tensor in find_tensors(args, kwargs))


def first_alone(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """Entry by entry from the first argument, whose shape the result has; others are shared by all examples."""
    insist(result.shape == input.shape)
    return at.join([(input, keep(lambda place: True))])


def cast(at: Sight, result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """to and type_as: of another tensor only the kind of numbers and the device matter."""
    insist(result.shape == input.shape)
    mine = at.places.get(id(input))
    others = [tensor for tensor in find_tensors(args, kwargs) if tensor is not input]
    if mine is None:
        return None
    return at.join([(input, keep(lambda place: True)), *((other, lambda place: mine) for other in others)])


def loss_by_entry(at: Sight, result: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """A loss of every entry, not reduced."""
    insist(result.dim() > 0)
    return elementwise(at, result, *args, **kwargs)


def gaussian(at: Sight, result: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """gaussian_nll_loss: a variance with a dimension less gets it at the end, which is not how others broadcast."""
    insist(all(tensor.dim() == result.dim() for tensor in find_tensors(args, kwargs)))
    return elementwise(at, result, *args, **kwargs)


def classification(at: Sight, result: Tensor, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """cross_entropy and nll_loss of [N, classes, ...], not reduced."""
    insist(result.dim() == input.dim() - 1 and input.dim() >= 2 and len(result) == len(input))

    def move(tensor: Tensor) -> Move:
        def from_scores(place: Place) -> Place:
            insist(place.dim != 1)
            return place.at(max(0, place.dim - 1))

        return from_scores if tensor.dim() == input.dim() else keep(lambda place: True)

    return at.join((tensor, move(tensor)) for tensor in (input, target))


def by_rows(at: Sight, result: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """[N, D] arguments to [N]: one result per row; a vector may be one of weights of the D."""
    insist(result.dim() == 1)

    def rows_of(tensor: Tensor) -> Move:
        return keep(lambda place: place.dim == 0 and tensor.dim() == 2)

    return at.join((tensor, rows_of(tensor)) for tensor in find_tensors(args, kwargs))


def ctc(at: Sight, result: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """ctc_loss of [time, examples, classes], not reduced."""
    insist(result.dim() == 1 and log_probs.dim() == 3)
    return at.join([(log_probs, lambda place: keep(lambda each: each.dim == 1)(place).at(0))])
