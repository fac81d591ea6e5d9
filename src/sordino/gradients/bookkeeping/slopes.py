"""Gradients that a loss takes by its own activations, with their graph: a penalty on slopes, a score that is matched.

The examples are followed through them. Where the outputs' entries depend on their own examples alone, as the follower
has found, so do the gradients of their sum, by whatever activation: an entry of example i gets the gradient of the
outputs of example i. Whether a loss does this is known after its first batch failed; only then is it recorded so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import proxy, ref

import torch
from torch import Tensor

from sordino.gradients.bookkeeping.following import find_state
from sordino.gradients.rules.base import NoRule
from sordino.gradients.rules.slopes import Back

if TYPE_CHECKING:
    from sordino.gradients.bookkeeping.recording import Recording, Use

SUMS = (torch.sum, Tensor.sum)


class Differentiates(NoRule):
    """The loss takes gradients by its activations: it has to be recorded with their ways back."""


class Slopes:
    """The gradients within one recorded loss."""

    def __init__(self, recording: Recording) -> None:
        self.recording: Recording = proxy(recording)  # which has these: neither waits for the garbage collector
        self.totals: dict[int, tuple[ref[Tensor], tuple[int, int]]] = {}
        self.apart = False

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember a plain sum over all examples: its gradients are those of its terms."""
        follower = self.recording.follower
        whole = func in SUMS and len(args) == 1 and not kwargs
        if whole and follower is not None and follower.place(args[0]) is not None:
            self.totals[id(result)] = ref(result), find_state(result)

    def differentiate(self, outputs: Any, inputs: Any, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` with a graph, by recorded ways back."""
        follower, starts = self.recording.follower, given.get("grad_outputs")
        if given.get("is_grads_batched"):
            raise NoRule("the loss differentiates the model in batches: its second derivatives are not recorded")
        starts = [starts] if starts is None or isinstance(starts, Tensor) else list(starts)
        starts = starts if len(starts) == len(outputs) else [None] * len(outputs)
        before = self.apart
        self.apart = follower is not None and all(map(self.is_apart, outputs, starts))
        try:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, inputs, **given)
        finally:
            apart, self.apart = self.apart, before
        for tensor, slope in zip(inputs, found, strict=True):
            if apart and follower is not None and slope is not None:
                follower.put(slope, follower.place(tensor))
        return found

    def is_apart(self, output: Tensor, start: Tensor | None) -> bool:
        """Whether each entry of an output, or each term of it, and what it is weighted by, is of one example alone."""
        follower = self.recording.follower
        assert follower is not None
        total, state = self.totals.get(id(output), (lambda: None, None))
        place = follower.place(output)
        if start is None or not start.requires_grad:
            return place is not None or (total() is output and state == find_state(output))
        mine = follower.place(start)
        return place is not None and mine is not None and mine.equals(place)

    def run_back(self, use: Use, back: Back, gradient: Tensor) -> Tensor:
        """The gradient of a use's input: recorded where somebody wants its graph."""
        recording = self.recording
        if not torch.is_grad_enabled():
            return back(lambda function, *args: function(*map(without_graph, args)), gradient)
        if recording.follower is not None and self.apart:
            recording.follower.put(gradient, use.place)
        return back(lambda function, *args: recording.__torch_function__(function, (), args), gradient)


def without_graph(value: Any) -> Any:
    """A tensor alone."""
    return value.detach() if isinstance(value, Tensor) else value


class WithWayBack(torch.autograd.Function):
    """An output whose gradient goes back to `input` by a function."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, back: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        ctx.back = back
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.back(gradients[0])
