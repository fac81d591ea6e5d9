"""Bags of words that were counted privately: the vocabulary comes only from a noisy release.

A linear classifier on the words of a text must know which words are frequent: these say little, and rare ones are lost
in the noise. Counting them on the records costs privacy. Here words are hashed, so no list of words is needed. How many
texts have each bucket is released once, with noise, and decides which buckets count and how much. These numbers are the
diagonal of the bag's second moments, and the features are preconditioned by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.accounting.events import GaussianDpEvent
from sordino.errors import InvalidInput
from sordino.lab.features.synthetic import scale_to_unit
from sordino.noise import Gaussians, add_noise
from sordino.tables.normalising import Charging

CHUNK = 1000
SPECIAL = 3
"""Token ids of padding, of the start and of unknown words, which are not words."""


@dataclass(frozen=True)
class CountedWords:
    """`noise` is the multiplier of the release, `most` a public bound on the different words of a text that count.

    The `kept` most frequent buckets are used, as far as the release can tell them; `ridge` is added to the share of
    texts with a bucket before it is divided by.
    """

    noise: float
    kept: int = 8000
    most: int = 128
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in (("noise", self.noise), ("ridge", self.ridge)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name}={value} must be finite and > 0: try noise=20 and ridge=0.001")
        if min(self.kept, self.most) < 1:
            raise InvalidInput(f"kept={self.kept} and most={self.most} must be >= 1: try 8000 and 128")


def count_words(
    tokens: Tensor, buckets: int, choice: CountedWords, *, records: int, ledger: Charging, source: Gaussians
) -> Tensor:
    """Return the share of texts with each of `buckets` token ids, with noise: one Gaussian release.

    With a_i the zeros and ones of record i, shortened to the norm sqrt(most), and n = `records`, a public number,

        share = (sum_i a_i + N(0, (noise * sqrt(most))^2)) / n.

    Guarantees: one more record moves the sum by at most sqrt(most), so the release is a Gaussian event of multiplier
    `noise`, charged before the noise is drawn. Edge cases: padding and unknown words are not words; a text without
    words counts nothing.
    """
    _require_ids(tokens, buckets)
    total = torch.zeros(buckets, dtype=torch.float64)
    for part in tokens.split(CHUNK):
        rows = torch.arange(len(part))[:, None].expand_as(part)[part >= SPECIAL]
        pairs = (rows * buckets + part[part >= SPECIAL]).unique()  # each word of a text once
        texts, words = pairs // buckets, pairs % buckets
        different = torch.bincount(texts, minlength=len(part))[texts]
        total.index_add_(0, words, (choice.most / different).sqrt().clamp(max=1.0).double())
    bound = math.sqrt(choice.most)
    receipt = ledger.charge(GaussianDpEvent(choice.noise), "how many texts have each hashed word")
    return (add_noise(source, receipt, total, choice.noise * bound) / records).float()


def describe_counted(tokens: Tensor, shares: Tensor, choice: CountedWords) -> Tensor:
    """Features [N, kept] of norm 1, in half precision, of token ids [N, length] by released `shares`.

    With n_w the count of word w in a text: sqrt(n_w / (share_w + ridge)) for the `kept` words of the largest shares,
    divided by their norm.
    Guarantees: given the release, a record's features depend on that record alone.
    """
    _require_ids(tokens, len(shares))
    words = shares.index_fill(0, torch.arange(SPECIAL), -torch.inf)
    kept = words.topk(min(choice.kept, len(shares) - SPECIAL)).indices.sort().values
    scales = (shares[kept].clamp(min=0.0) + choice.ridge).rsqrt()
    places = torch.full((len(shares),), len(kept))  # words that are not kept go to a column that is then left out
    places[kept] = torch.arange(len(kept))
    rows = torch.empty(len(tokens), len(kept), dtype=torch.float16)
    for begin in range(0, len(tokens), CHUNK):
        part = places[tokens[begin : begin + CHUNK]]
        counts = torch.zeros(len(part), len(kept) + 1).scatter_add_(1, part, torch.ones(part.shape))[:, :-1]
        rows[begin : begin + CHUNK] = scale_to_unit(counts.sqrt() * scales).half()
    return rows


def _require_ids(tokens: Tensor, buckets: int) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InvalidInput(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}, must be whole numbers [N, length]"
        )
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < buckets:
        raise InvalidInput(f"token ids must be in 0..{buckets - 1}: load the texts with words={buckets}")
