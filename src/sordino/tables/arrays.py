"""Reads arrays x and y from a .npz file of any origin: the claims of its headers are checked before memory is taken."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sordino.errors import InvalidInput

Array = NDArray[np.float64]
Header = tuple[tuple[int, ...], "np.dtype[np.generic]"]
_WIDTH = np.dtype(np.float64).itemsize
_DENSEST = 1100
"""Deflate cannot expand a byte to more than this; a member that claims more is lying."""
_DAMAGED = (ValueError, EOFError, KeyError, RuntimeError, TypeError, SyntaxError, tokenize.TokenError)
_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, OverflowError)


def read_arrays(path: Path) -> tuple[Array, Array]:
    """Read the arrays x, (N, ...), and y, (N,), of a file that ``np.savez(x=, y=)`` wrote, as float64.

    Guarantees: nothing is unpickled, and no more memory is taken than the file can fill and the machine has.
    """
    with _one_line(path), zipfile.ZipFile(path) as archive:
        shapes = {name: _require_plain(path, archive, name) for name in ("x", "y")}
        _require_pair(path, shapes["x"], shapes["y"])
        return _load(archive, "x"), _load(archive, "y")


def read_inputs(path: Path) -> Array:
    """Read only the array x, (N, ...): records that have no class yet."""
    with _one_line(path), zipfile.ZipFile(path) as archive:
        _require_plain(path, archive, "x")
        return _load(archive, "x")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except InvalidInput:
        raise
    except (*_DAMAGED, *_DAMAGED_ZIP):  # a damaged file can raise errors of any kind
        raise InvalidInput(f"{path} is not a .npz file of plain arrays: save it with np.savez(x=, y=)") from None
    except OSError as error:
        raise InvalidInput(f"cannot read data={path}: {error.strerror or error}") from None


def _require_plain(path: Path, archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """Return the shape of an array; its header must claim numbers, and no more of them than its member holds."""
    if f"{name}.npy" not in archive.namelist():
        held = ", ".join(member.removesuffix(".npy") for member in archive.namelist()[:10]) or "nothing"
        raise InvalidInput(f"{path} has no array {name!r}, it holds {held[:200]}: save it as np.savez(x=, y=)")
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as file:
        shape, dtype = _read_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise InvalidInput(f"{path} is not a .npz file of plain arrays: array {name} holds pickled objects")
    if not (np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.floating) or dtype == np.dtype(bool)):
        raise InvalidInput(f"{path}: array {name} is {dtype}, must be numeric")
    count = math.prod(shape)
    claimed, held_bytes = count * dtype.itemsize, member.file_size - start
    if claimed != held_bytes or member.file_size > _DENSEST * (member.compress_size + 1):
        raise InvalidInput(f"{path}: array {name} claims {claimed:,} bytes, which its file does not hold: resave it")
    if count * _WIDTH > find_memory():
        size = f"{count * _WIDTH / 2**30:,.0f} GiB"
        raise InvalidInput(f"{path}: array {name} needs {size} as float64, more than the memory: use fewer records")
    return shape


def _read_header(file: IO[bytes]) -> Header:
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    shape, _, dtype = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    if any(size < 0 for size in shape):
        raise ValueError("a negative size")
    return shape, dtype


def _require_pair(path: Path, x: tuple[int, ...], y: tuple[int, ...]) -> None:
    if len(y) != 1 or len(x) < 2 or x[0] != y[0]:
        raise InvalidInput(f"{path}: x is {x} and y is {y}, must be (N, ...) and (N,)")


def _load(archive: zipfile.ZipFile, name: str) -> Array:
    with archive.open(f"{name}.npy") as file:
        found = npy.read_array(file, allow_pickle=False)
    return np.asarray(found).astype(np.float64)


def find_memory() -> int:
    """Bytes of memory that the machine reports."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**36
