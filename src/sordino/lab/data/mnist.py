"""What the image sets share: the idx format and the choice of normalisation."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.data import store
from sordino.data.dataset import Data, Step
from sordino.data.download import DataUnavailable, Remote
from sordino.errors import InvalidInput

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""

CENTRED: Constants = ((0.5,), (0.5,))
IMAGENET: Constants = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def read_idx(path: Path) -> Tensor:
    """A gzipped idx file of unsigned bytes: 2 zero bytes, type 8, the number of dimensions, sizes, then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataUnavailable(f"{path} is not a whole gzip file ({error}): delete it and load again") from error
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" else 0
    sizes = np.frombuffer(content, ">u4", count=dimensions, offset=4).astype(int)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if dimensions == 0 or values.size != sizes.prod():
        raise DataUnavailable(f"{path} is not an idx file of bytes: delete it and load again")
    return torch.from_numpy(values.reshape(sizes).copy())


def load_idx(
    name: str, base: str, md5: tuple[str, str, str, str], published: Constants, classes: tuple[str, ...], normalise: str
) -> Data:
    """MNIST and Fashion-MNIST: four files, in the order train images, train labels, test images, test labels."""
    files = [f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    remotes = [Remote(base + file, f"md5:{digest}") for file, digest in zip(files, md5, strict=True)]
    x, y, test_x, test_y = (read_idx(store.obtain(name, remote)) for remote in remotes)
    step, constants = normalisation(normalise, {"dataset": published})
    train = TensorDataset(scaled(x[:, None], constants), y.long())
    test = TensorDataset(scaled(test_x[:, None], constants), test_y.long())
    return Data(name, train, test, classes, (step,))


def normalisation(choice: str, further: dict[str, Constants]) -> tuple[Step, Constants | None]:
    """What is done to the pixels, and whether it read private records.

    ``"unit"`` leaves them in [0, 1], ``"centred"`` maps them to [-1, 1]; ``"dataset"`` uses the mean and deviation
    that are published for the training images, which therefore depend on private records.
    """
    if choice == "unit":
        return Step("pixels divided by 255"), None
    choices = {"centred": CENTRED, **further}
    if choice not in choices:
        raise InvalidInput(f"normalise={choice!r} must be one of {', '.join(['unit', *choices])}: start with 'unit'")
    constants = choices[choice]
    what = f"pixels divided by 255, minus {constants[0]}, divided by {constants[1]}"
    if choice != "dataset":
        return Step(what), constants
    return Step(f"{what}: statistics of the training images", True, "normalise='unit' or 'centred'"), constants


def scaled(pixels: Tensor, constants: Constants | None) -> Tensor:
    """Bytes [N, C, H, W] as floats in [0, 1], or standardised by the constants."""
    values = pixels.float().div_(255)
    if constants is None:
        return values
    mean, std = (torch.tensor(c).reshape(1, -1, 1, 1) for c in constants)
    return values.sub_(mean).div_(std)
