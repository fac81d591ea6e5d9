"""Features of small patches: whitened random filters, rectified and pooled; every statistic is of synthetic pictures.

Coates, Lee and Ng (2011) fit filters and whitening to the training images. Here both come from `dead_leaves`, and a
second whitening of the features from `centred_leaves`, so that no record is read but the one that is described.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.synthetic import Map, draw_centred_leaves, draw_dead_leaves, fit_whitening, scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK = 50
_PICTURES, _EXAMPLES = 500, 6000
CONTRAST = 0.01
"""Added to the variance of a patch, so that flat patches stay small."""


@dataclass(frozen=True)
class Patches:
    """The choices: `filters` of `side` x `side` pixels, pooled on `grid` x `grid` cells, both signs apart.

    A response below `threshold` counts as none. With `mirror`, a record's features are the mean of its own and of its
    mirror image's. `ridge` times the largest variance is added to each variance before whitening. With `objects` the
    pictures for that are cut out and centred on black, as in MNIST and Fashion-MNIST; else they fill the frame.
    """

    filters: int = 50
    side: int = 6
    grid: int = 4
    threshold: float = 0.25
    mirror: bool = False
    ridge: float = 0.03
    objects: bool = True

    def __post_init__(self) -> None:
        if min(self.filters, self.side, self.grid) < 1:
            raise InvalidInput(f"filters={self.filters}, side={self.side} and grid={self.grid} must all be >= 1")
        if self.threshold < 0 or not self.ridge > 0:
            raise InvalidInput(f"threshold={self.threshold} must be >= 0 and ridge={self.ridge} > 0: try 0.25 and 0.03")


def describe_patches(images: Tensor, choice: Patches | None = None, *, folder: Path | None = None) -> Tensor:
    """Features [N, 2 * filters * grid^2] of norm 1 of images [N, channels, H, W], from a file in `folder` if known.

    With w_k the whitened filters and p a patch, r_k = <w_k, p - mean p> / sqrt(var p + 0.01); the cells of the grid
    hold the means of max(0, +-r_k - threshold). Their roots, centred and of norm 1, are whitened by the mean and
    covariance of the same features of synthetic pictures, and brought to norm 1 again.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or Patches()
    if images.dim() != 4 or min(images.shape) == 0 or min(images.shape[2:]) < choice.side + choice.grid - 1:
        least = choice.side + choice.grid - 1
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
    """The map from images of this size to their features, fitted to synthetic pictures alone."""
    kernels = make_filters(choice.filters, choice.side, draw_dead_leaves(_PICTURES, 32, channels, 1))
    pictures = draw_centred_leaves if choice.objects else draw_dead_leaves
    synthetic = pictures(_EXAMPLES, max(height, width), channels, 5)[:, :, :height, :width]
    examples = torch.cat([_pool(part, kernels, choice) for part in synthetic.split(CHUNK)])
    examples = examples[examples.norm(dim=1) > 0]
    white = fit_whitening(examples, choice.ridge)
    return lambda images: scale_to_unit(white(_pool(images, kernels, choice)))


@torch.no_grad()
def make_filters(count: int, side: int, pictures: Tensor) -> Tensor:
    """Kernels [count, channels, side, side]: unit whitened patches of the pictures, whitened once more.

    The inner product of two whitened patches is that of one patch with the other whitened twice.
    """
    channels = pictures.shape[1]
    patches = F.unfold(pictures, side, stride=side).transpose(1, 2).reshape(-1, channels * side**2)
    patches = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))]
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches[patches.std(1) > 0.04]
    patches = patches / (patches.var(1, keepdim=True) + CONTRAST).sqrt()
    if count > len(patches):
        raise InvalidInput(f"filters={count} must be <= {len(patches)}, the patches there are")
    variances, directions = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    white = (directions * (variances.clamp(min=0) + 0.1).rsqrt() @ directions.T).float()
    twice: Tensor = scale_to_unit(patches[:count] @ white) @ white
    return (twice - twice.mean(1, keepdim=True)).reshape(count, channels, side, side)


def _pool(images: Tensor, kernels: Tensor, choice: Patches) -> Tensor:
    """Roots of the pooled responses, centred and of norm 1, before the second whitening; a blank image is zero."""
    both = torch.cat([images, images.flip(3)]) if choice.mirror else images
    even = torch.full_like(kernels[:1], 1 / kernels[0].numel())
    mean, square = F.conv2d(both, even), F.conv2d(both * both, even)
    responses = F.conv2d(both, kernels) / ((square - mean * mean).clamp(min=0) + CONTRAST).sqrt()
    signs = [F.adaptive_avg_pool2d(F.relu(sign * responses - choice.threshold), choice.grid) for sign in (1, -1)]
    cells = torch.cat(signs, 1).flatten(1)
    if choice.mirror:
        cells = (cells[: len(images)] + cells[len(images) :]) / 2
    roots = cells.sqrt()
    return scale_to_unit(roots - roots.mean(1, keepdim=True))


@torch.no_grad()
def _fill_patches(images: Tensor, choice: Patches, path: Path) -> None:
    """Fill the file chunk by chunk, so that the features are never in memory as a whole."""
    count, channels, height, width = images.shape
    features = fit_description(choice, height, width, channels)
    output = allocate(path, (count, 2 * choice.filters * choice.grid**2))
    for begin in range(0, count, CHUNK):
        output[begin : begin + CHUNK] = features(images[begin : begin + CHUNK]).numpy()
    output.flush()
