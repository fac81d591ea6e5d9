"""Two layers of patches: patches of the picture, and patches of what the first layer saw; all fitted to scenes.

A convolutional kernel network (Mairal et al. 2014; Coates and Ng 2012) whose filters are random patches of invented
scenes (`sordino.lab.features.scenes`), so that no record is read but the one that is described.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.patches import CONTRAST, make_filters
from sordino.lab.features.scattering import progress_bar
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import Map, fit_cells, scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK = 8
_FITTED, _EXAMPLES, _SAMPLE = 1500, 4000, 60_000
_WINDOW, _STRIDE, _SIDE = 3, 2, 3
"""The first layer's maps are averaged over windows of side 3, two apart; the second layer's patches have side 3."""
_RIDGE, _PATCH_RIDGE, _FLOOR = 0.03, 0.1, 0.01
_EDGE = 1.0
"""Responses of the second layer, of variance 1 over scenes, count from here on."""


@dataclass(frozen=True)
class Layers:
    """The choices: `filters` of `side` x `side` pixels, `second` filters in the second layer, `grid` x `grid` cells.

    A response of the first layer below `threshold` counts as none. The second layer sees `channels` directions of the
    first one's maps. After whitening, `kept` and `kept_second` channels of each cell remain. `share` of the squared
    norm is the second layer's. With `mirror`, a record's features are the mean of its own and of its mirror image's.
    """

    filters: int = 200
    second: int = 512
    side: int = 6
    grid: int = 4
    threshold: float = 0.25
    channels: int = 64
    kept: int = 200
    kept_second: int = 160
    share: float = 0.4
    mirror: bool = True

    def __post_init__(self) -> None:
        counts = (self.filters, self.second, self.side, self.grid, self.channels, self.kept, self.kept_second)
        if min(counts) < 1:
            raise InvalidInput(f"every count of {self} must be >= 1")
        if self.kept > 2 * self.filters or self.kept_second > 2 * self.second or self.channels > 2 * self.filters:
            raise InvalidInput(f"{self} keeps more channels than there are: two for each filter, one of either sign")
        if self.threshold < 0 or not 0 < self.share < 1:
            raise InvalidInput(f"threshold={self.threshold} must be >= 0 and share={self.share} between 0 and 1")

    @property
    def width(self) -> int:
        """How many features a record has."""
        return self.grid**2 * (self.kept + self.kept_second)


def describe_layers(
    images: Tensor, choice: Layers | None = None, *, folder: Path | None = None, quiet: bool = False
) -> Tensor:
    """Features [N, grid^2 * (kept + kept_second)] of norm 1 of images [N, channels, H, W], from `folder` if known.

    Either layer: normalised patches times whitened filters, both signs rectified, averaged over the cells of the grid;
    roots, centred and of norm 1, are whitened over channels and then over cells, and brought to norm 1 again.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or Layers()
    least = choice.side + _WINDOW + _STRIDE * (choice.grid + _SIDE - 2) - 1
    if images.dim() != 4 or min(images.shape) == 0 or images.shape[2] != images.shape[3] or images.shape[3] < least:
        raise InvalidInput(f"images have shape {tuple(images.shape)}, must be [N, channels, H, H] with H >= {least}")
    images = images.detach().to(torch.float32).contiguous()

    @torch.no_grad()
    def make(path: Path) -> None:
        features = fit_layers(choice, images.shape[3], images.shape[1])
        output = allocate(path, (len(images), choice.width))
        with progress_bar(quiet) as progress:
            task = progress.add_task("features of two layers of patches", total=len(images))
            for begin in range(0, len(images), CHUNK):
                output[begin : begin + CHUNK] = features(images[begin : begin + CHUNK]).numpy()
                progress.advance(task, CHUNK)
        output.flush()

    place = folder or cache_folder() / "layers"
    return remember_tensor(place, (VERSION, choice), (images,), make, title="features of two layers of patches")


