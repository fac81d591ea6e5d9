"""`--features`: what a model learns from instead of the pixels of images, computed once for all trials of a search.

Features treat each image by itself, so they cost nothing. Those of the known datasets are kept in the user's cache;
those of a user's own images are never written to disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.errors import InvalidInput
from sordino.tables.dataset import Data

MODEL = "linear"
"""The model that learns from features if the user names none."""
GROUPS = 27
"""Number of groups in which the scattering channels of each image are normalised (Tramèr & Boneh 2021)."""


def _scatter(images: Tensor, folder: Path | None) -> Tensor:
    from sordino.lab.features import scatter
    from sordino.lab.features.synthetic import scale_to_unit

    return scale_to_unit(scatter(images, groups=GROUPS, folder=folder, quiet=True).flatten(1))


def _see_patches(images: Tensor, folder: Path | None) -> Tensor:
    from sordino.lab.features.patches import describe_patches

    return describe_patches(images, folder=folder)


def _read_handwriting(images: Tensor, folder: Path | None) -> Tensor:
    from sordino.lab.features.handwriting import describe_handwriting

    return describe_handwriting(images, folder=folder, quiet=True)


KINDS: dict[str, Callable[[Tensor, Path | None], Tensor]] = {
    "scattering": _scatter,
    "patches": _see_patches,
    "handwriting": _read_handwriting,
}


def require_kind(name: str) -> str:
    """Return `name`, or raise an error that lists the known ones."""
    if name not in KINDS:
        raise InvalidInput(f"features={name} are unknown: use one of {', '.join(KINDS)}")
    return name


def describe(images: Tensor, kind: str, *, keep: bool = False) -> Tensor:
    """Compute the features of `images` [N, channels, H, W], one row of norm 1 for each; `keep` caches them."""
    make = KINDS[require_kind(kind)]
    if images.dim() != 4:
        shape = " x ".join(map(str, images.shape[1:])) or "one number"
        raise InvalidInput(f"features={kind} are for images, and a record has {shape}: leave out --features")
    if not len(images):
        return images.flatten(1)
    if keep:
        return make(images, None)
    with TemporaryDirectory() as folder:
        return make(images, Path(folder)).clone()


def describe_records(data: Data, kind: str, *, keep: bool = False) -> Data:
    """Replace each record by its features."""
    parts = [
        TensorDataset(describe(inputs, kind, keep=keep), classes) if len(inputs) else TensorDataset(inputs, classes)
        for inputs, classes in (data.train, data.test)
    ]
    return replace(data, train_set=parts[0], test_set=parts[1])
