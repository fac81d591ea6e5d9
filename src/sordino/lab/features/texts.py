"""Turns a text into one vector, from that record alone: a review by its words, a name by its short runs of letters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.data.cache import cache_folder, remember_tensor
from sordino.lab.data.surnames import OFFSET, PAD
from sordino.lab.features.synthetic import scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
CHUNK = 1000
_SMALLEST = 1e-6
_PRIME, _FACTOR = 2**31 - 1, 1_000_003


def describe_words(
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

    With n_w the count of token w in a record, and phi of `anchor_words`, the features are

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
        words = anchor_words(embedding, anchors=anchors, among=among, threshold=threshold)
        rows = [_bag(part, words) for part in tokens.split(CHUNK)] if len(tokens) else [words[:0]]
        with path.open("wb") as file:
            np.save(file, torch.cat(rows).numpy())

    place, what = folder or cache_folder() / "words", (VERSION, anchors, among, threshold)
    return remember_tensor(place, what, (tokens, embedding), make, title="features of words")


def anchor_words(embedding: Tensor, *, anchors: int, threshold: float, among: int = 5000) -> Tensor:
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
    vectors = scale_to_unit(_whiten(embedding[known].float(), ridge=0.0))
    chosen = vectors[torch.arange(anchors) * among // anchors]
    near = (vectors @ chosen.T - threshold).clamp(min=0.0)
    words = torch.zeros(len(embedding), anchors)
    words[known] = scale_to_unit(_whiten(near, ridge=1e-3))
    return words


def _bag(tokens: Tensor, words: Tensor) -> Tensor:
    """Return the features of a chunk of records, through a sparse matrix of counts."""
    records = torch.arange(len(tokens))[:, None].expand_as(tokens)
    places = torch.stack([records.reshape(-1), tokens.reshape(-1)])
    ones = torch.ones(tokens.numel())
    counts = torch.sparse_coo_tensor(places, ones, (len(tokens), len(words)), check_invariants=True).coalesce()
    roots = torch.sparse_coo_tensor(counts.indices(), counts.values().sqrt(), counts.shape, check_invariants=True)
    return scale_to_unit(torch.sparse.mm(roots, words))


def _whiten(rows: Tensor, ridge: float) -> Tensor:
    """Rows with mean zero and, except for `ridge` times the largest variance, the identity as covariance."""
    centred = (rows - rows.mean(0)).double()
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
    scales = (variances + ridge * variances[-1]).clamp(min=_SMALLEST**2).rsqrt()
    white: Tensor = centred @ (directions * scales)
    return white.float()


def describe_letters(tokens: Tensor, *, runs: Sequence[int] = (2,), buckets: int = 1024) -> Tensor:
    """Features [N, len(runs) * buckets] of norm 1 of the token ids [N, length] of `sordino.lab.data.surnames`.

    For every n in `runs`: the roots of the counts of all n letters in a row, hashed to `buckets` numbers, brought to
    norm 1. Capitals count as small letters; the beginning and the end of a name count as letters, so endings show.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    Edge cases: a name with no n letters in a row is zero there.
    """
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InvalidInput(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}, must be whole numbers [N, length]"
        )
    if not runs or min(runs) < 1 or max(runs) > tokens.shape[1]:
        raise InvalidInput(f"runs={list(runs)} must be one or more lengths in 1..{tokens.shape[1]}: try [2]")
    if buckets < 1:
        raise InvalidInput(f"buckets={buckets} must be >= 1: try 1024")
    letters = _fold_capitals(tokens.long())
    return scale_to_unit(torch.cat([scale_to_unit(_count_runs(letters, run, buckets).sqrt()) for run in runs], 1))


def _fold_capitals(tokens: Tensor) -> Tensor:
    """Return the ids with A to Z written as a to z."""
    capital = (tokens >= ord("A") + OFFSET) & (tokens <= ord("Z") + OFFSET)
    return torch.where(capital, tokens + ord("a") - ord("A"), tokens)


def _count_runs(letters: Tensor, run: int, buckets: int) -> Tensor:
    """How often each bucket is hit by `run` letters in a row, none of them padding."""
    windows = letters.unfold(1, run, 1)
    whole = (windows != PAD).all(2)
    hashed = torch.zeros_like(windows[..., 0])
    for place in range(run):  # below 2^51 throughout: exact
        hashed = (hashed * _FACTOR + windows[..., place]) % _PRIME
    counts = torch.zeros(len(letters), buckets, device=letters.device)
    return counts.scatter_add_(1, hashed * _FACTOR % _PRIME % buckets, whole.float())
