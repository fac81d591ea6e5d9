"""Where datasets and features are on this machine: the folder SORDINO_DATA, then the user's cache, then the download.

Features that take long to compute are computed once and kept in the cache, named by a checksum of their inputs.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.data.download import Remote, explain_failed_writes, fetch, hold_lock

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """SORDINO_CACHE, or ``sordino`` in the platform's place for caches."""
    if chosen := os.environ.get("SORDINO_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "sordino"


def find_given(dataset: str, *files: str) -> Path | None:
    """Find the first of the files that is in SORDINO_DATA."""
    folder = os.environ.get("SORDINO_DATA")
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise InvalidInput(f"SORDINO_DATA={folder} is not a folder: correct it, or unset it to download the datasets")
    return _find_first(Path(folder) / dataset, files)


def find_file(dataset: str, *files: str) -> Path | None:
    """Find the first of the files that is in SORDINO_DATA, or else in the cache."""
    return find_given(dataset, *files) or _find_first(cache_folder() / dataset, files)


def _find_first(folder: Path, files: tuple[str, ...]) -> Path | None:
    return next((path for file in files if (path := folder / file).exists()), None)


def obtain(dataset: str, remote: Remote, *instead: str, quiet: bool = False) -> Path:
    """Find the official file, or one that may be used `instead`, on this machine, or download it into the cache.

    The official file is verified wherever it is.
    """
    path = find_file(dataset, *instead, remote.name)
    if path is None:
        return fetch(remote, cache_folder() / dataset / remote.name, quiet=quiet)
    if path.name == remote.name:
        remote.verify(path)
    return path


def remember_arrays(
    dataset: str, key: str, make: Callable[[], dict[str, NDArray[np.generic]]]
) -> dict[str, NDArray[np.generic]]:
    """Make arrays that take long to compute once, and keep them in the cache; `key` names everything they depend on."""
    path = cache_folder() / dataset / f"{key}.npz"
    if not path.exists():  # a whole file needs no lock, and may lie where nothing can be written
        with ExitStack() as held:
            try:
                held.enter_context(hold_lock(path.with_suffix(".lock")))
            except OSError:  # there is no room to keep them: make them each time
                return make()
            if not path.exists() and not _write_arrays(path, made := make()):
                return made
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}): delete it, it will be made again") from error


def _write_arrays(path: Path, arrays: dict[str, NDArray[np.generic]]) -> bool:
    """Write the file and say whether there was room; it gets its name only when it is complete."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True


def remember_tensor(
    folder: Path, what: object, inputs: tuple[Tensor, ...], make: Callable[[Path], None], *, title: str
) -> Tensor:
    """Return what ``make(path)`` wrote as .npy the first time; `what` (by its repr) and `inputs` name the file.

    `title` is only for people to read, such as "scattering features".
    """
    digest = hashlib.sha256(repr((what, [(tuple(x.shape), str(x.dtype)) for x in inputs])).encode())
    for tensor in inputs:
        digest.update(tensor.detach().contiguous().numpy().data)
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    make_once(path, make, f"computing {title} of {len(inputs[0]):,} records")
    return map_tensor(path)


def make_once(path: Path, make: Callable[[Path], None], doing: str) -> None:
    """Have ``make(part)`` write the file at `path`, unless it exists, and log what is being done.

    If two processes need it, one computes and the other waits. The file gets its name only when it is complete.
    """
    if path.exists():  # a whole file needs no lock, and may lie where nothing can be written
        return
    with explain_failed_writes(path.parent), hold_lock(path.with_suffix(".lock")):
        if path.exists():
            return
        _log.info("%s, once: to be kept in %s", doing, path.parent)
        part = path.with_suffix(".part")
        try:
            make(part)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)  # a full disk needs the space back
            raise


def map_tensor(path: Path) -> Tensor:
    """Map the array in a file: it is read when it is used."""
    # Copy on write: torch wants writable memory, and no write may reach the file.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def allocate(path: Path, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.memmap[Any, Any]:
    """Make a new .npy file that is filled by writing into the array.

    Its space on the disk is reserved now: if the disk became full later, writing into the array would kill the process.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno in _FULL:  # on other errors: this file system cannot reserve space
                    raise
    return array
