"""Float32 matrix products for norms and sums, by the faster of torch's two libraries.

Torch multiplies float32 matrices with MKL, which leaves half of the width of AMD's processors unused. oneDNN, which
torch has for convolutions, uses all of it. But it adds up the terms of a product one after the other, so that many
equal terms drift. It gets `TERMS` of them at a time, and the results are added: then it rounds no worse than MKL
(``tests/gradients/rules/test_kernels.py`` compares them).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

TERMS = 128
"""Terms that one product adds up: oneDNN's rounding grows with them, by one unit of the last place in 8."""

WORTH = 2**20
"""Multiply-adds of a product from which on another library pays."""

WORTH_APART = 2**22
"""Multiply-adds of one example's product from which on examples are multiplied one after the other."""


@cache
def find_kernel() -> Any:
    """oneDNN's product a bᵀ, if this processor is one on which MKL is the slower of the two; otherwise None."""
    describe = getattr(torch.cpu, "get_capabilities", None)
    if describe is None or not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None
    found = describe()
    wide = found.get("avx512_f", False) and "AMD" in str(found.get("cpu_name", ""))
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if wide else None


def is_wide(*factors: Tensor) -> bool:
    """Whether the other library is fast on these [..., rows, n]: float32 numbers, without gaps in a run of rows."""
    return find_kernel() is not None and all(
        type(each) is Tensor
        and each.dtype == torch.float32
        and each.device.type == "cpu"
        and (each.is_contiguous() or (each.shape[-2] <= TERMS and each.mT.is_contiguous()))
        for each in factors
    )


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right for [rows, n] and [rows, m]: the sum over rows of what each gives."""
    rows, work = len(left), left.numel() * right.shape[-1]
    if work < WORTH or not is_wide(left, right):
        return left.T @ right
    kernel, columns, others = find_kernel(), left.T, right.T
    total: Tensor = kernel(columns[:, :TERMS], others[:, :TERMS], None, "none", [], "")
    for start in range(TERMS, rows, TERMS):
        run = slice(start, start + TERMS)
        total += kernel(columns[:, run], others[:, run], None, "none", [], "")
    return total


def multiply_each(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right for each example of [size, rows, n] and [size, rows, m]."""
    size, rows, n = left.shape
    m = right.shape[-1]
    if rows * n * m < WORTH_APART or not is_wide(left, right):
        return left.mT @ right
    products = left.new_empty(size, n, m)
    for out, one, other in zip(products, left, right, strict=True):
        out.copy_(multiply(one, other))
    return products
