"""How to measure gradients that are sums of outer products: a choice made from shapes alone, so that runs repeat."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

FORM_BYTES = 64 * 2**20
"""Formed gradients of one parameter are kept only up to this size; beyond it they are formed and forgotten."""

CANCELLED = 1e-2
"""A Gram norm is trusted if its square is at least this part of what its terms could add up to."""


class Way(Enum):
    """How squared norms are found, and what is then kept for the weighted sum."""

    GRAM = "Gram matrices"  # inputs and output gradients are kept
    FORM = "formed"  # and kept instead of inputs and output gradients
    PASS = "formed and forgotten"  # a few examples at a time; inputs and output gradients are kept


def cheapest(size: int, rows: int, inputs: int, outputs: int) -> Way:
    """The cheapest way for `size` examples of ``sum over rows of outputs ⊗ inputs``, in multiply-adds.

    A Gram matrix costs rows² (inputs + outputs), a formed gradient rows · inputs · outputs, each 1.3 × more in batches
    of small products than in one large one; every entry written and read again costs about 10. What is formed and kept
    saves the large product of the weighted sum (Bu et al. 2022 compare memory alone: 2 rows² against inputs · outputs).
    """
    entries = inputs * outputs
    product = rows * entries
    costs = {
        Way.GRAM: 1.3 * rows * rows * (inputs + outputs) + 30 * rows * rows + product,
        Way.FORM: 1.3 * product + 30 * entries,
        Way.PASS: 2.3 * product + 20 * entries,
    }
    if 4 * size * entries > FORM_BYTES:
        del costs[Way.FORM]
    return min(costs, key=lambda way: costs[way])


def gram_norms(x: Tensor, g: Tensor, form: Callable[[int, int], Tensor]) -> Tensor:
    """|G_iᵀ X_i|² = sum((X Xᵀ) ∘ (G Gᵀ)) for x, g [size, rows, ...]; formed instead where the terms cancel.

    The terms add up to at most |X Xᵀ| |G Gᵀ|; rounding is relative to that, not to the result, so that an example whose
    rows cancel would be measured too short.
    """
    among_x, among_g = x @ x.mT, g @ g.mT
    dims = list(range(1, x.dim()))
    bounds = torch.linalg.vector_norm(among_x, dim=dims) * torch.linalg.vector_norm(among_g, dim=dims)
    squares = among_x.mul_(among_g).sum(dims)
    for i in (squares < CANCELLED * bounds).nonzero().flatten().tolist():
        squares[i] = form(i, i + 1).square().sum()
    return squares
