"""A name as one vector: which short runs of letters it has. No vocabulary is counted, so no other record is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.data.names import OFFSET, PAD
from sordino.errors import InvalidInput
from sordino.features.whitening import unit

_PRIME, _FACTOR = 2**31 - 1, 1_000_003


def letter_features(tokens: Tensor, *, runs: Sequence[int] = (2,), buckets: int = 1024) -> Tensor:
    """Features [N, len(runs) * buckets] of norm 1 of the token ids [N, length] of `sordino.data.names`.

    For every n in `runs`: the roots of the counts of all n letters in a row, hashed to `buckets` numbers, brought to
    norm 1. Capitals count as small letters; the beginning and the end of a name count as letters, so that endings tell.
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
    letters = _folded(tokens.long())
    return unit(torch.cat([unit(_counted(letters, run, buckets).sqrt()) for run in runs], 1))


def _folded(tokens: Tensor) -> Tensor:
    """The ids with A to Z written as a to z."""
    capital = (tokens >= ord("A") + OFFSET) & (tokens <= ord("Z") + OFFSET)
    return torch.where(capital, tokens + ord("a") - ord("A"), tokens)


def _counted(letters: Tensor, run: int, buckets: int) -> Tensor:
    """How often each bucket is hit by `run` letters in a row, none of them padding."""
    windows = letters.unfold(1, run, 1)
    whole = (windows != PAD).all(2)
    hashed = torch.zeros_like(windows[..., 0])
    for place in range(run):  # below 2^51 throughout: exact
        hashed = (hashed * _FACTOR + windows[..., place]) % _PRIME
    counts = torch.zeros(len(letters), buckets, device=letters.device)
    return counts.scatter_add_(1, hashed * _FACTOR % _PRIME % buckets, whole.float())
