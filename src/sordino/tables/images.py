"""A folder of images, one subfolder per class: the layout is public, the images are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sordino.errors import InvalidInput, SordinoError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class PillowMissing(SordinoError, ImportError):
    """Images need Pillow, which is not installed."""


def class_names(root: Path) -> tuple[str, ...]:
    """The names of the subfolders, in order."""
    names = tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(names) < 2:
        raise InvalidInput(f"{root} has {len(names)} subfolders, needs one for each of at least 2 classes")
    if wild := next((name for name in names if not name.isprintable()), None):
        raise InvalidInput(f"{root} has a subfolder {wild!r}: the name of a class must be printable")
    return names


def load(root: Path, classes: Sequence[str], size: int, *, grey: bool) -> tuple[Tensor, Tensor]:
    """Every image as [channels, size, size] in 0..1, and its class: records in the order of their names.

    Size and channels are public choices, so that an image becomes the same whatever the others are.
    """
    if not 8 <= size <= 512:
        raise InvalidInput(f"image-size={size} must be in 8..512: images are resized to a square of that many pixels")
    if unknown := sorted(set(class_names(root)) - set(classes)):
        raise InvalidInput(f"{root} has a subfolder {unknown[0]!r} that is not among the classes {', '.join(classes)}")
    files = [(path, number) for number, name in enumerate(classes) for path in _images(root / name)]
    if not files:
        raise InvalidInput(f"{root} has 0 images: its subfolders must hold {', '.join(sorted(SUFFIXES))} files")
    pillow = _pillow()
    pixels = np.empty((len(files), size, size, 1 if grey else 3), np.uint8)
    for row, (path, _) in zip(pixels, files, strict=True):
        row[...] = _pixels(pillow, path, size, grey=grey)
    numbers = torch.tensor([number for _, number in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255), numbers


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def _pixels(
    pillow: ModuleType, path: Path, size: int, *, grey: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with pillow.open(path) as image:
            mode = "L" if grey else "RGB"
            small = image.convert(mode).resize((size, size), pillow.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise InvalidInput(f"{path} is not an image that can be read ({type(error).__name__}): remove it") from None
    return np.asarray(small, np.uint8).reshape(size, size, -1)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise PillowMissing("reading images needs Pillow: pip install 'sordino[features]'") from None
    return Image
