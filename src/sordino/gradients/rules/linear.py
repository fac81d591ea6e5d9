"""F.linear and matrix products with a parameter: gradient_i = G_iᵀ X_i, sums of outer products over the rows of i.

How such sums are measured is a choice made from shapes alone, so that runs repeat (`Way`); convolutions and recurrent
layers make the same choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    Formed,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    precise,
    squares,
    zero_rows,
)
from sordino.gradients.rules.halves import (
    are_halves,
    cast_as_multiplied,
    form_rounded,
    list_pieces,
    multiplying_halves,
    sum_halves,
)
from sordino.gradients.rules.kernels import multiply, multiply_each

FORM_BYTES = 64 * 2**20
"""Formed gradients of one parameter are kept only up to this size; larger ones are formed and forgotten."""

CANCELLED = 1e-2
"""A norm by inner products is taken if at most this part of its square may be rounding; otherwise it is formed."""

SLACK = 4
"""Rounding errors of a sum, in units of the last place of what its terms could add up to."""

LEAST = 2**15
"""A norm is at least so many units in the last place of its mass: 1/256 of it in float32."""

PRODUCT_RUN = 512
"""Entries that one matrix product adds up; naive sums of equal terms drift by one unit of the last place in 8 terms."""


class Way(Enum):
    """How squared norms are found, and what is then kept for the weighted sum."""

    GRAM = "Gram matrices"  # inputs and output gradients are kept
    FORM = "formed"  # and kept instead of inputs and output gradients
    PASS = "formed and forgotten"  # a few examples at a time; inputs and output gradients are kept


class Outer(PerExample):
    """gradient_i = G_iᵀ X_i for X [size, rows, d] and G [size, rows, o]; transposed: X_iᵀ G_i.

    Norms need no gradients: with one row |x|²|g|² (Goodfellow 2015), otherwise the cheapest `Way`. The factors are held
    as the model computed them; norms and sums see them in float32 or better, which a half-precision number is exactly.
    """

    def __init__(self, x: Tensor, g: Tensor, transposed: bool = False) -> None:
        self.held_x, self.held_g, self.transposed = x, g, transposed
        self.size, self.rows = len(x), x.shape[1]
        o, d = g.shape[-1], x.shape[-1]
        self.shape = torch.Size((d, o) if transposed else (o, d))
        self.formed: Formed | None = None
        self.measured: Tensor | None = None  # the mass, where Gram matrices gave it
        self.alone = False

    @cached_property
    def way(self) -> Way:
        """How norms of several rows are found."""
        return self.find_way()

    def find_way(self, halves: bool = False) -> Way:
        """The cheapest way for these shapes."""
        o, d = reversed(self.shape) if self.transposed else self.shape
        return choose_way(self.size, self.rows, d, o, halves)

    def stand_alone(self) -> None:
        self.alone = self.rows > 1 and are_halves(self.held_x, self.held_g)
        if self.alone:
            self.way = self.find_way(halves=True)

    @property
    def rounded(self) -> bool:
        """Whether gradients are formed in the precision of their factors (`rules/halves.py`)."""
        return self.alone and self.way is not Way.GRAM

    @property
    def x(self) -> Tensor:
        """The input's rows."""
        return precise(self.held_x)

    @property
    def g(self) -> Tensor:
        """The output gradient's rows."""
        return precise(self.held_g)

    @property
    def manner(self) -> str:
        return "product of lengths" if self.rows == 1 else f"rows: {self.way.value}"

    def squared_norms(self) -> Tensor:
        if self.rows == 1:
            return measure_factor(self.x) * measure_factor(self.g)
        if self.way is Way.GRAM:
            found = [self.compare_rows(*some) for some in list_pieces(self.held_x, self.held_g)]
            squares, masses = zip(*found, strict=True)
            self.measured = torch.cat(masses)
            return torch.cat(squares)
        if self.rounded and self.way is Way.PASS:
            return self.measure_formed()
        if self.way is Way.PASS:
            formed = torch.cat([self.form(*block).square().sum((1, 2)) for block in self.blocks()])
            return round_up(formed, self.mass())
        self.formed = Formed(self.form(0, self.size))
        del self.held_x, self.held_g
        return self.formed.squared_norms()

    def compare_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Squared norms of some examples by Gram matrices, and their mass."""
        x, g = self.held_x[start:stop], self.held_g[start:stop]
        with multiplying_halves(x, g):
            rows, gradients = Gram.of(precise(x)), Gram.of(precise(g))
        mass = (rows.squares * gradients.squares).sqrt()
        return compare(rows, gradients, lambda i, j: self.form(start + i, start + j)), mass

    def mass(self) -> Tensor:
        if self.formed is not None:
            return self.formed.mass()
        if self.measured is not None:
            return self.measured
        x, g = self.x, self.g
        share = SLACK * torch.finfo(g.dtype).eps  # which is what `round_up` makes up for
        return (measure_factor(x, share) * measure_factor(g, share)).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return self.formed.weighted_sum(weights)
        if self.rounded:
            return self.sum_formed(weights)  # of what was measured
        if are_halves(self.held_x, self.held_g):
            total = sum_halves(self.held_x, self.held_g, weights)
            return total if self.transposed else total.T.contiguous()
        x, g = self.x, self.g
        scales = weights.to(g.dtype).reshape(-1, 1, 1)
        if x.shape[-1] < g.shape[-1]:  # the shorter factor: a second gradient of a vocabulary's scores has no room
            x = x * scales
        else:
            g = g * scales
        x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        return multiply(x, g) if self.transposed else multiply(g, x)

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        held = self.held_x[start:stop], self.held_g[start:stop]
        left, right = held if self.transposed else held[::-1]
        if self.rounded:
            return form_rounded(left, right)
        with multiplying_halves(*held):
            return multiply_each(precise(left), precise(right))

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        finite = Outer(zero_rows(self.held_x, bad), zero_rows(self.held_g, bad), self.transposed)
        if self.alone:
            finite.alone, finite.way = True, self.way
        return finite


def inner_products(x: Tensor, g: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """<G_iᵀ X_i, H_iᵀ Y_i> = sum over row pairs of (X Yᵀ) ∘ (G Hᵀ), for each example."""
    return (products(x, y) * products(g, h)).sum((1, 2))


def choose_way(size: int, rows: int, inputs: int, outputs: int, halves: bool = False) -> Way:
    """The cheapest way for `size` examples of ``sum over rows of outputs ⊗ inputs``, in multiply-adds.

    A Gram matrix costs rows² (inputs + outputs), a formed gradient rows · inputs · outputs, each 1.3 × more in batches
    of small products than in one large one; every entry written and read again costs about 10. What is formed and kept
    saves the large product of the weighted sum (Bu et al. 2022 compare memory alone: 2 rows² against inputs · outputs).
    With `halves` a formed gradient takes a quarter, and what is not kept is formed again for the sum.
    """
    entries = inputs * outputs
    product = rows * entries
    formed = 1.3 * product * (0.25 if halves else 1.0)
    costs = {
        Way.GRAM: 1.3 * rows * rows * (inputs + outputs) + 30 * rows * rows + product,
        Way.FORM: formed + 30 * entries,
        Way.PASS: 2 * formed + 40 * entries if halves else 2.3 * product + 20 * entries,
    }
    if 4 * size * entries > FORM_BYTES:
        del costs[Way.FORM]
    return min(costs, key=lambda way: costs[way])


@dataclass(frozen=True)
class Gram:
    """Inner products of an example's rows with each other, their length, the rows' squared length and rounding."""

    among: Tensor
    length: Tensor
    squares: Tensor
    drift: float

    @staticmethod
    def of(rows: Tensor) -> Gram:
        """For [size, ..., rows, n]."""
        among = products(rows, rows)
        length = torch.linalg.vector_norm(among, dim=list(range(1, rows.dim())))
        return Gram(among, length, among.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1), drift(rows))


def gram_norms(x: Tensor, g: Tensor, form: Callable[[int, int], Tensor]) -> Tensor:
    """|G_iᵀ X_i|² = sum((X Xᵀ) ∘ (G Gᵀ)) for x, g [size, rows, ...]; formed instead where the terms cancel."""
    return compare(Gram.of(x), Gram.of(g), form)


def compare(x: Gram, g: Gram, form: Callable[[int, int], Tensor]) -> Tensor:
    """sum((X Xᵀ) ∘ (G Gᵀ)), overwriting the former, and what rounding can have taken from it.

    Rounding is relative to the terms, not to the result, so that an example whose rows cancel would be measured too
    short. With relative errors u of the entries it takes at most u (|X|² |G Gᵀ| + |X Xᵀ| |G|²), by Cauchy-Schwarz.
    """
    squares = x.among.mul_(g.among).sum(list(range(1, x.among.dim())))
    lost = x.drift * x.squares * g.length + g.drift * g.squares * x.length
    return round_up(remeasure_cancelled(squares, lost, form), (x.squares * g.squares).sqrt())


def remeasure_cancelled(squares: Tensor, lost: Tensor, form: Callable[[int, int], Tensor]) -> Tensor:
    """Squares with what rounding can have taken from them; from formed gradients where that is not small."""
    total = squares + lost
    for i in (lost > CANCELLED * squares).nonzero().flatten().tolist():
        total[i] = form(i, i + 1).square().sum()
    return total


def measure_factor(rows: Tensor, share: float = 1.0) -> Tensor:
    """Squares of one factor [size, rows, n] of a product, and what underflow may have taken of them over `share`².

    Float32 has no squares of entries below 1e-19, but their products with long gradients may be long all the same.
    """
    flat = rows.flatten(1)
    return squares(flat).add_(flat.shape[1] * torch.finfo(flat.dtype).tiny / share**2)


def products(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ for [..., rows, n], one run of n after another."""
    if left.shape[-1] <= PRODUCT_RUN:
        return left @ right.mT
    runs = zip(left.split(PRODUCT_RUN, -1), right.split(PRODUCT_RUN, -1), strict=True)
    return torch.stack([some @ same.mT for some, same in runs]).sum(0)


