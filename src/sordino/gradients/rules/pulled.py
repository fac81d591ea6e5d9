"""Gradients of tensors that were made from parameters alone, pulled back to the parameters.

What a model computes from its parameters without any data (a norm, a product, a parametrisation, a penalty inside of
the loss, a weight that another network makes) is the same for every example; so is its Jacobian J: gradient_i = Jᵀ g_i,
with g_i the gradient of what was made. A number, or a few, have a Jacobian of a few rows, which is found once.
Otherwise as many g_i as fit the memory go back together, by one batched vector-Jacobian product; or in closed form,
where what was made was made row by row (`rowwise`).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.base import BLOCK_BYTES, Formed, NoRule, PerExample, squares, zero_rows
from sordino.gradients.rules.linear import FORM_BYTES, round_up
from sordino.gradients.rules.rowwise import Returning, RowMap, Rowwise

FEW = 4
"""The Jacobian of a tensor of so many entries is found row by row."""


class WayBack:
    """The way back from a tensor to all the parameters it was made from: taken once for all of them.

    `squares` and `formed` are what the first of them to be measured found for the others too.
    """

    def __init__(self, made: Tensor, parameters: list[Tensor], rows: RowMap | None = None) -> None:
        self.made, self.parameters, self.rows = made, parameters, rows
        self.returning: Returning | None = None
        self.singly = False
        self.squares: dict[int, Tensor] = {}
        self.formed: dict[int, Formed] = {}

    def measure(self, inner: PerExample) -> None:
        """Pull all gradients back, a block at a time, and keep those of the parameters where all fit the memory."""
        lengths: list[list[Tensor]] = [[] for _ in self.parameters]
        kept: list[list[Tensor]] = [[] for _ in self.parameters]
        for start, stop in self.blocks(inner.size):
            for place, pulled in enumerate(self.pull_all(inner.form(start, stop).reshape(-1, *self.made.shape))):
                lengths[place].append(squares(pulled.reshape(stop - start, -1)))
                if 4 * inner.size * pulled[0].numel() <= FORM_BYTES:
                    kept[place].append(pulled)
        for parameter, found, whole in zip(self.parameters, lengths, kept, strict=True):
            self.squares[id(parameter)] = torch.cat(found)
            if whole:
                self.formed[id(parameter)] = Formed(whole[0] if len(whole) == 1 else torch.cat(whole))

    @cached_property
    def is_written(self) -> bool:
        """Whether functions written in Python are on the way, which may go back otherwise every time."""
        seen = set[Any]()
        ahead: list[Any] = [self.made.grad_fn]
        while ahead:
            node = ahead.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            if node is not None and node not in seen:
                seen.add(node)
                ahead += [each for each, _ in node.next_functions]
        return False

    def pull_all(self, cotangents: Tensor) -> list[Tensor]:
        """Jᵀ g for each of [n, *made]: at once, or one after the other where an operation has no rule for that."""
        if not self.singly:
            try:
                return self._pull(cotangents, batched=True)
            except RuntimeError:
                self.singly = True
        each = [self._pull(cotangent, batched=False) for cotangent in cotangents]
        return [torch.stack(column) for column in zip(*each, strict=True)]

    def _pull(self, cotangents: Tensor, batched: bool) -> list[Tensor]:
        """In the precision in which the tensor was made; zero for a parameter that only lent its shape."""
        rounded = cotangents.to(self.made.dtype)
        pulled = torch.autograd.grad(
            self.made, self.parameters, rounded, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        ahead = (len(cotangents),) if batched else ()
        return [
            cotangents.new_zeros(*ahead, *parameter.shape) if each is None else each.to(cotangents.dtype)
            for each, parameter in zip(pulled, self.parameters, strict=True)
        ]

    def pull_one(self, cotangent: Tensor) -> Tensor:
        """Jᵀ g for the one parameter."""
        (pulled,) = self._pull(cotangent, batched=False)
        return pulled

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """As many as fit: what was made is pulled back through several operations, each with its own result."""
        entries = max(3 * self.made.numel(), *(parameter.numel() for parameter in self.parameters))
        step = max(1, BLOCK_BYTES // max(1, 8 * entries))
        return [(start, min(start + step, size)) for start in range(0, size, step)]


def pull_back(inner: PerExample, way: WayBack, parameter: Tensor, isometric: bool) -> PerExample:
    """The gradients of `parameter` from those (`inner`) of a tensor that was made from it, and perhaps from others."""
    made = way.made
    if way.rows is not None and not isometric:
        way.returning = way.returning or Returning(inner, way.rows)
        return Rowwise(way.returning, next(i for i, each in enumerate(way.parameters) if each is parameter))
    if isometric or made.numel() > FEW:
        return Pulled(inner, way, parameter, isometric)
    wide = torch.float64 if made.dtype == torch.float64 else torch.float32
    rows = torch.eye(made.numel(), dtype=wide, device=made.device)
    (basis,) = WayBack(made, [parameter]).pull_all(rows.reshape(-1, *made.shape))
    return Spanned(inner.form(0, inner.size).reshape(inner.size, -1), basis)


class Spanned(PerExample):
    """gradient_i = sum of factors[i, k] * basis[k] over a few k: all examples' gradients lie in one small space."""

    manner = "a few directions"

    def __init__(self, factors: Tensor, basis: Tensor) -> None:
        self.factors, self.basis = factors, basis.to(factors.dtype)
        self.size, self.shape = len(factors), basis.shape[1:]

    def flat(self) -> Tensor:
        """[k, entries]."""
        return self.basis.reshape(len(self.basis), -1)

    def mass(self) -> Tensor:
        return self.factors.abs() @ squares(self.flat()).sqrt()

    def squared_norms(self) -> Tensor:
        if len(self.basis) == 1:
            return round_up(self.factors[:, 0].square() * squares(self.flat()), self.mass())
        return round_up(self.measure_formed(), self.mass())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(weights.to(self.factors.dtype) @ self.factors, self.basis, 1)
        return total

    def form(self, start: int, stop: int) -> Tensor:
        formed: Tensor = torch.tensordot(self.factors[start:stop], self.basis, 1)
        return formed

    def without(self, bad: Tensor) -> Spanned:
        return Spanned(zero_rows(self.factors, bad), self.basis)


