"""GloVe 6B word vectors in 100 dimensions: public text, so public words and public vectors (Pennington et al. 2014)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.data import store
from sordino.data.download import Remote

OFFICIAL = Remote(
    "https://nlp.stanford.edu/data/glove.6B.zip",
    "sha256:617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
)
MEMBER = "glove.6B.100d.txt"
EXCERPT = "glove6b_100d_imdb20k.npz"
"""The vectors of IMDb's 20,000 most frequent words: small, but which words it holds was counted on the reviews."""
CLITICS = ("n't", "'s", "'re", "'ve", "'m", "'ll", "'d")
Vector = NDArray[np.float32]


def parts(word: str) -> list[str]:
    """GloVe's own split of contractions: don't is do + n't."""
    clitic = next((c for c in CLITICS if word.endswith(c) and len(word) > len(c)), None)
    return [word] if clitic is None else [word[: -len(clitic)], clitic]


def public_words(count: int = 50_000) -> list[str]:
    """GloVe's most frequent words; needs the whole official file, which alone is free of the reviews' counts."""
    return [line[0] for line in islice(_official(), count)]


def embedding(words: Sequence[str], *, excerpt: bool = False) -> Tensor:
    """One row per token id: three rows of zeros and one unused, then one row per word of rank 1, 2, ...

    A word without a vector gets the mean of its parts, or zeros. With `excerpt` the small file will do where it is; as
    it says which words the reviews hold, that is for words that were counted on them anyway.
    """
    known = _table(set(words), excerpt)
    rows = np.zeros((len(words) + 4, 100), dtype=np.float32)
    for row, word in zip(rows[4:], words, strict=True):
        found = [known[part] for part in ([word] if word in known else parts(word)) if part in known]
        if found:
            row[:] = np.mean(found, axis=0)
    return torch.from_numpy(rows)


def _table(words: set[str], excerpt: bool) -> dict[str, Vector]:
    """The vectors of `words` and of their parts, from the small excerpt if it may be and is there."""
    wanted = words | {part for word in words for part in parts(word)}
    if excerpt and (path := store.find("glove", EXCERPT, OFFICIAL.name)) is not None and path.name == EXCERPT:
        with np.load(path) as stored:
            found = stored["found"]
            names = [*stored["words"][found], *stored["clitics"]]
            vectors = np.concatenate([stored["vectors"][found], stored["clitic_vectors"]]).astype(np.float32)
        return {name: vector for name, vector in zip(names, vectors, strict=True) if name in wanted}
    return {word: np.array(numbers, dtype=np.float32) for word, *numbers in _official() if word in wanted}


def _official() -> Iterator[list[str]]:
    """The lines of the official file: a word and its 100 numbers."""
    with zipfile.ZipFile(store.obtain("glove", OFFICIAL)) as archive, archive.open(MEMBER) as member:
        for line in io.TextIOWrapper(member, encoding="utf-8", newline="\n"):
            yield line.rstrip("\n").split(" ")
