"""Gradients seen in another geometry: each parameter's gradient is stretched by a fixed linear map, then measured.

With symmetric matrices L and R the gradient M of a parameter, as a matrix [first dimension, all others], becomes L M R.
The map is the same for every example, so that it commutes with weighted sums: only norms tell that it was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sordino.gradients.engine import Engine, FullPrecision
from sordino.noise import widen


@dataclass(frozen=True, eq=False)
class Stretch:
    """L M R for one parameter of this `shape`; a vector is a diagonal matrix, None is the identity."""

    shape: torch.Size
    left: Tensor | None = None
    right: Tensor | None = None

    def apply(self, gradients: Tensor) -> Tensor:
        """[..., *shape] to the same."""
        ahead = gradients.shape[: gradients.dim() - len(self.shape)]
        matrices = gradients.reshape(*ahead, self.shape[0], -1)
        if self.left is not None:
            left = self.left.to(matrices.dtype)
            matrices = left.unsqueeze(-1) * matrices if left.dim() == 1 else left @ matrices
        return stretch_rows(matrices, self.right).reshape(gradients.shape)

    def scale(self, factor: float) -> Stretch:
        """The same, with gradients longer by a factor."""
        left = torch.ones(self.shape[0]) if self.left is None else self.left
        return Stretch(self.shape, factor * left, self.right)

    @cached_property
    def gain(self) -> float:
        """How much longer a gradient may become."""
        found = (1.0 if each is None else float(_find_gain(each)) for each in (self.left, self.right))
        return float(torch.tensor(list(found), dtype=torch.float64).prod())


def _find_gain(factor: Tensor) -> Tensor:
    return factor.abs().max() if factor.dim() == 1 else torch.linalg.matrix_norm(widen(factor).cpu(), 2)


def stretch_rows(rows: Tensor, factor: Tensor | None) -> Tensor:
    """[..., n] times a symmetric or a diagonal matrix."""
    if factor is None:
        return rows
    factor = factor.to(rows.dtype)
    return rows * factor if factor.dim() == 1 else rows @ factor


@dataclass(frozen=True, eq=False)
class Stretches:
    """The maps of a model's trained `parameters`, one for each; None leaves a gradient as it is."""

    parameters: Sequence[Tensor]
    maps: Sequence[Stretch | None]

    def fit(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they belong to exactly these parameters."""
        pairs = zip(self.parameters, parameters, strict=False)
        return len(self.parameters) == len(parameters) and all(mine is yours for mine, yours in pairs)

    def apply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Stretch one tensor [..., *shape] for each parameter."""
        if not gradients:
            return []
        with FullPrecision(gradients[0].device):
            pairs = zip(gradients, self.maps, strict=True)
            return [each if found is None else found.apply(each) for each, found in pairs]


class StretchingEngine(Engine, Protocol):
    """An engine that measures and sums stretched gradients if it is given maps: every engine with exact norms."""

    stretches: Stretches | None
