"""What a rule is, where the examples are in what it kept, and how gradients are kept without being formed.

A rule is looked up by function and has that function's own signature after `call`. It runs the operation with plain
(detached) parameters, so that autograd computes input gradients only, and says for each parameter how the output
gradient becomes that parameter's per-example gradients.

An operation may see the examples in its first dimension, in another one (sequence first), or folded with others into
the first (``x.reshape(-1, features)``). Shapes alone cannot tell these apart when two sizes coincide, so a layout
counts as proven only after a backward pass of one example's loss touched no other example's entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 32 * 2**20
"""Per-example gradients that must be formed are formed for so many examples at once that they fit in this."""

RUN = 256
"""Squares are added up naively over so many entries only: 2**7 more would cost a relative error of 1e-3."""


class NoRule(Exception):
    """This use of a parameter cannot be book-kept; the message says which operation and why."""


class Unproven(NoRule):
    """This batch alone cannot be book-kept; another one may be."""


class Kind(Enum):
    """How a tensor holds the examples."""

    DIMENSION = "one dimension counts them"
    MAJOR = "dimension 0 is examples × others, row = example * others + other"
    MINOR = "dimension 0 is others × examples, row = other * examples + example"
    WHOLE = "there is one example and the tensor is its"
    OWNED = "every entry of one dimension says whose it is"


class Owners:
    """Whose every entry of a dimension is; `first` gives every example as many rows, the missing ones zero."""

    def __init__(self, each: Tensor, size: int) -> None:
        self.each = each
        order = each.argsort(stable=True)
        counts = torch.bincount(each, minlength=size)
        self.width = max(1, int(counts.max()))
        starts = counts.cumsum(0) - counts
        ranks = torch.arange(len(each), device=each.device) - starts[each[order]]
        self.slots = torch.empty_like(each).index_copy_(0, order, each[order] * self.width + ranks)

    def first(self, rows: Tensor, size: int) -> Tensor:
        """[size, width, ...] from rows [entries, ...]."""
        spread = rows.new_zeros(size * self.width, *rows.shape[1:]).index_copy_(0, self.slots, rows)
        return spread.reshape(size, self.width, *rows.shape[1:])


@dataclass(frozen=True)
class Layout:
    """A kind, the dimension for the first and the last of them, and the owners for the last."""

    kind: Kind = Kind.DIMENSION
    dim: int = 0
    owners: Owners | None = None

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
        if self.owners is not None:
            return self.owners.first(tensor.movedim(self.dim, 0), size)
        if self.kind is Kind.MAJOR:
            return tensor.reshape(size, -1, *tensor.shape[1:])
        return tensor.reshape(-1, size, *tensor.shape[1:]).transpose(0, 1)


def list_layouts(shape: tuple[int, ...], size: int, batch_dims: int) -> list[Layout]:
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
        if self.layout.owners is not None:
            numbers = self.layout.owners.each
        if kind in (Kind.DIMENSION, Kind.OWNED):
            return numbers.reshape([-1 if dim == self.layout.dim else 1 for dim in range(like.dim())])
        others = len(like) // self.size
        rows = numbers.repeat_interleave(others) if kind is Kind.MAJOR else numbers.repeat(others)
        return rows.reshape(-1, *[1] * (like.dim() - 1))


class PerExample(ABC):
    """One parameter's gradients for all examples of a batch, in whatever form is cheapest to keep."""

    shape: torch.Size
    size: int

    @property
    @abstractmethod
    def manner(self) -> str:
        """How norms are found, in a word or two for people."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """``|gradient_i|**2``, shape [size]."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * gradient_i``, of the parameter's shape."""

    @abstractmethod
    def form(self, start: int, stop: int) -> Tensor:
        """The gradients of examples start … stop-1, [stop - start, *shape]."""

    def stand_alone(self) -> None:  # noqa: B027 – for most kinds it changes nothing
        """Say, before it is measured, that these are all gradients of their parameter: nothing is added to them."""

    @abstractmethod
    def without(self, bad: Tensor) -> PerExample:
        """The same with the gradients of the examples in the boolean mask `bad` exactly zero."""

    def mass(self) -> Tensor:
        """What the terms of each gradient could add up to in length; rounding is relative to this, not to the norm.

        For what is kept formed it is the norm itself: the weighted sum adds up what was measured.
        """
        return self.squared_norms().sqrt()

    def measure_formed(self) -> Tensor:
        """Squared norms of formed gradients, a block at a time."""
        return torch.cat([squares(self.form(*block).reshape(block[1] - block[0], -1)) for block in self.blocks()])

    def sum_formed(self, weights: Tensor) -> Tensor:
        """The weighted sum of formed gradients, a block at a time: of exactly what was measured."""
        total = weights.new_zeros(self.shape)
        for start, stop in self.blocks():
            formed = self.form(start, stop)
            total = total + torch.tensordot(weights[start:stop].to(formed.dtype), formed, 1)
        return total

    def blocks(self) -> list[tuple[int, int]]:
        """Ranges of examples whose formed gradients fit in BLOCK_BYTES."""
        step = max(1, BLOCK_BYTES // max(1, 8 * self.shape.numel()))
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]


