"""Features that are computed once and kept on disk, named by a checksum of everything that decides them."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from sordino.data.download import exclusive, writing

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def kept(folder: Path, what: object, inputs: tuple[Tensor, ...], make: Callable[[Path], None], *, title: str) -> Tensor:
    """What ``make(path)`` wrote as .npy the first time; `what` (by its repr) and `inputs` name the file in `folder`.

    `title` is for people alone, such as "scattering features".
    """
    digest = hashlib.sha256(repr((what, [(tuple(x.shape), str(x.dtype)) for x in inputs])).encode())
    for tensor in inputs:
        digest.update(tensor.detach().contiguous().numpy().data)
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    once(path, make, f"computing {title} of {len(inputs[0]):,} records")
    return mapped(path)


def once(path: Path, make: Callable[[Path], None], doing: str) -> None:
    """Have ``make(part)`` write the file at `path`, unless it is there, and log what is being done.

    Of two processes one computes and the other waits; a file takes its name only when it is whole.
    """
    if path.exists():  # a whole file needs no lock, and may lie where nothing can be written
        return
    with writing(path.parent), exclusive(path.with_suffix(".lock")):
        if path.exists():
            return
        _log.info("%s, once: to be kept in %s", doing, path.parent)
        part = path.with_suffix(".part")
        try:
            make(part)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)  # a full disk wants it back
            raise


def mapped(path: Path) -> Tensor:
    """The array in a file, read when it is looked at."""
    # Copy on write: torch wants writable memory, and nobody's writes may reach the file.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def room(path: Path, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.memmap[Any, Any]:
    """A new .npy file that is filled by writing into the array.

    Its place on the disk is taken now: if the disk were full later, writing into the array would kill the process.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno in _FULL:  # any other: this file system takes no place beforehand
                    raise
    return array
