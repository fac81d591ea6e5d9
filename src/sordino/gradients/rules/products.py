"""Sums of products with a parameter among the factors: einsum, batches of matrix products, bilinear forms.

With one letter for each dimension, ``output = einsum("…b…,…,uvw->…b…", …)`` is linear in every factor, and the gradient
of a factor for the entries of example b is the einsum of the output gradient with all other factors, the letter b kept.
It does not matter which factors hold data, or where they came from: b is the letter that counts examples in the output.

Where a letter of the parameter is also one of the other factor's and of the output (heads, experts), gradients are
formed. Otherwise the operation is an ordinary linear map between other letters, whose gradients are outer products.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules import generic, linear
from sordino.gradients.rules.base import (
    BLOCK_BYTES,
    Call,
    Examples,
    Formed,
    Kind,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    Settle,
    precise,
    zero_rows,
)
from sordino.gradients.rules.linear import FORM_BYTES, Outer

EXAMPLE, ROW = "\x00", "\x01"
"""Letters of the examples, and of what is folded with them; torch is given others."""


@dataclass(frozen=True)
class Contraction:
    """Factors with one letter for each of their dimensions, and the letters of their product."""

    terms: list[str]
    output: str

    def refuse_unusual(self, factors: Sequence[Tensor]) -> None:
        """Every letter has one length, and appears once in a term."""
        lengths: dict[str, int] = {}
        for term, factor in zip(self.terms, factors, strict=True):
            pairs = zip(term, factor.shape, strict=True)
            if len(set(term)) < len(term) or any(lengths.setdefault(letter, n) != n for letter, n in pairs):
                raise NoRule("einsum: a diagonal, or a dimension that is broadcast")
        if not set(self.output) <= lengths.keys():
            raise NoRule("einsum: a letter of the result is in no factor")

    def is_linear(self, place: int) -> bool:
        """Whether every letter of the factor is either contracted with the one other factor or in the result."""
        if len(self.terms) != 2:
            return False
        mine, other = set(self.terms[place]), set(self.terms[1 - place])
        result = set(self.output)
        return not mine & other & result and mine <= other | result and other <= mine | result


class Contracted(PerExample):
    """gradient_i as an einsum of the factors' rows i; `terms` of those with rows begin with the examples' letter."""

    manner = "products, formed"

    def __init__(self, terms: list[str], factors: list[Tensor], wanted: str, shape: torch.Size, size: int) -> None:
        self.terms, self.factors, self.wanted = terms, factors, wanted
        self.shape, self.size = shape, size
        self.formed: Formed | None = None

    def squared_norms(self) -> Tensor:
        if self.formed is None and 4 * self.size * self.shape.numel() <= FORM_BYTES:
            self.formed = Formed(self.form(0, self.size))
            self.factors = []
        return self.formed.squared_norms() if self.formed else self.measure_formed()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.formed.weighted_sum(weights) if self.formed else self.sum_formed(weights)

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        rows = [
            factor[start:stop] if EXAMPLE in term else factor
            for term, factor in zip(self.terms, self.factors, strict=True)
        ]
        return multiply(self.terms, rows, EXAMPLE + self.wanted).reshape(stop - start, *self.shape)

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        pairs = zip(self.terms, self.factors, strict=True)
        factors = [zero_rows(factor, bad) if EXAMPLE in term else factor for term, factor in pairs]
        return Contracted(self.terms, factors, self.wanted, self.shape, self.size)


class Turned(PerExample):
    """The gradients of a matrix whose dimensions were made of several, as they are in the parameter."""

    def __init__(self, matrix: Outer, sizes: Sequence[int], order: Sequence[int], shape: torch.Size) -> None:
        self.matrix, self.sizes, self.order = matrix, tuple(sizes), tuple(order)
        self.size, self.shape = matrix.size, shape

    @property
    def manner(self) -> str:
        return self.matrix.manner

    def squared_norms(self) -> Tensor:
        return self.matrix.squared_norms()

    def mass(self) -> Tensor:
        return self.matrix.mass()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.matrix.weighted_sum(weights).reshape(self.sizes).permute(self.order).reshape(self.shape)

    def form(self, start: int, stop: int) -> Tensor:
        formed = self.matrix.form(start, stop).reshape(stop - start, *self.sizes)
        return formed.permute(0, *(1 + dim for dim in self.order)).reshape(stop - start, *self.shape)

    def without(self, bad: Tensor) -> Turned:
        matrix = self.matrix.without(bad)
        return Turned(matrix, self.sizes, self.order, self.shape)  # type: ignore[arg-type]  # or formed, alike


def multiply(terms: Sequence[str], factors: Sequence[Tensor], output: str) -> Tensor:
    """torch.einsum with any characters for letters."""
    names = dict(zip(dict.fromkeys("".join(terms)), string.ascii_letters, strict=False))
    inputs, result = (",".join("".join(map(names.__getitem__, t)) for t in each) for each in (terms, [output]))
    return torch.einsum(f"{inputs}->{result}", *factors)


def settle_product(
    contraction: Contraction, factors: list[Tensor], place: int, shape: torch.Size, otherwise: Settle
) -> Settle:
    """One factor's share; `otherwise` where it has entries of its own for every example."""

    def settle(g: Tensor, at: Examples) -> PerExample:
        wanted = contraction.terms[place]
        letter = "" if at.layout.kind is Kind.WHOLE else contraction.output[at.layout.dim]
        if letter and letter in wanted:
            return otherwise(g, at)
        others = [(t, f) for i, (t, f) in enumerate(zip(contraction.terms, factors, strict=True)) if i != place]
        given = [show_examples(t, precise(f), letter, at) for t, f in [(contraction.output, g), *others]]
        if contraction.is_linear(place):
            return settle_linear(given, wanted, shape, at.size)
        terms, values = [term for term, _ in given], [value for _, value in given]
        return Contracted(terms, values, wanted, shape, at.size)

    return settle


