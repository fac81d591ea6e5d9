"""Scattering features (Oyallon and Mallat 2015) through kymatio: computed once, kept on disk, read by memory map.

Whitened scattering takes its statistics from synthetic pictures, so that no record is read but the one described.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sordino.errors import InvalidInput, SordinoError
from sordino.lab.data.cache import allocate, cache_folder, make_once, map_tensor, remember_tensor
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import (
    Map,
    draw_centred_leaves,
    draw_dead_leaves,
    fit_cells,
    fit_whitening,
    scale_to_unit,
)
from sordino.lab.machine import cores
from sordino.tables.normalising import group_norm

VERSION = _WHITE_VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
SCALES = 2
CHUNK = 125
_WHITE_CHUNK = 500
_EXAMPLES = 6000


class MissingExtra(SordinoError, ImportError):
    """An optional dependency is not installed."""


def scatter(
    images: Tensor,
    *,
    groups: int | None = None,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    folder: Path | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Tensor:
    """Features [N, 81 * channels, H/4, W/4] of images [N, channels, H, W]: J = 2 scales, L = 8 angles.

    With `groups`, each record is also group-normalised (27 in Tramer and Boneh 2021). `channels_last` changes only how
    they lie in memory, which convolutions read faster and linear layers slower. The result is a memory map of a
    file in `folder` (the user's cache by default), named by a checksum of the images and of everything else that
    decides the numbers; the number of `workers` (threads; as many as torch may use by default) does not.
    Guarantees: a record's features depend on that record alone, so scattering is free of charge.
    """
    if images.dim() != 4 or min(images.shape) == 0 or images.shape[-1] % 4 or images.shape[-2] % 4:
        raise InvalidInput(
            f"images have shape {tuple(images.shape)}, must be [N, channels, H, W], H and W multiples of 4: pad them"
        )
    if dtype not in (torch.float32, torch.float16):
        raise InvalidInput(
            f"dtype={dtype} must be torch.float32 or torch.float16: the features are computed in float32"
        )
    images = images.detach().to(torch.float32).contiguous()
    path = (folder or cache_folder() / "scattering") / f"{_name_file(images, groups, dtype, channels_last)}.npy"
    # As many threads as torch may use: one of many processes, as in `sordino compare`, has only one.
    threads = workers or min(cores(), torch.get_num_threads())

    def make(part: Path) -> None:
        _fill_scattering(images, groups, dtype, channels_last, part, threads, quiet)

    make_once(path, make, f"computing scattering features of {len(images):,} records")
    features = map_tensor(path)
    return features.movedim(-1, 1) if channels_last else features


def build_transform(height: int, width: int) -> Callable[[Tensor], Tensor]:
    """Kymatio's scattering of single planes.

    Its top-level torch module also imports the 3-D front end, which breaks with current SciPy, so the 2-D one is
    imported from its own module.
    """
    try:
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise MissingExtra(f"kymatio cannot be imported ({error}): pip install 'sordino[features]'") from error
    result: Callable[[Tensor], Tensor] = ScatteringTorch2D(J=SCALES, shape=(height, width))
    return result


def _fill_scattering(
    images: Tensor,
    groups: int | None,
    dtype: torch.dtype,
    channels_last: bool,
    path: Path,
    workers: int,
    quiet: bool,
) -> None:
    """Fill the file chunk by chunk from several threads."""
    count, channels, height, width = images.shape
    shape = (count, 81 * channels, height // 4, width // 4)
    plane = build_transform(height, width)
    norm = group_norm(shape[1], groups) if groups else None
    kind = np.float32 if dtype == torch.float32 else np.float16
    laid = (*shape[:1], *shape[2:], shape[1]) if channels_last else shape
    output = allocate(path, laid, kind)

    def fill(begin: int) -> int:
        chunk = images[begin : begin + CHUNK]
        with torch.no_grad():
            features = plane(chunk).reshape(len(chunk), *shape[1:])
            features = features if norm is None else norm(features)
        output[begin : begin + CHUNK] = (features.movedim(1, -1) if channels_last else features).numpy()
        return len(chunk)

    with progress_bar(quiet) as progress, ThreadPoolExecutor(workers) as pool:
        task = progress.add_task("scattering", total=count)
        for done in as_completed([pool.submit(fill, begin) for begin in range(0, count, CHUNK)]):
            progress.advance(task, done.result())
    output.flush()


def _name_file(images: Tensor, groups: int | None, dtype: torch.dtype, channels_last: bool) -> str:
    """Return a checksum of the images and of everything that decides the features and their layout."""
    layout = ("channels last",) if channels_last else ()
    digest = hashlib.sha256(repr((VERSION, SCALES, tuple(images.shape), groups, str(dtype), *layout)).encode())
    digest.update(images.numpy().data)
    return digest.hexdigest()[:32]


def progress_bar(quiet: bool) -> Progress:
    """Return a bar on standard error for long work, or none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True)


