"""Gradients of a parameter that is used more than once, or through tensors made from it: exact cross terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.gradients.rules.base import PerExample, precise
from sordino.gradients.rules.embedding import Looked
from sordino.gradients.rules.halves import multiplying_halves
from sordino.gradients.rules.linear import Outer, Way, drift, inner_products, remeasure_cancelled, round_up
from sordino.gradients.rules.pulled import Spanned
from sordino.gradients.rules.recurrent.gradients import Piece


class Summed(PerExample):
    """gradient_i = sum of several uses' gradients; with `apart` they are orthogonal: different pieces of it."""

    manner = "several uses"

    def __init__(self, parts: Sequence[PerExample], apart: bool = False) -> None:
        self.parts, self.apart = list(parts), apart
        self.size, self.shape = parts[0].size, parts[0].shape

    def squared_norms(self) -> Tensor:
        if self.apart:
            return torch.stack([part.squared_norms() for part in self.parts]).sum(0)
        if all(has_inner(part) for part in self.parts):
            return self.by_inner_products()
        return round_up(self.measure_formed(), self.mass())

    def mass(self) -> Tensor:
        return torch.stack([part.mass() for part in self.parts]).sum(0)

    def by_inner_products(self) -> Tensor:
        """|a + b + …|² = Σ |a|² + 2 Σ <a, b>, without forming anything, and what rounding can have taken away."""
        masses = [None if measures_mass(part) else part.mass() for part in self.parts]  # while it has its factors
        pairs = [(left, right) for index, left in enumerate(self.parts) for right in self.parts[:index]]
        crossed = [2 * inner(left, right) for left, right in pairs]  # first, because measuring may release the factors
        squares = torch.stack([*crossed, *(part.squared_norms() for part in self.parts)]).sum(0)
        known = zip(self.parts, masses, strict=True)
        mass = torch.stack([part.mass() if found is None else found for part, found in known]).sum(0)
        lost = 2 * sum(drift(mass.new_empty(0, length)) for length in self.shape) * mass.square()
        return round_up(remeasure_cancelled(squares, lost, self.form), mass)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.parts[0].weighted_sum(weights)
        total = total.clone() if total._is_view() else total  # which may be part of what a layer remembers
        for part in self.parts[1:]:
            if isinstance(part, Looked):
                part.add_to(total, weights)  # few rows, and never a second table
            else:
                total += part.weighted_sum(weights)
        return total

    def form(self, start: int, stop: int) -> Tensor:
        total = self.parts[0].form(start, stop)
        for part in self.parts[1:]:
            total = total + part.form(start, stop)
        return total

    def without(self, bad: Tensor) -> Summed:
        return Summed([part.without(bad) for part in self.parts], self.apart)


def combine(parts: Sequence[PerExample]) -> PerExample:
    """Several uses of one tensor as one: rows and tokens are joined, everything else is added up."""
    if len(parts) > 1:
        parts = [part.spread() if isinstance(part, Piece) else part for part in parts]
    outers = [part for part in parts if isinstance(part, Outer)]
    looked = [part for part in parts if isinstance(part, Looked)]
    others = [part for part in parts if not isinstance(part, (Outer, Looked))]
    for transposed in (False, True):
        same = [part for part in outers if part.transposed is transposed]
        if same:
            others.append(join_rows(same))
    if len(looked) > 1:
        tokens, g = torch.cat([part.tokens for part in looked], 1), torch.cat([part.g for part in looked], 1)
        looked = [Looked(tokens, g, looked[0].shape[0])]
    others += looked
    return others[0] if len(others) == 1 else Summed(others)


def join_rows(parts: list[Outer]) -> Outer:
    """A matrix used several times is used once on all the rows together."""
    if len(parts) == 1:
        return parts[0]
    x, g = torch.cat([p.held_x for p in parts], 1), torch.cat([p.held_g for p in parts], 1)  # in the widest of dtypes
    return Outer(x, g, parts[0].transposed)


def measures_mass(part: PerExample) -> bool:
    """Whether measuring these gradients finds their mass on the way, and keeps the factors."""
    return isinstance(part, Outer) and part.way is Way.GRAM and part.rows > 1


def has_inner(part: PerExample) -> bool:
    """Whether inner products of this kind need no formed gradients."""
    return isinstance(part, (Looked, Spanned)) or (isinstance(part, Outer) and part.formed is None)


def inner(left: PerExample, right: PerExample) -> Tensor:
    """<left_i, right_i> for a pair of matrix uses: products of rows, or looked-up tokens (tied embeddings)."""
    if isinstance(left, Spanned) or isinstance(right, Spanned):
        return inner_spanned(left, right) if isinstance(right, Spanned) else inner(right, left)
    if isinstance(left, Looked):
        left, right = right, left
    if isinstance(left, Looked) and isinstance(right, Looked):
        same = (left.tokens.unsqueeze(2) == right.tokens.unsqueeze(1)).to(left.g.dtype)
        return (same * (left.g @ right.g.mT)).sum((1, 2))
    assert isinstance(left, Outer)
    over_rows, over_columns = (left.held_x, left.held_g) if left.transposed else (left.held_g, left.held_x)
    if isinstance(right, Outer):
        rows, columns = (right.x, right.g) if right.transposed else (right.g, right.x)
        with multiplying_halves(left.held_x, left.held_g, right.held_x, right.held_g):
            return inner_products(precise(over_rows), precise(over_columns), rows, columns)
    assert isinstance(right, Looked)
    # The token's one-hot row picks an entry of every row factor of the product.
    picked = precise(over_rows.gather(2, right.tokens.unsqueeze(1).expand(-1, over_rows.shape[1], -1)))
    return (picked * (precise(over_columns) @ right.g.mT)).sum((1, 2))


def inner_spanned(left: PerExample, right: Spanned) -> Tensor:
    """<left_i, right_i> where all right ones are combinations of a few matrices: those between the left one's rows."""
    if isinstance(left, Spanned):
        return ((left.factors @ (left.flat() @ right.flat().mT)) * right.factors).sum(1)
    if isinstance(left, Looked):
        each = [(left.g * matrix[left.tokens]).sum((1, 2)) for matrix in right.basis]
    else:
        assert isinstance(left, Outer)
        rows, columns = (left.x, left.g) if left.transposed else (left.g, left.x)
        each = [((columns @ matrix.mT) * rows).sum((1, 2)) for matrix in right.basis]
    return (torch.stack(each, 1) * right.factors).sum(1)
