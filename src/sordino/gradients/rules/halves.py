"""Matrix products of bfloat16 factors for norms and sums, on processors with instructions for them.

Torch has no product on a processor that takes bfloat16 and gives float32. There are two ways around it, each several
times faster than converting the factors and multiplying them as float32.

*Exact.* A bfloat16 number has 8 digits and the product of two has 16, which float32 holds. So a library that may round
the factors of a float32 product to bfloat16 (`fp32_precision = "bf16"`) rounds nothing if they were bfloat16 before: it
adds up the same products in float32. `multiplying_halves` allows this for such factors and for no others.

*Rounded.* A gradient that is formed for each record may be rounded to bfloat16 once, as torch rounds it in a loop over
records, if both its norm and its share of the sum are then computed in float32 from what was rounded (`form_rounded`).
Nothing needs to be added to the norm: the gradient that is measured is the gradient that is summed. Three conditions:

- *Record by record.* What is rounded is one record's. A rounded sum over records would be an error of up to 2⁻⁹ of the
  whole sum, which one record can move (docs/proofs/rounding.md).
- *In no company.* The result for a record must not depend in any digit on the records beside it. Batches of matrix
  products were found to be so, on one thread and on two; a convolution of all records side by side only on one.
- *All of a parameter's gradient.* If another use's gradient were added to it and cancelled it, the rounding could be
  longer than what is left. Where gradients are combined they are formed in float32.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.kernels import multiply

HALF = torch.bfloat16

CONVERTED = 2**22
"""Entries that are converted to float32 at a time, 16 MB: they are used while a cache still has them."""

INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
"""What a processor can do if it multiplies bfloat16 numbers; others imitate it, which is slower than float32."""


@cache
def has_instructions() -> bool:
    """Whether this processor multiplies bfloat16 numbers and adds the products up in float32.

    Processors of other makers than x86 may add up in other ways; nothing was measured there.
    """
    describe = getattr(torch.cpu, "get_capabilities", None)
    if describe is None or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    found = describe()
    return any(found.get(name, False) for name in INSTRUCTIONS)


def are_halves(*factors: Tensor) -> bool:
    """Whether all factors are bfloat16 numbers in the memory of a processor that can multiply them."""
    return all(each.dtype == HALF and each.device.type == "cpu" for each in factors) and has_instructions()


@contextmanager
def multiplying_halves(*held: Tensor) -> Iterator[None]:
    """Float32 copies of these factors, or of parts of them, are multiplied by the fastest kernel that loses nothing."""
    if not are_halves(*held):
        yield
        return
    backends: Any = torch.backends
    setting = backends.mkldnn.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def form_rounded(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right for each record of bfloat16 [size, rows, n] and [size, rows, m], rounded once, as float32."""
    return torch.bmm(left.transpose(1, 2), right).float()


def list_pieces(*held: Tensor) -> list[tuple[int, int]]:
    """Ranges of examples of which `CONVERTED` entries become float32; all of them if nothing has to be converted."""
    size = len(held[0])
    if not are_halves(*held):
        return [(0, size)]
    step = max(1, CONVERTED // max(1, sum(each[0].numel() for each in held)))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def sum_halves(x: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights[i] * x_iᵀ g_i`` in float32 for bfloat16 [size, rows, n] and [size, rows, m].

    The shorter factor is scaled, after which it is no bfloat16 number: nothing is rounded here.
    """
    swapped = x.shape[-1] > g.shape[-1]
    short, long = (g, x) if swapped else (x, g)
    total = torch.zeros(short.shape[-1], long.shape[-1])
    for start, stop in list_pieces(x, g):
        scaled = short[start:stop] * weights[start:stop].to(torch.float32).reshape(-1, 1, 1)
        total += multiply(scaled.flatten(0, 1), long[start:stop].float().flatten(0, 1))
    return total.T.contiguous() if swapped else total


def cast_as_multiplied(factor: Tensor) -> Tensor:
    """What autocast makes of a float32 factor of a product: made once, and kept instead of it in half of the room.

    Gradients are then those of the product that was computed, as torch's own are.
    """
    kind = factor.device.type
    if factor.dtype is not torch.float32 or not torch.is_autocast_enabled(kind):
        return factor
    return factor.to(torch.get_autocast_dtype(kind))
