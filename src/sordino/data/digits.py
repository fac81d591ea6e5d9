"""Digits: 1,797 handwritten digits of 8x8, bundled with scikit-learn, so that examples and tests need no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from sordino.tables.dataset import Data, Step, split


def load() -> Data:
    """Images [N, 1, 8, 8] in [0, 1]; a fixed fifth is held out (1,438 for training, 359 held out)."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16)[:, None]
    classes = torch.from_numpy(bunch.target).long()
    train, test = split(len(classes))
    return Data(
        "digits",
        TensorDataset(images[train], classes[train]),
        TensorDataset(images[test], classes[test]),
        tuple("0123456789"),
        (Step("pixels divided by 16"), Step("a fixed fifth of the records held out")),
    )