@torch.no_grad()
def fit_layers(choice: Layers, side: int, channels: int) -> Map:
    """The map from images of this size to their features, fitted to scenes alone."""
    first = _FirstLayer(make_filters(choice.filters, choice.side, draw_scenes(_FITTED, side, channels, 1)), choice)
    second = _fit_second(first, draw_scenes(_FITTED, side, channels, 2), choice)

    def pool(images: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([images, images.flip(3)]) if choice.mirror else images
        maps = first.respond(both)
        layers = [_average_cells(each, choice.grid) for each in (maps, second(first.shrink(maps)))]
        if choice.mirror:
            layers = [(each[: len(images)] + each[len(images) :]) / 2 for each in layers]
        return _take_roots(layers[0]), _take_roots(layers[1])

    examples = [pool(part) for part in draw_scenes(_EXAMPLES, side, channels, 3).split(CHUNK)]
    white = [
        fit_cells(torch.cat([each[layer] for each in examples]), kept)
        for layer, kept in enumerate((choice.kept, choice.kept_second))
    ]
    scales = (1 - choice.share) ** 0.5, choice.share**0.5

    def describe(images: Tensor) -> Tensor:
        made = [scale * map_(cells) for scale, map_, cells in zip(scales, white, pool(images), strict=True)]
        return torch.cat(made, 1)

    return describe


@dataclass(frozen=True)
class _FirstLayer:
    """Patches of pictures, times `kernels` [filters, channels, side, side]."""

    kernels: Tensor
    choice: Layers

    def respond(self, images: Tensor) -> Tensor:
        """Rectified responses [N, positions, 2 * filters] of either sign."""
        patches = F.unfold(images, self.choice.side).transpose(1, 2)
        mean = patches.mean(2, keepdim=True)
        variance = ((patches * patches).mean(2, keepdim=True) - mean * mean).clamp(min=0)
        responses = (patches - mean) * (variance + CONTRAST).rsqrt() @ self.kernels.flatten(1).T
        return _rectify(responses, self.choice.threshold)

    def shrink(self, maps: Tensor) -> Tensor:
        """Roots [N, H', W', 2 * filters] of the averages over windows, each place about of norm 1."""
        side = round(maps.shape[1] ** 0.5)
        planes = maps.transpose(1, 2).unflatten(2, (side, side))
        roots = F.avg_pool2d(planes, _WINDOW, _STRIDE).permute(0, 2, 3, 1).sqrt()
        lengths: Tensor = roots.norm(dim=3, keepdim=True)
        return roots / (lengths + _FLOOR * math.sqrt(maps.shape[2]))


def _fit_second(first: _FirstLayer, scenes: Tensor, choice: Layers) -> Map:
    """The map from the first layer's shrunk maps to the second's rectified responses [N, positions, 2 * second]."""
    maps = torch.cat([first.shrink(first.respond(part)) for part in scenes.split(CHUNK)])
    places = maps.flatten(0, 2)
    mean = places.mean(0)
    centred = places - mean
    variances, directions = torch.linalg.eigh((centred.T @ centred / len(centred)).double())
    scales = (variances.clamp(min=0) + _RIDGE * variances[-1]).rsqrt()
    reduced = (directions * scales)[:, -choice.channels :].float()

    def cut(maps: Tensor) -> Tensor:
        planes = ((maps - mean) @ reduced).permute(0, 3, 1, 2)
        patches = F.unfold(planes, _SIDE).transpose(1, 2)
        lengths: Tensor = patches.norm(dim=2, keepdim=True)
        return patches / (lengths + 1e-3)

    patches = torch.cat([cut(part) for part in maps.split(CHUNK)]).flatten(0, 1)
    patches = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))[:_SAMPLE]]
    centre = patches.mean(0)
    patches = patches - centre
    variances, directions = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    white = (directions * (variances.clamp(min=0) + _PATCH_RIDGE * variances.mean()).rsqrt() @ directions.T).float()
    filters = scale_to_unit(patches[: choice.second] @ white) @ white
    filters = filters / (patches @ filters.T).std()
    return lambda maps: _rectify((cut(maps) - centre) @ filters.T, _EDGE)


def _rectify(responses: Tensor, threshold: float) -> Tensor:
    return torch.cat([responses - threshold, -responses - threshold], 2).clamp_(min=0)


def _average_cells(maps: Tensor, grid: int) -> Tensor:
    """Means [N, grid^2, channels] of maps [N, side^2, channels] over the cells of the grid."""
    side = round(maps.shape[1] ** 0.5)
    line = F.adaptive_avg_pool1d(torch.eye(side)[None], grid)[0].T
    return torch.kron(line, line) @ maps


def _take_roots(cells: Tensor) -> Tensor:
    """Roots of [N, cells, channels], centred and of norm 1 as a whole."""
    roots = cells.sqrt().flatten(1)
    return scale_to_unit(roots - roots.mean(1, keepdim=True)).reshape(cells.shape)
