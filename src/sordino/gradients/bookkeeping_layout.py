"""Where the examples are in a tensor, guessed from its shape and then proven from gradients.

An operation may see the examples in its first dimension, in another one (sequence first), or folded with others into
the first (``x.reshape(-1, features)``). Shapes alone cannot tell them apart when two sizes coincide, so a layout counts
as proven only after a backward pass of one example's loss touched no other example's entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """How a tensor holds the examples."""

    DIMENSION = "one dimension counts them"
    MAJOR = "dimension 0 is examples × others, row = example * others + other"
    MINOR = "dimension 0 is others × examples, row = other * examples + example"
    WHOLE = "there is one example and the tensor is its"


@dataclass(frozen=True)
class Layout:
    """A kind, and the dimension for the first of them."""

    kind: Kind = Kind.DIMENSION
    dim: int = 0

    def fits(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether a tensor of this shape can hold `size` examples so."""
        if self.kind is Kind.DIMENSION:
            return len(shape) > self.dim and shape[self.dim] == size
        return size == 1 if self.kind is Kind.WHOLE else len(shape) > 1 and shape[0] % size == 0

    def first(self, tensor: Tensor, size: int) -> Tensor:
        """The tensor with the examples as dimension 0; kinds other than DIMENSION gain a dimension."""
        if self.kind is Kind.DIMENSION:
            return tensor.movedim(self.dim, 0) if self.dim else tensor
        if self.kind is Kind.WHOLE:
            return tensor.unsqueeze(0)
        if self.kind is Kind.MAJOR:
            return tensor.reshape(size, -1, *tensor.shape[1:])
        return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(0, 1)


def candidates(shape: tuple[int, ...], size: int, batch_dims: int) -> list[Layout]:
    """The layouts that a shape allows, most likely first; the examples are among its first `batch_dims` dimensions."""
    if size == 1:
        return [Layout(Kind.WHOLE)]
    plain = [layout for layout in (Layout(dim=dim) for dim in range(batch_dims)) if layout.fits(shape, size)]
    if (plain and plain[0].dim == 0) or batch_dims == 0:
        return plain
    folded = [Layout(kind) for kind in (Kind.MAJOR, Kind.MINOR)]
    return [layout for layout in folded if layout.fits(shape, size)] + plain


@dataclass(frozen=True)
class Examples:
    """A layout for a batch of `size` examples: how a rule looks at the tensors it kept."""

    layout: Layout
    size: int

    def first(self, tensor: Tensor) -> Tensor:
        """[size, ...]: see `Layout.first`."""
        return self.layout.first(tensor, self.size)

    def rows(self, tensor: Tensor) -> Tensor:
        """[size, rows, features]: every dimension between the examples and the last one becomes rows."""
        first = self.first(tensor)
        return first.unsqueeze(1) if first.dim() == 2 else first.flatten(1, -2)

    def items(self, tensor: Tensor) -> Tensor:
        """[size, items, ...]: the entries of dimension 0 that belong to each example, for operations on [N, C, ...]."""
        first = self.first(tensor)
        return first.unsqueeze(1) if self.layout.kind is Kind.DIMENSION else first

    def owners(self, like: Tensor) -> Tensor:
        """Which example every entry belongs to, in a shape that broadcasts to that of `like`."""
        kind, numbers = self.layout.kind, torch.arange(self.size, device=like.device)
        if kind is Kind.WHOLE:
            return numbers.reshape([1] * like.dim())
        if kind is Kind.DIMENSION:
            return numbers.reshape([-1 if dim == self.layout.dim else 1 for dim in range(like.dim())])
        others = len(like) // self.size
        rows = numbers.repeat_interleave(others) if kind is Kind.MAJOR else numbers.repeat(others)
        return rows.reshape(-1, *[1] * (like.dim() - 1))