class Pulled(PerExample):
    """Gradients of a tensor made from parameters alone, pulled back to one of them through its autograd graph.

    With `isometric` the tensor is the parameter rearranged or a piece of it: lengths are those of the tensor, and a sum
    is pulled back without rounding. Otherwise the gradients that were measured are added up, one by one: the sum's way
    back is in the precision of the model, and it may drop a direction in which one example is longer than all others.
    """

    manner = "pulled back"

    def __init__(self, inner: PerExample, way: WayBack, parameter: Tensor, isometric: bool) -> None:
        self.inner, self.way, self.parameter, self.isometric = inner, way, parameter, isometric
        self.size, self.shape = inner.size, parameter.shape

    @property
    def formed(self) -> Formed | None:
        """All gradients, where they were measured and kept."""
        return self.way.formed.get(id(self.parameter))

    def squared_norms(self) -> Tensor:
        if self.isometric:
            return self.inner.squared_norms()
        if id(self.parameter) not in self.way.squares:
            self.way.measure(self.inner)
        return self.way.squares[id(self.parameter)]

    def mass(self) -> Tensor:
        return self.inner.mass() if self.isometric else super().mass()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.isometric:
            return self.pull(self.inner.weighted_sum(weights))
        return self.formed.weighted_sum(weights) if self.formed else self.sum_formed(weights)

    def sum_formed(self, weights: Tensor) -> Tensor:
        """As ever, but a gradient that comes back differently the second time is no longer than the measured one."""
        squared = self.way.squares.get(id(self.parameter))
        if squared is None:  # one of several uses, measured together; `form` refuses there what may differ
            return super().sum_formed(weights)
        total, lengths = weights.new_zeros(self.shape), squared.sqrt()
        for start, stop in self.blocks():
            again = self._form(start, stop)
            longer = squares(again.reshape(stop - start, -1)).sqrt()
            shorter = (lengths[start:stop] / longer).clamp(max=1.0).nan_to_num(nan=0.0)
            total = total + torch.tensordot((weights[start:stop] * shorter).to(again.dtype), again, 1)
        return total

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is None and not self.isometric and self.way.is_written:
            self.way.measure(self.inner)
            if self.formed is None:
                raise NoRule("autograd.Function: its backward pass, which may be random, would have to run twice")
        return self._form(start, stop)

    def _form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        gradients, made = self.inner.form(start, stop), self.way.made
        if self.isometric and torch.finfo(made.dtype).bits < torch.finfo(gradients.dtype).bits:
            return torch.stack([self.pull(gradient) for gradient in gradients])  # in digits
        (pulled,) = self._alone().pull_all(gradients.reshape(-1, *made.shape))
        return pulled

    def _alone(self) -> WayBack:
        """The way to this parameter, past the others."""
        if len(self.way.parameters) == 1:
            return self.way
        way = WayBack(self.way.made, [self.parameter])
        way.singly = self.way.singly
        return way

    def blocks(self) -> list[tuple[int, int]]:
        return self.way.blocks(self.size)

    def pull(self, gradient: Tensor) -> Tensor:
        """One gradient of the tensor, or a sum of some."""
        cotangent = gradient.reshape(self.way.made.shape)
        pieces = digits(cotangent, self.way.made.dtype) if self.isometric else [(cotangent, 1.0)]
        way = self._alone()
        return torch.stack([way.pull_one(piece).to(gradient.dtype) * unit for piece, unit in pieces]).sum(0)

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        way = WayBack(self.way.made, [self.parameter])
        way.singly, way.squares = self.way.singly, self.way.squares
        return Pulled(self.inner.without(bad), way, self.parameter, self.isometric)


def digits(values: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, float]]:
    """Values as a sum of (tensor that `dtype` holds exactly, power of two).

    Three times the 8 bits of bfloat16 are the 24 of float32; float16 has more bits and a range that `unit` fits.
    """
    if torch.finfo(dtype).bits >= torch.finfo(values.dtype).bits:
        return [(values, 1.0)]
    largest = float(values.abs().max()) if values.numel() else 0.0
    unit = 2.0 ** (math.frexp(largest)[1] - 14) if math.isfinite(largest) else 1.0
    left, pieces = values / unit, []
    for _ in range(3):
        pieces.append((left.to(dtype), unit))
        left = left - pieces[-1][0]
    return pieces
