"""Features of small patches: whitened random filters, rectified and pooled; every statistic is of synthetic pictures.

Coates, Lee and Ng (2011) fit filters and whitening to the training images. Here both come from `dead_leaves`, and a
second whitening of the features from `centred_leaves`, so that no record is read but the one that is described. With
`kept` both come from scenes (`sordino.lab.features.scenes`) instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import (
    Map,
    draw_centred_leaves,
    draw_dead_leaves,
    fit_cells,
    fit_whitening,
    scale_to_unit,
)

VERSION = 2
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK, _FEW = 16, 4
"""Pictures at a time; of few the responses to many filters stay in the processor's cache."""
_PICTURES, _EXAMPLES = 500, 6000
_SCENES, _DESCRIBED = 1500, 3000
"""Scenes that filters are cut from, and scenes whose features are whitened."""
_RIDGE, _FLOOR = 0.1, 0.3
"""Added to the variances of patches before whitening, and to the length of a whitened patch, which is about 10."""
CONTRAST = 0.01
"""Added to the variance of a patch, so that flat patches stay small."""
_FLAT, _MOST = 0.04, 150_000
"""Patches of a smaller deviation are not filters; and so many patches are enough for their covariance."""


@dataclass(frozen=True)
class Patches:
    """The choices: `filters` of `side` x `side` pixels, pooled on `grid` x `grid` cells, both signs apart.

    A response below `threshold` counts as none. With `mirror`, a record's features are the mean of its own and of its
    mirror image's. `ridge` times the largest variance is added to each variance before whitening. With `objects` the
    pictures for that are cut out and centred on black, as in MNIST and Fashion-MNIST; else they fill the frame.

    With `kept`, filters and statistics are those of scenes instead: patches are whitened and then brought to norm 1,
    as in Thiry et al. (2021), so that a response is the cosine of an angle; and so many channels of each cell remain,
    whitened as far as `tilt` says (`fit_cells`): noise costs less in few directions, so a tilt below 1 pays.
    """

    filters: int = 50
    side: int = 6
    grid: int = 4
    threshold: float = 0.25
    mirror: bool = False
    ridge: float = 0.03
    objects: bool = True
    kept: int = 0
    tilt: float = 1.0

    def __post_init__(self) -> None:
        if min(self.filters, self.side, self.grid) < 1:
            raise InvalidInput(f"filters={self.filters}, side={self.side} and grid={self.grid} must all be >= 1")
        if not 0 <= self.kept <= 2 * self.filters:
            raise InvalidInput(f"kept={self.kept} must be in 0..{2 * self.filters}, two channels for each filter")
        if not 0 <= self.tilt <= 1:
            raise InvalidInput(f"tilt={self.tilt} must be in 0..1: 1 whitens, 0 leaves the variances")
        if self.threshold < 0 or not self.ridge > 0:
            raise InvalidInput(f"threshold={self.threshold} must be >= 0 and ridge={self.ridge} > 0: try 0.25 and 0.03")

    @property
    def width(self) -> int:
        """How many features a record has."""
        return (self.kept or 2 * self.filters) * self.grid**2