class Formed(PerExample):
    """Gradients as one tensor [size, *shape]: right for biases, scales and small weights."""

    manner = "sums"

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.size = len(gradients)
        self.shape = gradients.shape[1:]

    def squared_norms(self) -> Tensor:
        flat = self.gradients.reshape(self.size, -1)
        return squares(flat)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.gradients.reshape(self.size, -1)
        return (weights.to(flat.dtype) @ flat).reshape(self.shape)

    def form(self, start: int, stop: int) -> Tensor:
        return self.gradients[start:stop]

    def without(self, bad: Tensor) -> Formed:
        return Formed(zero_rows(self.gradients, bad))


Rules = dict[Callable[..., Any], Callable[..., Any]]
"""From a torch function to its rule."""

Settle = Callable[[Tensor, Examples], PerExample]
"""From the output gradient and where the examples are in it to one parameter's per-example gradients."""


@dataclass(frozen=True)
class ParameterShare:
    """One parameter's part in one operation."""

    parameter: Tensor | None
    settle: Settle


class Call(ABC):
    """One use of tracked parameters by one operation, as a rule sees it."""

    function: Callable[..., Any]

    @abstractmethod
    def tracks(self, value: object) -> bool:
        """Whether this is a trainable parameter, or was made from trainable parameters alone."""

    @abstractmethod
    def is_shared(self, tensor: Tensor) -> bool:
        """Whether this is the same for every example by where it came from: parameters, buffers, made from those."""

    @abstractmethod
    def keep(
        self, output: Tensor, inputs: Sequence[Tensor], shares: Sequence[ParameterShare], batch_dims: int
    ) -> Tensor:
        """Remember the operation; the returned tensor is its output, from which the gradient will be taken.

        `inputs` are what the shares look at later and must not be changed in place until then. The examples are among
        the first `batch_dims` dimensions of the output: those that the operation treats alike.
        """

    @abstractmethod
    def receive(
        self, shape: tuple[int, ...], inputs: Sequence[Tensor], shares: Sequence[ParameterShare], batch_dims: int
    ) -> Callable[[Tensor], None]:
        """Like `keep`, for an operation with a backward of its own, which calls what is returned with its gradient."""

    @abstractmethod
    def use(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run another operation by its own rule, for operations made of simpler ones."""

    @abstractmethod
    def final(self) -> bool:
        """Whether the backward pass in progress is the last one, so that buffers may be overwritten."""

    @abstractmethod
    def order_of(self, batch_sizes: Tensor) -> Tensor | None:
        """Which example each row of a packed sequence came from; None when they are in order."""

    anchor: Tensor
    """A scalar with a gradient, to make an operation on nothing trainable part of the graph."""

    def plain(self, value: Any) -> Any:
        """A tracked parameter without its gradient; anything else as it is."""
        return value.detach() if self.tracks(value) else value

    def only(self, *allowed: object) -> None:
        """Refuse unless every tracked argument is one of `allowed`."""
        if len(self.tracked()) > sum(1 for value in allowed if self.tracks(value)):
            raise NoRule(f"{name_of(self.function)}: a parameter is used in an unusual argument")

    @abstractmethod
    def tracked(self) -> list[Tensor]:
        """The tracked tensors among the arguments, once each."""


Normalise = Callable[[], Tensor]
"""Recomputes the normalised input, without scale and shift."""


def sum_channels(normalised: Normalise | None = None) -> Settle:
    """Share of a scale (or of a bias, without `normalised`) per channel of [N, C, ...]: sum of G ∘ normalised."""

    def settle(g: Tensor, at: Examples) -> PerExample:
        values = precise(g) if normalised is None else precise(g) * precise(normalised())
        items = at.items(values)
        return Formed(items.sum([1, *range(3, items.dim())]))

    return settle


def name_of(function: Callable[..., Any]) -> str:
    """A readable name of a torch function."""
    name: str = getattr(function, "__name__", "") or repr(function)
    owner = getattr(function, "__self__", None)
    return f"{getattr(owner, '__name__', owner)}" if name == "__get__" else name


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


def precise(tensor: Tensor) -> Tensor:
    """float32 or better, whatever the model's dtype."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def squares(rows: Tensor) -> Tensor:
    """Sum of squares of each row of [size, n]; by short runs, as torch adds up a norm in one register after another."""
    whole = rows.shape[1] // RUN * RUN
    rest: Tensor = torch.linalg.vector_norm(rows[:, whole:] if whole else rows, dim=1).square_()
    if whole == 0:
        return rest
    runs: Tensor = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, RUN)), dim=2)
    return runs.square_().sum(1).add_(rest)


def zero_rows(tensor: Tensor, bad: Tensor) -> Tensor:
    """A copy whose entries along dimension 0 are zero where `bad`; 0 * NaN does not do this."""
    return tensor.masked_fill(bad.reshape(-1, *[1] * (tensor.dim() - 1)), 0)
