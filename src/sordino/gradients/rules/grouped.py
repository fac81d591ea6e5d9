"""grouped_mm: rows sorted by group, each group with a matrix of its own, as mixtures of experts use them.

The gradient of example i in matrix e is the sum of outer products over the rows of example i in group e.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    NoRule,
    Owners,
    ParameterShare,
    PerExample,
    Rules,
    precise,
)
from sordino.gradients.rules.linear import Outer


class Stacked(PerExample):
    """Gradients of [groups, inputs, outputs], one part for each group; a group without rows has none."""

    manner = "rows of each group"

    def __init__(self, parts: Sequence[PerExample | None], size: int, shape: torch.Size, like: Tensor) -> None:
        self.parts, self.size, self.shape, self.like = list(parts), size, shape, like.new_empty(0)

    def squared_norms(self) -> Tensor:
        squares = [part.squared_norms() for part in self.parts if part is not None]
        return torch.stack(squares).sum(0) if squares else self.like.new_zeros(self.size)

    def mass(self) -> Tensor:
        masses = [part.mass().square() for part in self.parts if part is not None]
        return torch.stack(masses).sum(0).sqrt() if masses else self.like.new_zeros(self.size)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.like.new_zeros(self.shape)
        for mine, part in zip(total, self.parts, strict=True):
            if part is not None:
                mine.copy_(part.weighted_sum(weights))
        return total

    def form(self, start: int, stop: int) -> Tensor:
        formed = self.like.new_zeros(stop - start, *self.shape)
        for group, part in enumerate(self.parts):
            if part is not None:
                formed[:, group] = part.form(start, stop)
        return formed

    def without(self, bad: Tensor) -> Stacked:
        parts = [None if part is None else part.without(bad) for part in self.parts]
        return Stacked(parts, self.size, self.shape, self.like)


def grouped_mm(call: Call, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Rows of mat_a [rows, inputs] in groups that end at `offs`, times mat_b [groups, inputs, outputs]."""
    call.only(mat_b)
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or any(each is not None for each in options.values()):
        raise NoRule("grouped_mm: only rows in groups, times one matrix for each, have a rule")
    output = call.function(mat_a, call.plain(mat_b), offs=offs)
    ends = offs.tolist()

    def settle(g: Tensor, at: Examples) -> PerExample:
        owners = at.owners(g).expand(len(g), 1).flatten()
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        parts = [
            None if start == stop else settle_group(mat_a[start:stop], g[start:stop], owners[start:stop], at.size)
            for start, stop in bounds
        ]
        return Stacked(parts, at.size, mat_b.shape, precise(g))

    return call.keep(output, (mat_a,), [ParameterShare(mat_b, settle)], 1)


def settle_group(x: Tensor, g: Tensor, owners: Tensor, size: int) -> PerExample:
    """The rows of one group, given to their examples."""
    mine = Owners(owners, size)
    return Outer(precise(mine.first(x, size)), precise(mine.first(g, size)), transposed=True)


FUNCTIONS: tuple[Callable[..., Any], ...] = (torch._grouped_mm, F.grouped_mm)
RULES: Rules = dict.fromkeys(FUNCTIONS, grouped_mm)
