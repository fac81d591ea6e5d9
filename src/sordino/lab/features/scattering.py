"""Scattering features (Oyallon and Mallat 2015) through kymatio: computed once, kept on disk, read by memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sordino.data.store import cache_folder
from sordino.errors import InvalidInput, SordinoError
from sordino.features.kept import mapped, once, room
from sordino.features.normalising import group_norm
from sordino.machine import cores

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
SCALES = 2
CHUNK = 125


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
    path = (folder or cache_folder() / "scattering") / f"{_key(images, groups, dtype, channels_last)}.npy"
    # One thread for each that torch may use itself: a process of many, as in `sordino compare`, has but one.
    threads = workers or min(cores(), torch.get_num_threads())

    def make(part: Path) -> None:
        _compute(images, groups, dtype, channels_last, part, threads, quiet)

    once(path, make, f"computing scattering features of {len(images):,} records")
    features = mapped(path)
    return features.movedim(-1, 1) if channels_last else features


def transform(height: int, width: int) -> Callable[[Tensor], Tensor]:
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


def _compute(
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
    plane = transform(height, width)
    norm = group_norm(shape[1], groups) if groups else None
    kind = np.float32 if dtype == torch.float32 else np.float16
    laid = (*shape[:1], *shape[2:], shape[1]) if channels_last else shape
    output = room(path, laid, kind)

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


def _key(images: Tensor, groups: int | None, dtype: torch.dtype, channels_last: bool) -> str:
    """A checksum of the images and of all that decides the features and how they lie."""
    layout = ("channels last",) if channels_last else ()
    digest = hashlib.sha256(repr((VERSION, SCALES, tuple(images.shape), groups, str(dtype), *layout)).encode())
    digest.update(images.numpy().data)
    return digest.hexdigest()[:32]


def progress_bar(quiet: bool) -> Progress:
    """A bar on standard error for long work, or none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True)
