"""Infinite MNIST: any number of digits, deformed by random affine maps and elastic fields, made when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from sordino.errors import InvalidInput
from sordino.lab.data.mnist import load_mnist
from sordino.tables.dataset import Data, Preprocessing


@dataclass(frozen=True)
class Deformation:
    """How far a digit is bent (Simard, Steinkraus, Platt 2003: elastic fields of strength alpha, smoothed by sigma).

    Rotation and shear in degrees, shift in pixels, all uniform in plus or minus the value; scale in 1 plus or minus it.
    """

    rotation: float = 10.0
    shear: float = 8.0
    scale: float = 0.12
    shift: float = 1.5
    strength: float = 24.0
    smoothness: float = 4.0


class InfiniteMnist(Dataset[tuple[Tensor, ...]]):
    """Record i is digit ``i % len(images)``, deformed by the i-th stream of `seed`; the first round is left as it is.

    Guarantees: record i depends only on (images, deformation, seed, i), not on records asked for before or with it.
    """

    def __init__(
        self, images: Tensor, classes: Tensor, records: int, seed: int = 0, deformation: Deformation | None = None
    ) -> None:
        if records < 1:
            raise InvalidInput(f"records={records} must be >= 1: 60000 is MNIST itself")
        if not 0 <= seed < 2**64:
            raise InvalidInput(f"seed={seed} must be in 0..2^64 - 1: it keys the stream of every record")
        self.images, self.classes, self.records, self.seed = images, classes, records, seed
        self.deformation = deformation or Deformation()
        self._smooth = smoothing_matrix(images.shape[-1], self.deformation.smoothness)

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, classes = self.batch([index])
        return images[0], classes[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Called by torch's loader for a whole batch: one pass instead of many."""
        images, classes = self.batch(indices)
        return list(zip(images, classes, strict=True))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the records at `indices` as (images, classes)."""
        wanted = np.asarray(indices, dtype=np.int64)
        if outside := [i for i in wanted.tolist() if not 0 <= i < self.records]:
            raise IndexError(f"record {outside[0]} must be in 0..{self.records - 1}")
        base = torch.from_numpy(wanted % len(self.images))
        images = self.images[base]
        bent = [place for place, i in enumerate(wanted.tolist()) if i >= len(self.images)]
        if bent:
            images[bent] = self._deform(images[bent], wanted[bent])
        return images, self.classes[base]

    def _deform(self, images: Tensor, indices: NDArray[np.int64]) -> Tensor:
        """Read each image at affinely and elastically displaced places, between pixels by bilinear interpolation."""
        side = images.shape[-1]
        draws = np.stack([self._draw_uniforms(index, 6 + 2 * side * side) for index in indices.tolist()])
        affine = draw_affine_maps(torch.from_numpy(draws[:, :6]), self.deformation, side)
        grid = functional.affine_grid(affine.to(images), list(images.shape), align_corners=False)
        noise = torch.from_numpy(draws[:, 6:]).reshape(-1, 2, side, side)
        field = self.deformation.strength * (self._smooth @ noise @ self._smooth.T) * 2 / side
        grid = grid + field.permute(0, 2, 3, 1).to(images)
        return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _draw_uniforms(self, index: int, count: int) -> NDArray[np.float64]:
        """Uniforms in [-1, 1) of the stream (seed, index)."""
        stream = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], dtype=np.uint64)))
        return 2 * stream.random(count) - 1


def draw_affine_maps(draws: Tensor, by: Deformation, side: int) -> Tensor:
    """Matrices [N, 2, 3] that turn, shear, scale and shift, from six uniforms in [-1, 1) per record."""
    angle = draws[:, 0] * math.radians(by.rotation)
    shear = torch.tan(draws[:, 1] * math.radians(by.shear))
    wide, high = 1 + by.scale * draws[:, 2], 1 + by.scale * draws[:, 3]
    shift = by.shift * 2 / side * draws[:, 4:6]
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([wide * cos, high * (shear * cos - sin), shift[:, 0]], dim=1)
    second = torch.stack([wide * sin, high * (shear * sin + cos), shift[:, 1]], dim=1)
    return torch.stack([first, second], dim=1)


def smoothing_matrix(side: int, sigma: float) -> Tensor:
    """The matrix G with (G x G^T) = x convolved with a Gaussian of deviation `sigma`, each row summing to one."""
    places = torch.arange(side, dtype=torch.float64)
    weights = torch.exp(-((places[:, None] - places) ** 2) / (2 * sigma**2))
    return weights / weights.sum(dim=1, keepdim=True)


def load_infinite_mnist(records: int = 600_000, seed: int = 0, normalise: str = "unit") -> Data:
    """`records` digits for training, made when they are asked for, and MNIST's own 10,000 held out."""
    base = load_mnist(normalise)
    images, classes = base.train
    step = Preprocessing(
        f"{records} records made from {len(classes)} digits: the guarantee covers one deformation, not the digit",
        reads_private=records > len(classes),
        alternative="count the deformations of a digit as one unit",
    )
    train = InfiniteMnist(images, classes, records, seed)
    return Data("infinite-mnist", train, base.test_set, base.classes, (*base.preprocessing, step))
