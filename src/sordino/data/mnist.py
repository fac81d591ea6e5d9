"""MNIST: 60,000 + 10,000 handwritten digits of 28x28 (LeCun, Cortes, Burges)."""

from __future__ import annotations

from sordino.data.images import load_idx
from sordino.tables.dataset import Data

BASE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)


def load(normalise: str = "unit") -> Data:
    """Images [N, 1, 28, 28]; Dynamic DP-SGD uses ``normalise="dataset"``, the other papers ``"unit"``."""
    return load_idx("mnist", BASE, MD5, ((0.1307,), (0.3081,)), tuple("0123456789"), normalise)
