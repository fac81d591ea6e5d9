"""Texts as bags of hashed words: no vocabulary is read, and each text is encoded by itself."""

from __future__ import annotations

import string
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_LETTERS = str.maketrans(_PUNCTUATION + string.ascii_uppercase, " " * len(_PUNCTUATION) + string.ascii_lowercase)
_MOST_CELLS = 2**28
_FEWEST, _MOST = 64, 1024
LENGTH = 8.0
"""Of the row of a text: about that of a table of sixty numbers, so that both are learnt at one pace."""


def bag_of_words(texts: Sequence[str], buckets: int) -> NDArray[np.float32]:
    """One row per text: the square roots of its word counts by bucket, signed by the hash, at length `LENGTH`.

    The sign makes words that share a bucket cancel on average instead of adding up (Weinberger et al. 2009); the root
    keeps a word that is repeated from drowning the others. An empty text is a row of zeros.
    """
    rows = np.zeros((len(texts), buckets), np.float32)
    for row, text in zip(rows, texts, strict=True):
        codes = np.array([zlib.crc32(word.encode()) for word in tokenise(text)], np.int64)
        np.add.at(row, codes // 2 % buckets, 1 - 2 * (codes % 2))
    rows = np.sign(rows) * np.sqrt(np.abs(rows))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(LENGTH * rows / np.maximum(lengths, 1.0), np.float32)


def tokenise(text: str) -> list[str]:
    """Keras' words: lower case (ASCII only), punctuation but the apostrophe is space."""
    return [word for word in text.translate(_LETTERS).split(" ") if word]


def buckets_for(records: int) -> int:
    """How many buckets that many records can fill: a power of two, from the public number of records alone."""
    fitting = min(_MOST, max(_FEWEST, records // 16), max(_FEWEST, _MOST_CELLS // max(1, records)))
    return 1 << (fitting.bit_length() - 1)
