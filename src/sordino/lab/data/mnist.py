"""MNIST, Fashion-MNIST and scikit-learn's digits: the idx format, and the choice of normalisation for all images."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.errors import InvalidInput
from sordino.lab.data import cache
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.tables.dataset import Data, Preprocessing, split

Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""

CENTRED: Constants = ((0.5,), (0.5,))
IMAGENET: Constants = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST_MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
FASHION_CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def load_mnist(normalise: str = "unit") -> Data:
    """MNIST (LeCun, Cortes, Burges): 60,000 + 10,000 handwritten digits [N, 1, 28, 28].

    Dynamic DP-SGD uses ``normalise="dataset"``, the other papers ``"unit"``.
    """
    return load_idx("mnist", _MNIST, _MNIST_MD5, ((0.1307,), (0.3081,)), tuple("0123456789"), normalise)


def load_fashion_mnist(normalise: str = "unit") -> Data:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 + 10,000 articles of clothing [N, 1, 28, 28].

    The papers use ``"unit"``.
    """
    return load_idx("fashion-mnist", _FASHION, _FASHION_MD5, ((0.2860,), (0.3530,)), FASHION_CLASSES, normalise)


def load_digits() -> Data:
    """Handwritten digits [N, 1, 8, 8] in [0, 1], which come with scikit-learn: examples and tests need no download.

    A fixed fifth is held out (1,438 for training, 359 held out).
    """
    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16)[:, None]
    classes = torch.from_numpy(bunch.target).long()
    train, test = split(len(classes))
    return Data(
        "digits",
        TensorDataset(images[train], classes[train]),
        TensorDataset(images[test], classes[test]),
        tuple("0123456789"),
        (Preprocessing("pixels divided by 16"), Preprocessing("a fixed fifth of the records held out")),
    )


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
    x, y, test_x, test_y = (read_idx(cache.obtain(name, remote)) for remote in remotes)
    step, constants = choose_normalisation(normalise, {"dataset": published})
    train = TensorDataset(scale_pixels(x[:, None], constants), y.long())
    test = TensorDataset(scale_pixels(test_x[:, None], constants), test_y.long())
    return Data(name, train, test, classes, (step,))


def choose_normalisation(choice: str, further: dict[str, Constants]) -> tuple[Preprocessing, Constants | None]:
    """Choose what is done to the pixels, and say whether that reads private records.

    ``"unit"`` leaves them in [0, 1], ``"centred"`` maps them to [-1, 1]; ``"dataset"`` uses the mean and deviation
    that are published for the training images, which therefore depend on private records.
    """
    if choice == "unit":
        return Preprocessing("pixels divided by 255"), None
    choices = {"centred": CENTRED, **further}
    if choice not in choices:
        raise InvalidInput(f"normalise={choice!r} must be one of {', '.join(['unit', *choices])}: start with 'unit'")
    constants = choices[choice]
    what = f"pixels divided by 255, minus {constants[0]}, divided by {constants[1]}"
    if choice != "dataset":
        return Preprocessing(what), constants
    return Preprocessing(f"{what}: statistics of the training images", True, "normalise='unit' or 'centred'"), constants


def scale_pixels(pixels: Tensor, constants: Constants | None) -> Tensor:
    """Bytes [N, C, H, W] as floats in [0, 1], or standardised by the constants."""
    values = pixels.float().div_(255)
    if constants is None:
        return values
    mean, std = (torch.tensor(c).reshape(1, -1, 1, 1) for c in constants)
    return values.sub_(mean).div_(std)
