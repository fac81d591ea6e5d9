"""IMDb: 25,000 + 25,000 film reviews, good or bad (Maas et al. 2011)."""

from __future__ import annotations

import hashlib
import lzma
import re
import tarfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.errors import InvalidInput
from sordino.lab.data import cache
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.lab.data.vocabulary import (
    VOCABULARIES,
    cut_windows,
    embed,
    encode_all,
    keras_words,
    public_words,
    token_ids,
)
from sordino.tables.dataset import Data, Preprocessing, spread

OFFICIAL = Remote(
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", "md5:7c2ac02c03563afcf9b574c7e56c153a"
)
FEWEST = 4
Reviews = tuple[list[str], list[int]]


def load_imdb(
    vocabulary: str = "keras", words: int = 20_000, length: int = 80, pad: str = "post", cut: str = "post"
) -> Data:
    """Token ids [N, length] below `words`: 0 padding, 1 start, 2 unknown.

    The defaults are DPSUR's and DPIS's; Dynamic DP-SGD's stand-in takes 10,000 words and length 256. The Keras
    vocabulary was counted on the private training reviews; ``"glove"`` and ``"hashed"`` read none.
    """
    if vocabulary not in VOCABULARIES:
        raise InvalidInput(
            f"vocabulary={vocabulary!r} must be one of {', '.join(VOCABULARIES)}: 'hashed' needs no file"
        )
    _check_words(words)
    if length < 1:
        raise InvalidInput(f"length={length} must be >= 1: DPSUR reads the first 80 words of a review")
    splits = {}
    for split in ("train", "test"):
        stored = _code_reviews(split, vocabulary)
        ids = token_ids(stored["codes"], vocabulary, words)
        tokens, classes = torch.from_numpy(cut_windows(ids, stored["ends"], length, pad, cut)), stored["classes"]
        order = spread(len(tokens))
        splits[split] = TensorDataset(tokens[order], torch.from_numpy(classes).long()[order])
    steps = (
        VOCABULARIES[vocabulary],
        Preprocessing(f"the first {words} token ids, length {length}, pad {pad}, cut {cut}"),
    )
    return Data("imdb", splits["train"], splits["test"], ("bad", "good"), steps)


def glove_embedding(vocabulary: str = "keras", words: int = 20_000) -> Tensor:
    """GloVe vectors [words, 100], one row per token id of `load` with the same arguments."""
    if vocabulary not in ("keras", "glove"):
        raise InvalidInput(f"vocabulary={vocabulary!r} must be 'keras' or 'glove': hashed words have no vectors")
    _check_words(words)
    counted = vocabulary == "keras"
    ranked = keras_words() if counted else public_words()
    return embed(ranked[: words - 4], excerpt=counted)


def _check_words(words: int) -> None:
    if words < FEWEST:
        raise InvalidInput(f"words={words} must be >= {FEWEST}: ids 0 to 2 are padding, start and unknown; try 20000")


def _code_reviews(split: str, vocabulary: str) -> dict[str, NDArray[np.generic]]:
    """Word codes of all reviews of a split; made once, because tokenising takes seconds."""
    source = cache.obtain("imdb", OFFICIAL, f"{split}.tsv.xz")

    def make() -> dict[str, NDArray[np.generic]]:
        texts, classes = _read_archive(source, split) if source.name == OFFICIAL.name else _read_table(source)
        return {"classes": np.array(classes, dtype=np.uint8), **encode_all(texts, vocabulary)}

    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return cache.remember_arrays("imdb", f"{split}-{vocabulary}-{digest}", make)


def _read_table(path: Path) -> Reviews:
    """One review per line: class, rating, id, text. Only newlines end a line, and a text may hold tabs."""
    try:
        lines = lzma.decompress(path.read_bytes()).decode().split("\n")
        rows = [line.split("\t", 3) for line in lines if line]
        return [row[3] for row in rows], [int(row[0]) for row in rows]
    except (lzma.LZMAError, UnicodeDecodeError, IndexError, ValueError) as error:
        raise DataUnavailable(f"{path} is not a table of reviews ({error}): replace the file and load again") from error


def _read_archive(path: Path, split: str) -> Reviews:
    """Read the official archive: aclImdb/<split>/<neg or pos>/<id>_<rating>.txt, here in the order class, id."""
    pattern = re.compile(rf"aclImdb/{split}/(neg|pos)/(\d+)_\d+\.txt")
    reviews = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if (match := pattern.fullmatch(member.name)) else None
            if match and file is not None:
                reviews[int(match[1] == "pos"), int(match[2])] = file.read().decode()
    if not reviews:
        raise DataUnavailable(f"{path} holds no {split} reviews: delete it and load again")
    keys = sorted(reviews)
    return [reviews[key] for key in keys], [label for label, _ in keys]
