"""Reviews as word codes: the three vocabularies, and GloVe's vectors.

The Keras vocabulary was counted on private reviews. GloVe 6B (Pennington et al. 2014) was counted on public text, so
its words and vectors are public.
"""

from __future__ import annotations

import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.data import cache
from sordino.lab.data.download import Remote
from sordino.tables.dataset import Preprocessing
from sordino.tables.encoding import tokenise

WORD_INDEX = Remote(
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/imdb_word_index.json",
    "md5:bfafd718b763782e994055a2d397834f",
)
VOCABULARIES = {
    "keras": Preprocessing(
        "words ranked by their count in the training reviews", True, "vocabulary='glove' (public ranks) or 'hashed'"
    ),
    "glove": Preprocessing("words ranked as in GloVe 6B, which was counted on public text"),
    "hashed": Preprocessing("words hashed, no vocabulary"),
}
GLOVE = Remote(
    "https://nlp.stanford.edu/data/glove.6B.zip",
    "sha256:617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
)
MEMBER = "glove.6B.100d.txt"
EXCERPT = "glove6b_100d_imdb20k.npz"
"""The vectors of IMDb's 20,000 most frequent words: small, but which words it holds was counted on the reviews."""
CLITICS = ("n't", "'s", "'re", "'ve", "'m", "'ll", "'d")
Vector = NDArray[np.float32]


def make_coder(vocabulary: str) -> Callable[[str], list[int]]:
    """Make a function from text to word codes: ranks from 1 with 0 for unknown words, or 32-bit hashes."""
    if vocabulary == "hashed":
        return lambda text: [zlib.crc32(word.encode()) for word in tokenise(text)]
    if vocabulary == "glove":
        ranks = {word: rank for rank, word in enumerate(public_words(), 1)}
        return lambda text: [ranks.get(part, 0) for word in tokenise(text) for part in split_word(word)]
    if vocabulary == "keras":
        ranks = {word: rank for rank, word in enumerate(keras_words(), 1)}
        return lambda text: [ranks.get(word, 0) for word in tokenise(text)]
    raise InvalidInput(f"vocabulary={vocabulary!r} must be one of {', '.join(VOCABULARIES)}: 'hashed' needs no file")


def encode_all(texts: Iterable[str], vocabulary: str) -> dict[str, NDArray[np.generic]]:
    """Return the codes of all texts end to end, and where each text ends."""
    code = make_coder(vocabulary)
    rows = [np.array(code(text), dtype=np.uint32) for text in texts]
    return {"codes": np.concatenate(rows), "ends": np.cumsum([len(row) for row in rows])}


def keras_words() -> list[str]:
    """Return the words of the training reviews, the most frequent first (rank 1)."""
    path = cache.obtain("imdb", WORD_INDEX, "vocab.txt.xz")
    if path.name != WORD_INDEX.name:
        return lzma.decompress(path.read_bytes()).decode().split("\n")
    index: dict[str, int] = json.loads(path.read_bytes())
    return sorted(index, key=index.__getitem__)


def token_ids(codes: NDArray[np.generic], vocabulary: str, words: int) -> NDArray[np.int64]:
    """Token ids below `words`: 0 padding, 1 start, 2 unknown, then rank + 3 as Keras has it, or 3 + hash."""
    wide = codes.astype(np.int64)
    if vocabulary == "hashed":
        return wide % (words - 3) + 3
    return np.where((wide > 0) & (wide + 3 < words), wide + 3, 2)


def cut_windows(
    ids: NDArray[np.int64], ends: NDArray[np.generic], length: int, pad: str, cut: str
) -> NDArray[np.int64]:
    """One row of `length` per text, with the start token; `pad` and `cut` say on which side, "pre" or "post"."""
    for name, side in (("pad", pad), ("cut", cut)):
        if side not in ("pre", "post"):
            raise InvalidInput(f"{name}={side!r} must be 'pre' or 'post': DPSUR uses 'post'")
    rows = np.zeros((len(ends), length), dtype=np.int64)
    begin = 0
    for row, end in zip(rows, ends.tolist(), strict=True):
        text = np.concatenate([[1], ids[begin:end]])
        kept = text[:length] if cut == "post" else text[-length:]
        row[slice(len(kept)) if pad == "post" else slice(length - len(kept), length)] = kept
        begin = end
    return rows


def split_word(word: str) -> list[str]:
    """GloVe's own split of contractions: don't is do + n't."""
    clitic = next((c for c in CLITICS if word.endswith(c) and len(word) > len(c)), None)
    return [word] if clitic is None else [word[: -len(clitic)], clitic]


def public_words(count: int = 50_000) -> list[str]:
    """Return GloVe's most frequent words; only the whole official file is free of the reviews' counts."""
    return [line[0] for line in islice(_read_lines(), count)]


def embed(words: Sequence[str], *, excerpt: bool = False) -> Tensor:
    """One row per token id: three rows of zeros and one unused, then one row per word of rank 1, 2, ...

    A word without a vector gets the mean of its parts, or zeros. With `excerpt` the small file is enough. It reveals
    which words the reviews hold, so use it only for words that were counted on them anyway.
    """
    known = _read_vectors(set(words), excerpt)
    rows = np.zeros((len(words) + 4, 100), dtype=np.float32)
    for row, word in zip(rows[4:], words, strict=True):
        found = [known[part] for part in ([word] if word in known else split_word(word)) if part in known]
        if found:
            row[:] = np.mean(found, axis=0)
    return torch.from_numpy(rows)


def _read_vectors(words: set[str], excerpt: bool) -> dict[str, Vector]:
    """Read the vectors of `words` and of their parts, from the small excerpt if that is allowed and exists."""
    wanted = words | {part for word in words for part in split_word(word)}
    if excerpt and (path := cache.find_file("glove", EXCERPT, GLOVE.name)) is not None and path.name == EXCERPT:
        with np.load(path) as stored:
            found = stored["found"]
            names = [*stored["words"][found], *stored["clitics"]]
            vectors = np.concatenate([stored["vectors"][found], stored["clitic_vectors"]]).astype(np.float32)
        return {name: vector for name, vector in zip(names, vectors, strict=True) if name in wanted}
    return {word: np.array(numbers, dtype=np.float32) for word, *numbers in _read_lines() if word in wanted}


def _read_lines() -> Iterator[list[str]]:
    """Yield the lines of the official file: a word and its 100 numbers."""
    with zipfile.ZipFile(cache.obtain("glove", GLOVE)) as archive, archive.open(MEMBER) as member:
        for line in io.TextIOWrapper(member, encoding="utf-8", newline="\n"):
            yield line.rstrip("\n").split(" ")
