"""F.linear and matrix products with a parameter: gradient_i = G_iᵀ X_i, sums of outer products over the rows of i."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import Call, Formed, NoRule, PerExample, Settle, Share, precise, squares, zeroed
from sordino.gradients.rules.ways import Way, bounded, cheapest, gram_norms, products


class Outer(PerExample):
    """gradient_i = G_iᵀ X_i for X [size, rows, d] and G [size, rows, o]; transposed: X_iᵀ G_i.

    Norms need no gradients: with one row |x|²|g|² (Goodfellow 2015), otherwise the cheapest `Way`.
    """

    def __init__(self, x: Tensor, g: Tensor, transposed: bool = False) -> None:
        self.x, self.g, self.transposed = x, g, transposed
        self.size, self.rows = len(x), x.shape[1]
        o, d = g.shape[-1], x.shape[-1]
        self.shape = torch.Size((d, o) if transposed else (o, d))
        self.formed: Formed | None = None
        self.way = cheapest(self.size, self.rows, d, o)

    @property
    def manner(self) -> str:
        return "product of lengths" if self.rows == 1 else f"rows: {self.way.value}"

    def squared_norms(self) -> Tensor:
        if self.rows == 1:
            return squares(self.x[:, 0]) * squares(self.g[:, 0])
        if self.way is Way.GRAM:
            return gram_norms(self.x, self.g, self.form)
        if self.way is Way.PASS:
            formed = torch.cat([self.form(*block).square().sum((1, 2)) for block in self.blocks()])
            return bounded(formed, self.mass())
        self.formed = Formed(self.form(0, self.size))
        del self.x, self.g
        return self.formed.squared_norms()

    def mass(self) -> Tensor:
        if self.formed is not None:
            return self.formed.mass()
        return (squares(self.x.flatten(1)) * squares(self.g.flatten(1))).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return self.formed.weighted_sum(weights)
        scaled = self.g * weights.to(self.g.dtype).reshape(-1, 1, 1)
        x, g = self.x.reshape(-1, self.x.shape[-1]), scaled.reshape(-1, self.g.shape[-1])
        return x.T @ g if self.transposed else g.T @ x

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        x, g = self.x[start:stop], self.g[start:stop]
        return x.transpose(1, 2) @ g if self.transposed else g.transpose(1, 2) @ x

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        return Outer(zeroed(self.x, bad), zeroed(self.g, bad), self.transposed)


def inner_products(x: Tensor, g: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """<G_iᵀ X_i, H_iᵀ Y_i> = sum over row pairs of (X Yᵀ) ∘ (G Hᵀ), for each example."""
    return (products(x, y) * products(g, h)).sum((1, 2))


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: any leading dimensions."""
    call.only(weight, bias)
    output = F.linear(input, call.plain(weight), call.plain(bias))
    return call.keep(output, (input,), [Share(weight, outer(input)), Share(bias, bias_sum)], output.dim() - 1)


def matmul(call: Call, input: Tensor, other: Tensor) -> Tensor:
    """``x @ W`` with a matrix or a vector parameter on the right."""
    call.only(other)
    if other.dim() > 2 or input.dim() < 2:
        raise NoRule("matmul: only x @ W with W a matrix or a vector has a rule")
    matrix = other if other.dim() == 2 else other.unsqueeze(1)
    output = input @ call.plain(other).reshape(matrix.shape)

    def settle(g: Tensor, at: Examples) -> PerExample:
        kept = Outer(precise(at.rows(input)), precise(at.rows(g)), transposed=True)
        return kept if other.dim() == 2 else Formed((kept.x.transpose(1, 2) @ kept.g).squeeze(2))

    kept = call.keep(output, (input,), [Share(other, settle)], output.dim() - 1)
    return kept if other.dim() == 2 else kept.squeeze(-1)


def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.addmm(bias, x, W)`` with a bias vector."""
    call.only(input, mat2)
    if beta != 1 or alpha != 1 or input.dim() != 1:
        raise NoRule("addmm: only bias + x @ W has a rule")
    output = torch.addmm(call.plain(input), mat1, call.plain(mat2))
    weight = Share(mat2, lambda g, at: Outer(precise(at.rows(mat1)), precise(at.rows(g)), transposed=True))
    return call.keep(output, (mat1,), [Share(input, bias_sum), weight], 1)


def outer(input: Tensor) -> Settle:
    """The share of a weight [out, in] that multiplied `input`."""
    return lambda g, at: Outer(precise(at.rows(input)), precise(at.rows(g)))


def bias_sum(g: Tensor, at: Examples) -> PerExample:
    """The share of a bias added to the last dimension."""
    rows = precise(at.rows(g))
    return Formed(rows[:, 0] if rows.shape[1] == 1 else rows.sum(1))


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
}