@dataclass(frozen=True)
class WhiteScattering:
    """The choices: `groups` to normalise each record's scattering by, and `ridge`, `mirror`, `objects` of `Patches`.

    With `gray` only the brightness of red, green and blue is scattered: a third of the features. With `kept`, the
    statistics are those of scenes, by directions over channels and over cells (`fit_cells`, which has a `tilt` and a
    ridge of its own), and so many channels of each cell remain.
    """

    groups: int = 27
    gray: bool = False
    ridge: float = 0.03
    mirror: bool = False
    objects: bool = True
    kept: int = 0
    tilt: float = 1.0

    def __post_init__(self) -> None:
        if not self.ridge > 0 or self.kept < 0:
            raise InvalidInput(f"ridge={self.ridge} must be > 0 and kept={self.kept} >= 0: try 0.03 and 0")


def scatter_white(images: Tensor, choice: WhiteScattering | None = None, *, folder: Path | None = None) -> Tensor:
    """Features [N, 81 * channels * H/4 * W/4] of norm 1 of images [N, channels, H, W], kept in `folder`.

    The group-normalised scattering of a record, of norm 1, is whitened by mean and covariance of the same of synthetic
    pictures, and brought to norm 1 again. With `mirror` it is first averaged with that of the mirror image.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or WhiteScattering()
    images = images.detach().to(torch.float32)
    if choice.gray:
        images = take_brightness(images)
    images = images.contiguous()
    place = folder or cache_folder() / "scattering"

    def make(path: Path) -> None:
        _fill_whitened(images, choice, path, place)

    return remember_tensor(place, (_WHITE_VERSION, choice), (images,), make, title="whitened scattering features")


def take_brightness(images: Tensor) -> Tensor:
    """[N, 1, H, W] of images [N, 3, H, W] in red, green and blue (ITU-R BT.601)."""
    if images.dim() != 4 or images.shape[1] != 3:
        raise InvalidInput(f"images have shape {tuple(images.shape)}, must be [N, 3, H, W] for gray: leave gray out")
    red, green, blue = images.unbind(1)
    return torch.stack([0.299 * red + 0.587 * green + 0.114 * blue], 1)


def _fill_whitened(images: Tensor, choice: WhiteScattering, path: Path, folder: Path) -> None:
    channels, height, width = images.shape[1:]
    white = fit_white_scattering(choice, channels, height, width, folder)
    views = _scatter_views(images, choice, folder)
    output = allocate(path, (len(images), choice.kept * height * width // 16 or views[0][0].numel()))
    for begin in range(0, len(images), _WHITE_CHUNK):
        output[begin : begin + _WHITE_CHUNK] = scale_to_unit(
            white(_average([view[begin : begin + _WHITE_CHUNK] for view in views]))
        ).numpy()
    output.flush()


@torch.no_grad()
def fit_white_scattering(
    choice: WhiteScattering, channels: int, height: int, width: int, folder: Path | None = None
) -> Map:
    """Return the whitening for images of this size, fitted to synthetic pictures alone."""
    if choice.kept:
        return _fit_white_cells(choice, channels, height, width, folder)
    pictures = draw_centred_leaves if choice.objects else draw_dead_leaves
    synthetic = pictures(_EXAMPLES, max(height, width), channels, 5)[:, :, :height, :width]
    return fit_whitening(_average(_scatter_views(synthetic, choice, folder)), choice.ridge)


def _fit_white_cells(choice: WhiteScattering, channels: int, height: int, width: int, folder: Path | None) -> Map:
    """Return the whitening by scenes, over channels and over cells."""
    if choice.kept > 81 * channels:
        raise InvalidInput(f"kept={choice.kept} must be <= {81 * channels}, the channels there are")
    scenes = draw_scenes(_EXAMPLES, max(height, width), channels, 5)[:, :, :height, :width]

    def divide(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), 81 * channels, -1).transpose(1, 2)

    white = fit_cells(divide(_average(_scatter_views(scenes, choice, folder))), choice.kept, choice.tilt)
    return lambda rows: white(divide(rows))


def _scatter_views(images: Tensor, choice: WhiteScattering, folder: Path | None) -> list[Tensor]:
    """Return the scattering of the images, averaged with that of their mirror images if those count."""
    seen = [images, images.flip(3)] if choice.mirror else [images]
    return [scatter(each, groups=choice.groups, folder=folder, quiet=True) for each in seen]


def _average(views: list[Tensor]) -> Tensor:
    return torch.stack([scale_to_unit(view.flatten(1)) for view in views]).mean(0)