def drift(vectors: Tensor) -> float:
    """Relative rounding errors of inner products of such vectors [..., n]."""
    return (SLACK + min(vectors.shape[-1], PRODUCT_RUN) / 8) * torch.finfo(vectors.dtype).eps


def round_up(squares: Tensor, mass: Tensor) -> Tensor:
    """Squared norms that the weighted sum cannot exceed: it rounds its terms, whose lengths add up to `mass`, anew.

    Nor may an example's terms, which cancel in its own sum, be so long that those of others are lost in their rounding.
    """
    last = torch.finfo(mass.dtype).eps * mass
    return torch.maximum(squares.clamp_min(0).sqrt() + SLACK * last, LEAST * last).square()


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: any leading dimensions."""
    call.only(weight, bias)
    input = cast_as_multiplied(input)
    output = F.linear(input, call.plain(weight), call.plain(bias))
    rows = ParameterShare(weight, lambda g, at: Outer(at.rows(input), at.rows(g)))
    return call.keep(output, (input,), [rows, ParameterShare(bias, sum_rows)], output.dim() - 1)


def matmul(call: Call, input: Tensor, other: Tensor) -> Tensor:
    """``x @ W`` with a matrix or a vector parameter on the right."""
    call.only(other)
    if other.dim() > 2 or input.dim() < 2:
        raise NoRule("matmul: only x @ W with W a matrix or a vector has a rule")
    matrix = other if other.dim() == 2 else other.unsqueeze(1)
    input = cast_as_multiplied(input)
    output = input @ call.plain(other).reshape(matrix.shape)

    def settle(g: Tensor, at: Examples) -> PerExample:
        kept = Outer(at.rows(input), at.rows(g), transposed=True)
        return kept if other.dim() == 2 else Formed((kept.x.transpose(1, 2) @ kept.g).squeeze(2))

    kept = call.keep(output, (input,), [ParameterShare(other, settle)], output.dim() - 1)
    return kept if other.dim() == 2 else kept.squeeze(-1)


def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.addmm(bias, x, W)`` with a bias vector."""
    call.only(input, mat2)
    if beta != 1 or alpha != 1 or input.dim() != 1:
        raise NoRule("addmm: only bias + x @ W has a rule")
    mat1 = cast_as_multiplied(mat1)
    output = torch.addmm(call.plain(input), mat1, call.plain(mat2))
    weight = ParameterShare(mat2, lambda g, at: Outer(at.rows(mat1), at.rows(g), transposed=True))
    return call.keep(output, (mat1,), [ParameterShare(input, sum_rows), weight], 1)


def sum_rows(g: Tensor, at: Examples) -> PerExample:
    """The share of a bias added to the last dimension."""
    rows = precise(at.rows(g))
    return Formed(rows[:, 0] if rows.shape[1] == 1 else rows.sum(1))


RULES: Rules = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
}
