"""CIFAR-10: 50,000 + 10,000 colour photographs of 32x32 (Krizhevsky 2009)."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from sordino.lab.data import cache
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.lab.data.mnist import IMAGENET, Constants, choose_normalisation, scale_pixels
from sordino.tables.dataset import Data

OFFICIAL = Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOSAICS = "labels.npy"
"""Marks a folder where every batch is one picture."""
PUBLISHED: Constants = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
MD5 = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
"""The checksum of the official binary batches; any other layout must give the same bytes."""


def load_cifar10(normalise: str = "imagenet") -> Data:
    """Load images [N, 3, 32, 32]. Tramer and Boneh and DPSUR standardise by ImageNet's constants, which are public."""
    step, constants = choose_normalisation(normalise, {"imagenet": IMAGENET, "dataset": PUBLISHED})
    stored = _decode_once()
    pixels, classes = torch.from_numpy(stored["pixels"]), torch.from_numpy(stored["classes"]).long()
    train = TensorDataset(scale_pixels(pixels[:50_000], constants), classes[:50_000])
    test = TensorDataset(scale_pixels(pixels[50_000:], constants), classes[50_000:])
    return Data("cifar10", train, test, CLASSES, (step,))


def _decode_once() -> dict[str, NDArray[np.generic]]:
    """Return what was decoded before; for SORDINO_DATA, only if it came from the files that are there now."""
    given = cache.find_given("cifar10", MOSAICS, OFFICIAL.name)
    if given is None:
        return cache.remember_arrays("cifar10", "batches", _read_batches)
    files = [given] if given.name == OFFICIAL.name else [given, *sorted(given.parent.glob("*.webp"))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:16]
    return cache.remember_arrays("cifar10", f"batches-{digest}", _read_batches)


def _read_batches() -> dict[str, NDArray[np.generic]]:
    """Read all six batches in the official order, from any layout, and check them against the official bytes."""
    source = cache.obtain("cifar10", OFFICIAL, MOSAICS)
    batches = _read_archive(source) if source.name == OFFICIAL.name else _read_mosaics(source.parent)
    for name, batch in batches.items():
        if (found := hashlib.md5(batch.tobytes()).hexdigest()) != MD5[name]:
            raise DataUnavailable(
                f"cifar10/{name} has md5 {found}, must be {MD5[name]}: replace the file and load again"
            )
    rows = np.concatenate([batches[name] for name in MD5])
    return {"pixels": rows[:, 1:].reshape(-1, 3, 32, 32), "classes": rows[:, 0]}


def _read_archive(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Each batch is 10,000 rows of one class byte and 3,072 pixel bytes (red, green, blue)."""
    batches = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).stem
            file = archive.extractfile(member) if member.name.endswith(".bin") else None
            if name in MD5 and file is not None:
                batches[name] = np.frombuffer(file.read(), np.uint8).reshape(-1, 3073)
    if missing := set(MD5) - set(batches):
        raise DataUnavailable(f"{path} lacks {', '.join(sorted(missing))}: delete it and load again")
    return batches


def _read_mosaics(folder: Path) -> dict[str, NDArray[np.uint8]]:
    """Each batch is one lossless picture, a grid of 100x100 images row by row; ``labels.npy`` has the classes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataUnavailable(
            f"{folder} holds WebP pictures and Pillow is missing: pip install 'sordino[features]'"
        ) from error
    classes = np.load(folder / MOSAICS).reshape(6, -1)
    batches = {}
    for name, labels in zip(MD5, classes, strict=True):
        try:
            with Image.open(folder / f"{name}.webp") as picture:
                grid = np.asarray(picture.convert("RGB")).reshape(100, 32, 100, 32, 3)
        except (OSError, ValueError) as error:
            raise DataUnavailable(f"{folder} holds no batch {name} ({error}): replace the files") from error
        planes = grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3072)
        batches[name] = np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1)
    return batches
