"""A review as one vector: how close its words are to anchor words, by public word vectors alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sordino.data.store import cache_folder
from sordino.errors import InvalidInput
from sordino.features.kept import kept
from sordino.features.whitening import unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK = 1000
_SMALLEST = 1e-6


def word_features(
    tokens: Tensor,
    embedding: Tensor,
    *,
    anchors: int = 1000,
    among: int = 5000,
    threshold: float = 0.2,
    folder: Path | None = None,
) -> Tensor:
    """Features [N, anchors] of norm 1 of token ids [N, length]; row i of `embedding` is the vector of token i.

    They come from a file in `folder` (the user's cache by default) if they were asked for before.

    With n_w the count of token w in a record, and phi of `anchored`, the features are

        sum_w sqrt(n_w) phi_w, divided by its norm.

    Guarantees: a record's features depend on that record and on the public vectors alone, so they are free of charge.
    Edge cases: a token whose vector is zero, such as padding, counts for nothing; a record of only such is zero.
    """
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InvalidInput(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}, must be whole numbers [N, length]"
        )
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(embedding):
        raise InvalidInput(
            f"token ids {int(tokens.min())}..{int(tokens.max())} must be rows 0..{len(embedding) - 1} of the embedding"
        )

    def make(path: Path) -> None:
        words = anchored(embedding, anchors=anchors, among=among, threshold=threshold)
        rows = [_bag(part, words) for part in tokens.split(CHUNK)] if len(tokens) else [words[:0]]
        with path.open("wb") as file:
            np.save(file, torch.cat(rows).numpy())

    place, what = folder or cache_folder() / "words", (VERSION, anchors, among, threshold)
    return kept(place, what, (tokens, embedding), make, title="features of words")


def anchored(embedding: Tensor, *, anchors: int, threshold: float, among: int = 5000) -> Tensor:
    """Word vectors [V, anchors]: phi_w = unit(whiten(max(0, <u_w, u_a> - threshold) for every anchor a)).

    u_w = unit(whiten(embedding)_w), and the anchors are evenly spaced among the first `among` rows that have a vector,
    the frequent words where rows are ranked: if the ranks were counted on private text, so were the anchors. Both
    whitenings take mean and covariance over the vocabulary, each word once: no text is counted. A linear classifier on
    the sum of phi_w weighs small neighbourhoods of words, where one on the mean vector weighs 100 directions.
    """
    known = embedding.abs().sum(1) > 0
    among = min(among, int(known.sum()))
    if not 1 <= anchors <= among:
        raise InvalidInput(f"anchors={anchors} must be in 1..{among}, the words they are chosen among")
    if not 0 <= threshold < 1:
        raise InvalidInput(f"threshold={threshold} must be in [0, 1): it is a cosine; 0.2 to start with")
    vectors = unit(_whitened(embedding[known].float(), ridge=0.0))
    chosen = vectors[torch.arange(anchors) * among // anchors]
    near = (vectors @ chosen.T - threshold).clamp(min=0.0)
    words = torch.zeros(len(embedding), anchors)
    words[known] = unit(_whitened(near, ridge=1e-3))
    return words


def _bag(tokens: Tensor, words: Tensor) -> Tensor:
    """The features of a chunk of records, through a sparse matrix of counts."""
    records = torch.arange(len(tokens))[:, None].expand_as(tokens)
    places = torch.stack([records.reshape(-1), tokens.reshape(-1)])
    ones = torch.ones(tokens.numel())
    counts = torch.sparse_coo_tensor(places, ones, (len(tokens), len(words)), check_invariants=True).coalesce()
    roots = torch.sparse_coo_tensor(counts.indices(), counts.values().sqrt(), counts.shape, check_invariants=True)
    return unit(torch.sparse.mm(roots, words))


def _whitened(rows: Tensor, ridge: float) -> Tensor:
    """Rows with mean zero and, but for `ridge` times the largest variance, with the identity as covariance."""
    centred = (rows - rows.mean(0)).double()
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
    scales = (variances + ridge * variances[-1]).clamp(min=_SMALLEST**2).rsqrt()
    white: Tensor = centred @ (directions * scales)
    return white.float()
