"""F.embedding_bag: every token of a bag gets the bag's output gradient, times its coefficient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import Call, NoRule, PerExample, Share, precise, squares, zeroed
from sordino.gradients.rules.embedding import Looked, refuse


class Bagged(PerExample):
    """gradient_i = counts_i ⊗ g_i with counts_i[v] the coefficients of token v, so |gradient_i| = |counts_i| |g_i|."""

    manner = "counted tokens"

    def __init__(self, tokens: Tensor, coefficients: Tensor, g: Tensor, vocabulary: int) -> None:
        self.tokens, self.coefficients, self.g = tokens, coefficients, g
        self.size = len(tokens)
        self.shape = torch.Size((vocabulary, g.shape[-1]))

    def looked(self, start: int = 0, stop: int | None = None) -> Looked:
        """The same, one output gradient for every token."""
        each = slice(start, stop)
        g = self.coefficients[each].unsqueeze(-1) * self.g[each].unsqueeze(1)
        return Looked(self.tokens[each], g, self.shape[0])

    def squared_norms(self) -> Tensor:
        counts = Looked(self.tokens, self.coefficients.unsqueeze(-1), self.shape[0])
        return counts.squared_norms() * squares(self.g)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.looked().weighted_sum(weights)

    def form(self, start: int, stop: int) -> Tensor:
        return self.looked(start, stop).form(0, stop - start)

    def without(self, bad: Tensor) -> Bagged:
        return Bagged(self.tokens, zeroed(self.coefficients, bad), zeroed(self.g, bad), self.shape[0])


def embedding_bag(
    call: Call,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums and means, of rows of tokens or of bags given by offsets."""
    call.only(weight)
    refuse("embedding_bag", max_norm, scale_grad_by_freq)
    if mode == "max":
        raise NoRule("embedding_bag: only sums and means have a rule")
    output = F.embedding_bag(
        input,
        call.plain(weight),
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    padding = None if padding_idx is None else padding_idx % len(weight)

    def settle(g: Tensor, at: Examples) -> PerExample:
        tokens, coefficients = bags(input, offsets, per_sample_weights, include_last_offset, precise(g))
        if padding is not None:
            coefficients = coefficients.masked_fill(tokens == padding, 0)
        if mode == "mean":
            coefficients = coefficients / coefficients.sum(1, keepdim=True).clamp_min(1)
        kept = Bagged(tokens, coefficients, precise(g), len(weight))
        if len(tokens) == at.size:
            return kept
        every = kept.looked()
        return Looked(at.first(every.tokens).flatten(1), at.first(every.g).flatten(1, 2), len(weight))

    kept = [tensor for tensor in (input, offsets, per_sample_weights) if tensor is not None]
    return call.keep(output, kept, [Share(weight, settle)], 1)


def bags(
    tokens: Tensor, offsets: Tensor | None, scales: Tensor | None, last_offset: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """[bags, longest] tokens and their coefficients, 0 past the end of a bag."""
    values = torch.ones_like(tokens, dtype=like.dtype) if scales is None else precise(scales.detach())
    if offsets is None:
        return tokens, values
    ends = offsets[1:] if last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(tokens)])])
    lengths = (ends - offsets[: len(ends)]).tolist()
    covered = sum(lengths)
    rows, scaled = (pad_sequence(list(each[:covered].split(lengths)), batch_first=True) for each in (tokens, values))
    return rows, scaled


RULES: dict[Callable[..., Any], Callable[..., Any]] = {F.embedding_bag: embedding_bag}
