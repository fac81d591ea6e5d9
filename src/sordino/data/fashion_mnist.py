"""Fashion-MNIST: 60,000 + 10,000 articles of clothing of 28x28 (Xiao, Rasul, Vollgraf 2017)."""

from __future__ import annotations

from sordino.data.images import load_idx
from sordino.tables.dataset import Data

BASE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def load(normalise: str = "unit") -> Data:
    """Images [N, 1, 28, 28]; the papers use ``"unit"``."""
    return load_idx("fashion-mnist", BASE, MD5, ((0.2860,), (0.3530,)), CLASSES, normalise)