def describe_patches(images: Tensor, choice: Patches | None = None, *, folder: Path | None = None) -> Tensor:
    """Features [N, choice.width] of norm 1 of images [N, channels, H, W], from a file in `folder` if known.

    With w_k the whitened filters and p a patch, r_k = <w_k, p - mean p> / sqrt(var p + 0.01); the cells of the grid
    hold the means of max(0, +-r_k - threshold). Their roots, centred and of norm 1, are whitened by the mean and
    covariance of the same features of synthetic pictures, and brought to norm 1 again. With `kept`, p is whitened and
    of norm 1 before <w_k, p> is taken, and w_k is such a patch of a scene.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or Patches()
    least = choice.side + choice.grid - 1
    if images.dim() != 4 or min(images.shape) == 0 or min(images.shape[2:]) < least:
        raise InvalidInput(
            f"images have shape {tuple(images.shape)}, must be [N, channels, H, W] with sides >= {least}"
        )
    images = images.detach().to(torch.float32).contiguous()
    place = folder or cache_folder() / "patches"
    return remember_tensor(
        place,
        (VERSION, choice),
        (images,),
        lambda path: _fill_patches(images, choice, path),
        title="features of patches",
    )


@torch.no_grad()
def fit_description(choice: Patches, height: int, width: int, channels: int) -> Map:
    """Return the map from images of this size to their features, fitted to synthetic pictures alone."""
    if choice.kept:
        return _fit_to_scenes(choice, height, width, channels)
    kernels = make_filters(choice.filters, choice.side, draw_dead_leaves(_PICTURES, 32, channels, 1))
    pictures = draw_centred_leaves if choice.objects else draw_dead_leaves
    synthetic = pictures(_EXAMPLES, max(height, width), channels, 5)[:, :, :height, :width]
    examples = torch.cat([_pool(part, kernels, choice) for part in synthetic.split(CHUNK)])
    examples = examples[examples.norm(dim=1) > 0]
    white = fit_whitening(examples, choice.ridge)
    return lambda images: scale_to_unit(white(_pool(images, kernels, choice)))


def _fit_to_scenes(choice: Patches, height: int, width: int, channels: int) -> Map:
    """Return the same, fitted to scenes."""
    side = max(height, width)
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere it is emulated, which is slower
    respond = _make_sphere(choice, draw_scenes(_SCENES, side, channels, 1), half=half)
    cells = _lay_grid(height - choice.side + 1, width - choice.side + 1, choice.grid)
    scenes = draw_scenes(_DESCRIBED, side, channels, 3)[:, :, :height, :width]

    def pool(images: Tensor) -> Tensor:
        """Roots [N, cells, 2 * filters] of the pooled responses, centred and of norm 1."""
        seen = [_pool_signs(respond(view), cells, choice.threshold) for view in _see(images, choice)]
        roots = torch.stack(seen).mean(0).sqrt()
        return scale_to_unit((roots - roots.mean((1, 2), keepdim=True)).flatten(1)).reshape(roots.shape)

    white = fit_cells(torch.cat([pool(part) for part in scenes.split(_FEW)]), choice.kept, choice.tilt)
    return lambda images: torch.cat([white(pool(part)) for part in images.split(_FEW)])


def _lay_grid(height: int, width: int, grid: int) -> Tensor:
    """Weights [cells, height * width] that average the places of every cell."""
    down, across = (F.adaptive_avg_pool1d(torch.eye(side)[None], grid)[0] for side in (height, width))
    return torch.einsum("ya,xb->abyx", down, across).flatten(2).flatten(0, 1)


def _pool_signs(cosines: Tensor, cells: Tensor, threshold: float) -> Tensor:
    """Means [N, cells, 2 * filters] over the cells of what exceeds the threshold, both signs apart."""
    places = cosines.permute(0, 2, 3, 1).flatten(1, 2)
    cells = cells.to(places.dtype)
    return torch.cat([cells @ (sign * places - threshold).clamp_(min=0) for sign in (1, -1)], 2).float()


@torch.no_grad()
def make_filters(count: int, side: int, pictures: Tensor) -> Tensor:
    """Kernels [count, channels, side, side]: unit whitened patches of the pictures, whitened once more.

    The inner product of two whitened patches is that of one patch with the other whitened twice.
    """
    patches = _cut_patches(count, side, side, pictures)
    white = _whiten_patches(patches)
    twice: Tensor = scale_to_unit(patches[:count] @ white) @ white
    return (twice - twice.mean(1, keepdim=True)).reshape(count, -1, side, side)


def _make_sphere(choice: Patches, pictures: Tensor, *, half: bool = False) -> Map:
    """Return the map from images to cosines [N, filters, H', W'] between their whitened patches and those of pictures.

    With `half` the cosines are products in bfloat16, which many filters need twice as fast.
    """
    patches = _cut_patches(choice.filters, choice.side, max(2, choice.side // 2), pictures)
    white = _whiten_patches(patches)
    directions = scale_to_unit(patches[: choice.filters] @ white)
    # A patch times the centred rows of the whitening is the whitened patch without its mean.
    kernels = (white - white.mean(1, keepdim=True)).reshape(len(white), -1, choice.side, choice.side)

    kernels = kernels.contiguous(memory_format=torch.channels_last)
    directions = directions.to(torch.bfloat16 if half else torch.float32)

    def respond(images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        seen = F.conv2d(images, kernels)
        lengths: Tensor = seen.norm(dim=1, keepdim=True)
        seen = seen / (lengths + _FLOOR * _measure_contrast(images, kernels))
        return F.conv2d(seen.to(directions.dtype), directions[:, :, None, None])

    return respond


def _cut_patches(least: int, side: int, stride: int, pictures: Tensor) -> Tensor:
    """Normalised patches [at least `least`, channels * side^2] of the pictures in random order, without flat ones."""
    patches = F.unfold(pictures, side, stride=stride).transpose(1, 2).flatten(0, 1)
    patches = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))][:_MOST]
    patches = patches[patches.std(1) > _FLAT]
    if least > len(patches):
        raise InvalidInput(f"filters={least} must be <= {len(patches)}, the patches there are")
    centred = patches - patches.mean(1, keepdim=True)
    normal: Tensor = centred / (patches.var(1, keepdim=True) + CONTRAST).sqrt()
    return normal


def _whiten_patches(patches: Tensor) -> Tensor:
    variances, directions = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    white: Tensor = (directions * (variances.clamp(min=0) + _RIDGE).rsqrt() @ directions.T).float()
    return white


def _pool(images: Tensor, kernels: Tensor, choice: Patches) -> Tensor:
    """Roots of the pooled responses, centred and of norm 1, before the second whitening; a blank image is zero."""
    seen = _see(images, choice)
    return _take_roots([F.conv2d(view, kernels) / _measure_contrast(view, kernels) for view in seen], choice)


def _measure_contrast(images: Tensor, kernels: Tensor) -> Tensor:
    """Return the deviation [N, 1, H', W'] of each patch under a kernel, and a little more."""
    even = torch.full_like(kernels[:1], 1 / kernels[0].numel())
    mean, square = F.conv2d(images, even), F.conv2d(images * images, even)
    return ((square - mean * mean).clamp(min=0) + CONTRAST).sqrt()


def _see(images: Tensor, choice: Patches) -> list[Tensor]:
    return [images, images.flip(3)] if choice.mirror else [images]


def _take_roots(responses: list[Tensor], choice: Patches) -> Tensor:
    """Both signs rectified, averaged over the cells of the grid and over views; roots, centred and of norm 1."""
    down, across = (F.adaptive_avg_pool1d(torch.eye(side)[None], choice.grid)[0] for side in responses[0].shape[2:])

    def pool(sign: int) -> Tensor:
        rectified = ((sign * each).sub_(choice.threshold).clamp_(min=0) for each in responses)
        return torch.stack([down.T @ (each @ across) for each in rectified]).mean(0)

    roots = torch.cat([pool(1), pool(-1)], 1).flatten(1).sqrt()
    return scale_to_unit(roots - roots.mean(1, keepdim=True))


@torch.no_grad()
def _fill_patches(images: Tensor, choice: Patches, path: Path) -> None:
    """Fill the file chunk by chunk, so that the features are never in memory as a whole."""
    count, channels, height, width = images.shape
    features = fit_description(choice, height, width, channels)
    output = allocate(path, (count, choice.width))
    for begin in range(0, count, CHUNK):
        output[begin : begin + CHUNK] = features(images[begin : begin + CHUNK]).numpy()
    output.flush()