def show_examples(term: str, factor: Tensor, letter: str, at: Examples) -> tuple[str, Tensor]:
    """A factor with the examples first, and the letter of what is folded with them second, if it has examples."""
    if not letter:
        return EXAMPLE + term, factor.unsqueeze(0)
    if letter not in term:
        return term, factor
    place = term.index(letter)
    first = replace(at.layout, dim=0).first(factor.movedim(place, 0), at.size)
    rest = term.replace(letter, "")
    return (EXAMPLE + rest if at.layout.kind is Kind.DIMENSION else EXAMPLE + ROW + rest), first


def settle_linear(given: list[tuple[str, Tensor]], wanted: str, shape: torch.Size, size: int) -> PerExample:
    """Outer products of rows: those letters of the output gradient and of the other factor that are not wanted."""
    (term, g), (other, x) = given
    if EXAMPLE not in other:
        other, x = EXAMPLE + other, x.unsqueeze(0).expand(size, *x.shape)
    outputs, inputs = ("".join(letter for letter in wanted if letter in each) for each in (term, other))
    rows = "".join(letter for letter in term if letter not in wanted and letter != EXAMPLE)
    matrices = []
    for mine, tensor, features in ((other, x, inputs), (term, g, outputs)):
        ordered = tensor.permute(*(mine.index(letter) for letter in EXAMPLE + rows + features))
        count = prod(ordered.shape[1 : 1 + len(rows)])
        matrices.append(ordered.reshape(size, count, prod(ordered.shape[1 + len(rows) :])))
    sizes = {letter: n for each, tensor in given for letter, n in zip(each, tensor.shape, strict=True)}
    together = outputs + inputs
    order = [together.index(letter) for letter in wanted]
    return Turned(Outer(matrices[0], matrices[1]), [sizes[letter] for letter in together], order, shape)


def contract(call: Call, terms: list[str], output: str, factors: list[Tensor], run: Callable[..., Tensor]) -> Tensor:
    """Run a product and keep it for each of its factors that is a parameter."""
    contraction = Contraction(terms, output)
    plain = [call.plain(factor) for factor in factors]
    contraction.refuse_unusual(plain)
    result = run(*plain)
    kept = [factor.detach() for factor in plain]
    otherwise = generic.settle_again(call, run, kept, factors, result)
    shares = [
        ParameterShare(factor, settle_product(contraction, kept, place, factor.shape, otherwise(factor)))
        for place, factor in enumerate(factors)
        if call.tracks(factor)
    ]
    return call.keep(result, plain, shares, result.dim())


def einsum(call: Call, equation: Any, *operands: Any) -> Tensor:
    """torch.einsum with an equation in letters."""
    factors = list(operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands)
    if not isinstance(equation, str) or "->" not in equation:
        raise NoRule("einsum: only an equation with -> has a rule")
    inputs, output = equation.replace(" ", "").split("->")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    pairs = list(zip(inputs.split(","), factors, strict=True))
    hidden = max((factor.dim() - len(term) + 3 for term, factor in pairs if "..." in term), default=0)
    dots = "".join(spare[:hidden])

    def spell(term: str, dims: int) -> str:
        if "..." not in term:
            return term
        count = dims - len(term) + 3
        return term.replace("...", dots[len(dots) - count :])

    terms = [spell(term, factor.dim()) for term, factor in pairs]
    return contract(call, terms, output.replace("...", dots), factors, lambda *f: torch.einsum(equation, *f))


def bmm(call: Call, input: Tensor, mat2: Tensor) -> Tensor:
    """A batch of matrix products."""
    return contract(call, ["zij", "zjk"], "zik", [input, mat2], torch.bmm)


def matmul(call: Call, input: Tensor, other: Tensor) -> Tensor:
    """``a @ b`` with a parameter on either side; ``x @ W`` is a linear layer."""
    if not call.tracks(input) and other.dim() <= 2 and input.dim() >= 2:
        return linear.matmul(call, input, other)
    if input.dim() < 2 or other.dim() < 2:
        raise NoRule("matmul: a vector on the left has no rule")
    count = max(input.dim(), other.dim()) - 2
    batch = string.ascii_lowercase[:count]
    shape = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    terms, factors = [], []
    for tensor, letters in ((input, "XY"), (other, "YZ")):
        mine = tensor.dim() - 2
        lone = [dim for dim in range(mine) if tensor.shape[dim] == 1 and shape[count - mine + dim] != 1]
        terms.append("".join(each for dim, each in enumerate(batch[count - mine :]) if dim not in lone) + letters)
        factors.append(squeeze(call, tensor, lone))
    return contract(call, terms, batch + "XZ", factors, lambda a, b: multiply(terms, [a, b], batch + "XZ"))


def squeeze(call: Call, tensor: Tensor, dims: list[int]) -> Tensor:
    """Without dimensions of length 1."""
    squeezed: Tensor = call.use(torch.squeeze, tensor, tuple(dims)) if dims else tensor
    return squeezed


def bilinear(call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x₁ᵀ W_o x₂ for each o is a linear map of the products of entries of x₁ and x₂."""
    call.only(weight, bias)
    pairs = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    if pairs.numel() * pairs.element_size() > 8 * BLOCK_BYTES:
        raise NoRule("bilinear: too many products of entries")
    output: Tensor = call.use(F.linear, pairs, call.use(torch.flatten, weight, 1), bias)
    return output


RULES: Rules = {
    torch.einsum: einsum,
    **dict.fromkeys((torch.bmm, Tensor.bmm), bmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    F.bilinear: bilinear,
}
