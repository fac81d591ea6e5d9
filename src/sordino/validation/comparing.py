"""Examples put together in other ways, and whether two results differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Rows:
    """Examples as one batch, however they were put together."""

    data: Any
    size: int

    def take(self, rows: Sequence[int]) -> Rows:
        index = list(rows)
        return Rows(tree_map(lambda x: x[index], self.data), len(index))

    def shift(self, row: int, scale: float, offset: float) -> Rows:
        """The same examples, with the floating inputs of one of them rescaled."""

        def shifted(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            x = x.clone()
            x[row] = scale * x[row] + offset
            return x

        return Rows(tree_map(shifted, self.data), self.size)


def relative_tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """1e-4 in float32, and scaled by the root of the machine epsilon for the coarsest of the dtypes."""
    coarsest = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)
    single = torch.finfo(torch.float32).eps
    return 1e-4 * math.sqrt((coarsest or single) / single)


def differs(a: Tensor, b: Tensor, relative: float, noise: float) -> bool:
    """Whether values differ by more than ``relative * (|value| + 0.01) + noise``; a bad value equals a bad value."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return True
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    a, b = (x[x.isfinite()].double() for x in (a, b))
    return bool(((a - b).abs() > relative * (torch.maximum(a.abs(), b.abs()) + 0.01) + noise).any())


def noise_floor(a: Tensor, b: Tensor) -> float:
    """Ten times the largest difference of two runs that should be equal: what kernels that vary may do to others."""
    if a.shape != b.shape or a.numel() == 0 or a.is_complex():
        return 0.0
    gap = (a.double() - b.double()).abs()
    return 10.0 * float(gap.nan_to_num(0.0, 0.0, 0.0).max())


def distance(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> tuple[float, float]:
    """Euclidean distance of two gradients and the length of the first; both 0 where that is not finite.

    A bad example with weight 0 still makes ``0 * inf`` in a shared parameter, so bad values here say nothing.
    """
    gap = length = 0.0
    for x, y in zip(a, b, strict=True):
        left, right = (torch.zeros(()) if g is None else g.to_dense().double().cpu() for g in (x, y))
        gap += float((left - right).square().sum())
        length += float(left.square().sum())
    return (math.sqrt(gap), math.sqrt(length)) if math.isfinite(gap + length) else (0.0, 0.0)


def same(a: Any, b: Any) -> bool:
    """Whether two collated batches hold the same values."""
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(
        not differs(x, y, 0.0, 0.0) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
        for x, y in zip(left, right, strict=True)
    )
