"""From norms to weights: how much of each example's gradient enters the sum.

Every weighing keeps ``weight * norm <= clip``, which is the sensitivity that the noise is scaled to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.sampling.draw import Draw

ROUNDING = 5e-5
"""Weights shrink by this much, so that rounding in float32 norms and sums moves no sum by more than the bound.

What rounding does, and how much of it this covers: docs/proofs/rounding.md.
"""


class Weighing(Protocol):
    """A function from norms to one weight per example."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        """Weights with ``weight * norm <= clip``; 0 where the norm is not finite (law 6)."""
        ...


def _finite(weights: Tensor, norms: Tensor) -> Tensor:
    return torch.where(torch.isfinite(norms), weights, torch.zeros_like(weights))


@dataclass(frozen=True)
class Flat:
    """Flat clipping: ``min(1, C / |g|)`` (Abadi et al. 2016, Alg. 1).

    Guarantees: contributions no longer than C. Edge cases: a zero gradient has weight 1; a NaN or infinite one 0.
    """

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return _finite((clip * (1 - ROUNDING) / norms).clamp(max=1.0), norms)


@dataclass(frozen=True)
class Automatic:
    """Automatic clipping, AUTO-S: ``C / (|g| + gamma)`` (Bu et al. 2023, Eq. 5), which spares the tuning of C.

    Guarantees: contributions shorter than C, hence the sensitivity of flat clipping.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise InvalidInput(f"gamma={self.gamma} must be > 0: it keeps tiny gradients tiny; 0.01 is the usual value")

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return _finite(clip * (1 - ROUNDING) / (norms + self.gamma), norms)


@dataclass(frozen=True)
class Importance:
    """Importance weights with rejection: ``C / max(|g|, floor)`` above the record's threshold, else 0 (DPIS, Eq. 15).

    A record is used with a probability in proportion to the length of its gradient, so that all used gradients are
    made equally long. The floor, which the paper lacks, keeps the weights finite: they would else turn the rounding of
    a tiny norm into a contribution above the bound.

    Guarantees: contributions no longer than C, whatever the norms. Needs the thresholds of `sampling.importance`.
    """

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        if draw.thresholds is None or not draw.floor > 0:
            raise InvalidInput("weighing=Importance() needs draws with thresholds: use sampler=Importance(), or Flat()")
        lengths = norms.clamp(min=draw.floor)
        used = lengths > draw.thresholds.to(norms.device)
        return _finite(torch.where(used, clip * (1 - ROUNDING) / lengths, torch.zeros_like(norms)), norms)
