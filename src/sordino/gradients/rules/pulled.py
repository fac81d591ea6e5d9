"""Gradients of tensors that were made from parameters alone, pulled back to the parameters.

What a model computes from its parameters without any data (a norm, a product, a parametrisation, a penalty inside of
the loss, a weight that another network makes) is the same for every example; so is its Jacobian J: gradient_i = Jᵀ g_i,
with g_i the gradient of what was made. A number, or a few, have a Jacobian of a few rows, which is found once.
Otherwise as many g_i as fit the memory go back together, by one batched vector-Jacobian product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.gradients.rules.base import BLOCK_BYTES, Formed, PerExample, squares, zero_rows
from sordino.gradients.rules.linear import FORM_BYTES, round_up

FEW = 4
"""The Jacobian of a tensor of so many entries is found row by row."""


def pull_back(inner: PerExample, made: Tensor, parameter: Tensor, isometric: bool) -> PerExample:
    """The gradients of `parameter` from those (`inner`) of a tensor that was made from it, and perhaps from others."""
    pulled = Pulled(inner, made, parameter, isometric)
    if isometric or made.numel() > FEW:
        return pulled
    rows = torch.eye(made.numel(), dtype=torch.float64 if made.dtype == torch.float64 else torch.float32)
    basis = pulled.pull_all(rows.to(made.device).reshape(-1, *made.shape))
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

    def __init__(self, inner: PerExample, made: Tensor, parameter: Tensor, isometric: bool) -> None:
        self.inner, self.made, self.parameter, self.isometric = inner, made, parameter, isometric
        self.size, self.shape = inner.size, parameter.shape
        self.formed: Formed | None = None
        self.singly = False

    def squared_norms(self) -> Tensor:
        if self.isometric:
            return self.inner.squared_norms()
        if self.formed is None and 4 * self.size * self.shape.numel() <= FORM_BYTES:
            formed = [self.form(*block) for block in self.blocks()]
            self.formed = Formed(formed[0] if len(formed) == 1 else torch.cat(formed))
        if self.formed is not None:
            return self.formed.squared_norms()
        return self.measure_formed()

    def mass(self) -> Tensor:
        return self.inner.mass() if self.isometric else super().mass()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.isometric:
            return self.pull(self.inner.weighted_sum(weights))
        return self.formed.weighted_sum(weights) if self.formed else self.sum_formed(weights)

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        gradients = self.inner.form(start, stop)
        if self.isometric and torch.finfo(self.made.dtype).bits < torch.finfo(gradients.dtype).bits:
            return torch.stack([self.pull(gradient) for gradient in gradients])  # in digits
        return self.pull_all(gradients.reshape(-1, *self.made.shape))

    def pull_all(self, cotangents: Tensor) -> Tensor:
        """Jᵀ g for each of [n, *made]: at once, or one after the other where an operation has no rule for that."""
        if not self.singly:
            try:
                (pulled,) = torch.autograd.grad(
                    self.made,
                    self.parameter,
                    cotangents.to(self.made.dtype),
                    retain_graph=True,
                    is_grads_batched=True,
                )
            except RuntimeError:
                self.singly = True
            else:
                return pulled.to(cotangents.dtype)
        return torch.stack([self.pull(cotangent) for cotangent in cotangents])

    def blocks(self) -> list[tuple[int, int]]:
        """As many as fit: what was made is pulled back through several operations, each with its own result."""
        step = max(1, BLOCK_BYTES // max(1, 8 * max(self.shape.numel(), 3 * self.made.numel())))
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def pull(self, gradient: Tensor) -> Tensor:
        cotangent = gradient.reshape(self.made.shape)
        pieces = digits(cotangent, self.made.dtype) if self.isometric else [(cotangent, 1.0)]
        return torch.stack([self.pull_rounded(piece).to(gradient.dtype) * unit for piece, unit in pieces]).sum(0)

    def pull_rounded(self, cotangent: Tensor) -> Tensor:
        """In the precision in which the tensor was made."""
        (pulled,) = torch.autograd.grad(self.made, self.parameter, cotangent.to(self.made.dtype), retain_graph=True)
        return pulled

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        other = Pulled(self.inner.without(bad), self.made, self.parameter, self.isometric)
        other.singly = self.singly
        return other


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
