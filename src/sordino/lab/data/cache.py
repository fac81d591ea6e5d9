"""Where datasets are on this machine: the folder SORDINO_DATA, then the user's cache, then the official download."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sordino.data.download import Remote, exclusive, fetch
from sordino.errors import InvalidInput


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


def given(dataset: str, *files: str) -> Path | None:
    """The first of the files that is in SORDINO_DATA."""
    folder = os.environ.get("SORDINO_DATA")
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise InvalidInput(f"SORDINO_DATA={folder} is not a folder: correct it, or unset it to download the datasets")
    return _first(Path(folder) / dataset, files)


def find(dataset: str, *files: str) -> Path | None:
    """The first of the files that is in SORDINO_DATA, or else in the cache."""
    return given(dataset, *files) or _first(cache_folder() / dataset, files)


def _first(folder: Path, files: tuple[str, ...]) -> Path | None:
    return next((path for file in files if (path := folder / file).exists()), None)


def obtain(dataset: str, remote: Remote, *instead: str, quiet: bool = False) -> Path:
    """The official file, or one of those that may be there `instead`: where it lies, or downloaded into the cache.

    The official file is verified wherever it is.
    """
    path = find(dataset, *instead, remote.name)
    if path is None:
        return fetch(remote, cache_folder() / dataset / remote.name, quiet=quiet)
    if path.name == remote.name:
        remote.verify(path)
    return path


def remember(
    dataset: str, key: str, make: Callable[[], dict[str, NDArray[np.generic]]]
) -> dict[str, NDArray[np.generic]]:
    """Arrays that take long to make, made once and kept in the cache; `key` names all that they depend on."""
    path = cache_folder() / dataset / f"{key}.npz"
    if not path.exists():  # a whole file needs no lock, and may lie where nothing can be written
        with ExitStack() as held:
            try:
                held.enter_context(exclusive(path.with_suffix(".lock")))
            except OSError:  # no place to keep them: make them each time
                return make()
            if not path.exists() and not _written(path, made := make()):
                return made
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}): delete it, it will be made again") from error


def _written(path: Path, arrays: dict[str, NDArray[np.generic]]) -> bool:
    """Whether there was room for the file; it takes its name only when it is whole."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True
