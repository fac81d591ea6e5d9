"""How to measure gradients that are sums of outer products: a choice made from shapes alone, so that runs repeat."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

FORM_BYTES = 64 * 2**20
"""Formed gradients of one parameter are kept only up to this size; beyond it they are formed and forgotten."""

CANCELLED = 1e-2
"""A norm by inner products is taken if at most this part of its square may be rounding; otherwise it is formed."""

SLACK = 4
"""Rounding errors of a sum, in units of the last place of what its terms could add up to."""

RUN = 512
"""Entries that one matrix product adds up; long naive sums drift, by about one unit of the last place in 32 terms."""


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

    Rounding is relative to the terms, not to the result, so that an example whose rows cancel would be measured too
    short. With relative errors u of the entries it takes at most u (|X|² |G Gᵀ| + |X Xᵀ| |G|²), by Cauchy-Schwarz.
    """
    among_x, among_g = products(x, x), products(g, g)
    dims = list(range(1, x.dim()))
    size_x, size_g = torch.linalg.vector_norm(among_x, dim=dims), torch.linalg.vector_norm(among_g, dim=dims)
    of_x, of_g = (each.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1) for each in (among_x, among_g))
    squares = among_x.mul_(among_g).sum(dims)
    lost = drift(x) * of_x * size_g + drift(g) * of_g * size_x
    return bounded(trusted(squares, lost, form), (of_x * of_g).sqrt())


def trusted(squares: Tensor, lost: Tensor, form: Callable[[int, int], Tensor]) -> Tensor:
    """Squares with what rounding can have taken from them; from formed gradients where that is not small."""
    total = squares + lost
    for i in (lost > CANCELLED * squares).nonzero().flatten().tolist():
        total[i] = form(i, i + 1).square().sum()
    return total


def products(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ for [..., rows, n], a run of n after another."""
    if left.shape[-1] <= RUN:
        return left @ right.mT
    runs = zip(left.split(RUN, -1), right.split(RUN, -1), strict=True)
    return torch.stack([some @ same.mT for some, same in runs]).sum(0)


def drift(vectors: Tensor) -> float:
    """Relative rounding errors of inner products of such vectors [..., n]."""
    return (SLACK + min(vectors.shape[-1], RUN) / 32) * torch.finfo(vectors.dtype).eps


def bounded(squares: Tensor, mass: Tensor) -> Tensor:
    """Squared norms that the weighted sum cannot exceed: it rounds its terms, whose lengths add up to `mass`, anew."""
    rounding = SLACK * torch.finfo(mass.dtype).eps * mass
    return squares.clamp_min(0).sqrt().add(rounding).square()
