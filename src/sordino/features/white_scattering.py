"""Scattering features whitened by those of synthetic pictures, so that no record is read but the one described."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sordino.data.store import cache_folder
from sordino.errors import InvalidInput
from sordino.features.kept import kept, room
from sordino.features.leaves import centred_leaves, dead_leaves
from sordino.features.scattering import scatter
from sordino.features.whitening import Map, unit, whitening

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK = 500
_EXAMPLES = 6000


@dataclass(frozen=True)
class WhiteScattering:
    """The choices: `groups` to normalise each record's scattering by, and `ridge`, `mirror`, `objects` of `Patches`.

    With `gray` only the brightness of red, green and blue is scattered: a third of the features.
    """

    groups: int = 27
    gray: bool = False
    ridge: float = 0.03
    mirror: bool = False
    objects: bool = True

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise InvalidInput(f"ridge={self.ridge} must be > 0: try 0.03")


def white_scattering(images: Tensor, choice: WhiteScattering | None = None, *, folder: Path | None = None) -> Tensor:
    """Features [N, 81 * channels * H/4 * W/4] of norm 1 of images [N, channels, H, W], kept in `folder`.

    The group-normalised scattering of a record, of norm 1, is whitened by mean and covariance of the same of synthetic
    pictures, and brought to norm 1 again. With `mirror` it is first averaged with that of the mirror image.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or WhiteScattering()
    images = images.detach().to(torch.float32)
    if choice.gray:
        images = brightness(images)
    images = images.contiguous()
    place = folder or cache_folder() / "scattering"

    def make(path: Path) -> None:
        _compute(images, choice, path, place)

    return kept(place, (VERSION, choice), (images,), make, title="whitened scattering features")


def brightness(images: Tensor) -> Tensor:
    """[N, 1, H, W] of images [N, 3, H, W] in red, green and blue (ITU-R BT.601)."""
    if images.dim() != 4 or images.shape[1] != 3:
        raise InvalidInput(f"images have shape {tuple(images.shape)}, must be [N, 3, H, W] for gray: leave gray out")
    red, green, blue = images.unbind(1)
    return torch.stack([0.299 * red + 0.587 * green + 0.114 * blue], 1)


def _compute(images: Tensor, choice: WhiteScattering, path: Path, folder: Path) -> None:
    channels, height, width = images.shape[1:]
    white = fitted(choice, channels, height, width, folder)
    views = _views(images, choice, folder)
    output = room(path, (len(images), views[0][0].numel()))
    for begin in range(0, len(images), CHUNK):
        output[begin : begin + CHUNK] = unit(white(_mean([view[begin : begin + CHUNK] for view in views]))).numpy()
    output.flush()


@torch.no_grad()
def fitted(choice: WhiteScattering, channels: int, height: int, width: int, folder: Path | None = None) -> Map:
    """The whitening for images of this size, fitted to synthetic pictures alone."""
    pictures = centred_leaves if choice.objects else dead_leaves
    synthetic = pictures(_EXAMPLES, max(height, width), channels, 5)[:, :, :height, :width]
    return whitening(_mean(_views(synthetic, choice, folder)), choice.ridge)


def _views(images: Tensor, choice: WhiteScattering, folder: Path | None) -> list[Tensor]:
    """The scattering of the images, and of their mirror images where those count too."""
    seen = [images, images.flip(3)] if choice.mirror else [images]
    return [scatter(each, groups=choice.groups, folder=folder, quiet=True) for each in seen]


def _mean(views: list[Tensor]) -> Tensor:
    return torch.stack([unit(view.flatten(1)) for view in views]).mean(0)
