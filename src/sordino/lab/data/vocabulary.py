"""Reviews as word codes: the tokeniser and the three vocabularies, of which one was counted on private reviews."""

from __future__ import annotations

import json
import lzma
import string
import zlib
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from sordino.data import glove, store
from sordino.data.dataset import Step
from sordino.data.download import Remote
from sordino.errors import InvalidInput

WORD_INDEX = Remote(
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/imdb_word_index.json",
    "md5:bfafd718b763782e994055a2d397834f",
)
VOCABULARIES = {
    "keras": Step(
        "words ranked by their count in the training reviews", True, "vocabulary='glove' (public ranks) or 'hashed'"
    ),
    "glove": Step("words ranked as in GloVe 6B, which was counted on public text"),
    "hashed": Step("words hashed, no vocabulary"),
}
_PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TABLE = str.maketrans(_PUNCTUATION + string.ascii_uppercase, " " * len(_PUNCTUATION) + string.ascii_lowercase)


def tokenise(text: str) -> list[str]:
    """Keras' words: lower case (ASCII only), punctuation but the apostrophe is space."""
    return [word for word in text.translate(_TABLE).split(" ") if word]


def coder(vocabulary: str) -> Callable[[str], list[int]]:
    """Text to word codes: ranks from 1 with 0 for unknown words, or 32-bit hashes."""
    if vocabulary == "hashed":
        return lambda text: [zlib.crc32(word.encode()) for word in tokenise(text)]
    if vocabulary == "glove":
        ranks = {word: rank for rank, word in enumerate(glove.public_words(), 1)}
        return lambda text: [ranks.get(part, 0) for word in tokenise(text) for part in glove.parts(word)]
    if vocabulary == "keras":
        ranks = {word: rank for rank, word in enumerate(keras_words(), 1)}
        return lambda text: [ranks.get(word, 0) for word in tokenise(text)]
    raise InvalidInput(f"vocabulary={vocabulary!r} must be one of {', '.join(VOCABULARIES)}: 'hashed' needs no file")


def encode_all(texts: Iterable[str], vocabulary: str) -> dict[str, NDArray[np.generic]]:
    """The codes of all texts end to end, and where each text ends."""
    code = coder(vocabulary)
    rows = [np.array(code(text), dtype=np.uint32) for text in texts]
    return {"codes": np.concatenate(rows), "ends": np.cumsum([len(row) for row in rows])}


def keras_words() -> list[str]:
    """The words of the training reviews, the most frequent first (rank 1)."""
    path = store.obtain("imdb", WORD_INDEX, "vocab.txt.xz")
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


def windows(ids: NDArray[np.int64], ends: NDArray[np.generic], length: int, pad: str, cut: str) -> NDArray[np.int64]:
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
