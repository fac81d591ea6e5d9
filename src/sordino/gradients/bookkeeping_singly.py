"""Exact results for a recorded forward pass with parts that cannot be book-kept: one backward pass per example."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.bookkeeping.recording import Recording
from sordino.gradients.bookkeeping_layout import Kind, Layout
from sordino.gradients.engine import accumulation_dtype
from sordino.gradients.looped import detached_from
from sordino.gradients.rules.base import NoRule
from sordino.gradients.vmapped import InChunks, materialising_microbatch


class OneByOne:
    """A recorded loss vector (`engine.Differentiated`) whose rows are differentiated one after another.

    In the backward pass of one loss every recorded output belongs to one example, so rules need no layout; parameters
    that were left to autograd get their gradients from it.
    """

    def __init__(self, recording: Recording, losses: Tensor, parameters: list[nn.Parameter]) -> None:
        if not losses.requires_grad:
            raise detached_from(parameters)
        self.recording, self.losses, self.parameters = recording, losses, parameters
        self.rows = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
        self.gradients = InChunks(len(losses), materialising_microbatch(parameters), self.compute)
        self.norms = self.gradients.norms

    def compute(self, chunk: range) -> list[Tensor]:
        """[examples, *shape] for each parameter."""
        with torch.autocast(self.losses.device.type, enabled=False):
            each = [self.gradient(row) for row in self.rows[chunk.start : chunk.stop]]
        return [torch.stack(column) for column in zip(*each, strict=True)]

    def gradient(self, row: Tensor) -> list[Tensor]:
        """The gradient of the loss that `row` of the identity picks, by one backward pass."""
        book = Book(self.parameters, self.recording, 1, Layout(Kind.WHOLE))
        self.recording.on_gradient = book.receive
        made = [each.handle for each in self.recording.tracked.values() if each.handle is not each.attached]
        inputs = [*self.parameters, self.recording.anchor, *made]
        left = torch.autograd.grad(self.losses, inputs, row, retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in left[len(self.parameters) + 1 :]):
            raise NoRule("autograd.Function: a tensor made from parameters is used by a custom function")
        kept = book.close().weighted_sum(torch.ones(1, device=row.device))
        pairs = zip(kept, left, strict=False)
        return [mine if theirs is None else mine + theirs.to(accumulation_dtype(theirs)) for mine, theirs in pairs]

    @property
    def isolated(self) -> bool:
        """Whether every example is finite; in a graph of the user's a NaN reaches the other examples' gradients."""
        return bool(torch.isfinite(self.norms).all())

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        return self.gradients.weighted_sum(weights)
