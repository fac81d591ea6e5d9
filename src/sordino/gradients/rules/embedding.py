"""F.embedding and F.embedding_bag: the gradient of example i has few non-zero rows, one for each distinct token.

A row is the sum of the token's output gradients; every token of a bag gets the bag's, times its coefficient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sordino.errors import UnsupportedModel
from sordino.gradients.rules.base import (
    Call,
    Examples,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    precise,
    squares,
    zero_rows,
)
from sordino.gradients.rules.linear import round_up

MANY, TABLE = 2**22, 2**20
"""More entries of gradients than this are sorted before they are added to a larger table: neither fits a cache."""

SCALED = 2**18
"""Entries of output gradients that are scaled at a time, 1 MB: they are added up while a cache still has them."""


class Looked(PerExample):
    """gradient_i[v] = sum of g[i, t] over the t with tokens[i, t] = v; tokens [size, T], g [size, T, d].

    Norms: sort each example's tokens and add up the gradients of repeated ones; nothing [size, vocabulary] exists.
    """

    manner = "repeated tokens"

    def __init__(self, tokens: Tensor, g: Tensor, vocabulary: int) -> None:
        self.tokens, self.g = tokens, g
        self.size = len(tokens)
        self.shape = torch.Size((vocabulary, g.shape[-1]))
        self.same = tokens.shape[1] > 1 and g.stride(1) == 0  # as behind a mean over the tokens

    def repetitions(self) -> Tensor:
        """How many pairs (t, u) of places of each example hold the same token: the sum of squared counts."""
        ordered = self.tokens.sort(dim=1).values
        new = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
        run = new.flatten().cumsum(0) - 1
        counts = torch.bincount(run).to(self.g.dtype).square_()
        starts = new.flatten().nonzero().squeeze(1) // self.tokens.shape[1]
        return self.g.new_zeros(self.size).index_add_(0, starts, counts)

    def mass(self) -> Tensor:
        return (self.tokens.shape[1] * squares(self.g.flatten(1))).sqrt()

    def squared_norms(self) -> Tensor:
        """Sum over v of |gradient_i[v]|^2; for equal gradients of all tokens, |g_i|^2 sum over v of count_i[v]^2."""
        if self.same:
            return squares(self.g[:, 0]) * self.repetitions()
        lengths = squares(self.g.flatten(0, 1)).reshape(self.g.shape[:2])
        if self.tokens.shape[1] < 2:
            return lengths.sum(1)
        ordered, order = self.tokens.sort(dim=1)
        again = ordered[:, 1:] == ordered[:, :-1]
        repeated = F.pad(again, (1, 0)) | F.pad(again, (0, 1))
        example, place = repeated.nonzero(as_tuple=True)
        if len(example) == 0:
            return lengths.sum(1)
        # Neighbours in the order are equal tokens: each run of them is one row of the gradient.
        position = order[example, place]
        run = (~F.pad(again, (1, 0)))[example, place].cumsum(0) - 1
        sums = self.g.new_zeros(int(run[-1]) + 1, self.g.shape[2]).index_add_(0, run, self.g[example, position])
        owner = torch.empty(len(sums), dtype=torch.long, device=run.device).index_copy_(0, run, example)
        lengths[example, position] = 0
        return round_up(lengths.sum(1).index_add_(0, owner, sums.square_().sum(1)), self.mass())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.g.numel() > MANY and self.shape.numel() > TABLE:
            return self.sum_sorted(weights)
        return self.add_to(self.g.new_zeros(self.shape), weights)

    def add_to(self, total: Tensor, weights: Tensor) -> Tensor:
        """Add the weighted sum to a table of float32 or better, touching only its rows."""
        if total.device.type != "cpu":  # where rows would be added in any order
            return total.add_(self.sum_sorted(weights))
        step = max(1, SCALED // max(1, self.g[0].numel() if self.size else 1))
        for start in range(0, self.size, step):
            some = slice(start, start + step)
            scales = weights[some].to(self.g.dtype).reshape(-1, 1, 1)
            rows = (self.g[some, :1] * scales).expand_as(self.g[some]) if self.same else self.g[some] * scales
            total.index_add_(0, self.tokens[some].flatten(), rows.flatten(0, 1).to(total.dtype))
        return total

    def sum_sorted(self, weights: Tensor) -> Tensor:
        """Rows of equal tokens brought together are bags of an embedding bag: one fused kernel sums them, weighted."""
        tokens, length = self.tokens.flatten(), self.tokens.shape[1]
        order = tokens.argsort()
        counts = tokens.new_zeros(self.shape[0]).index_add_(0, tokens, torch.ones_like(tokens))  # bincount would wait
        ends = counts.cumsum(0)
        example = order // length
        rows, table = (example, self.g[:, 0]) if self.same else (order, self.g.flatten(0, 1))
        scales = weights.to(self.g.dtype)[example]
        return F.embedding_bag(rows, table, F.pad(ends[:-1], (1, 0)), mode="sum", per_sample_weights=scales)

    def form(self, start: int, stop: int) -> Tensor:
        tokens, g = self.tokens[start:stop], self.g[start:stop]
        index = tokens.unsqueeze(-1).expand_as(g)
        return g.new_zeros(stop - start, *self.shape).scatter_add_(1, index, g)

    def without(self, bad: Tensor) -> Looked:
        return Looked(self.tokens, zero_rows(self.g, bad), self.shape[0])


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
        return Bagged(self.tokens, zero_rows(self.coefficients, bad), zero_rows(self.g, bad), self.shape[0])


def embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding; the gradient is dense also for sparse=True, as the optimizer's noise is dense anyway."""
    call.only(weight)
    refuse_options("embedding", max_norm, scale_grad_by_freq)
    padding = None if padding_idx is None else padding_idx % len(weight)
    output = F.embedding(input, call.plain(weight), padding_idx)

    def settle(g: Tensor, at: Examples) -> PerExample:
        tokens = at.rows(input.unsqueeze(-1)).squeeze(-1)
        g = precise(at.rows(g))
        if padding is not None:
            g = g.masked_fill((tokens == padding).unsqueeze(-1), 0)
        return Looked(tokens, g, len(weight))

    return call.keep(output, (input,), [ParameterShare(weight, settle)], output.dim() - 1)


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
    """Sums and means, of rows of tokens or of bags given by offsets; the largest of rows of tokens."""
    call.only(weight)
    refuse_options("embedding_bag", max_norm, scale_grad_by_freq)
    if mode == "max":
        if input.dim() != 2 or padding_idx is not None or input.shape[1] == 0:
            raise NoRule("embedding_bag: of bags' largest, only those of rows without padding have a rule")
        largest: Tensor = call.use(torch.max, call.use(F.embedding, input, weight), 1)[0]
        return largest
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
        tokens, coefficients = split_bags(input, offsets, per_sample_weights, include_last_offset, precise(g))
        if padding is not None:
            coefficients = coefficients.masked_fill(tokens == padding, 0)
        if mode == "mean":
            coefficients = coefficients / coefficients.sum(1, keepdim=True).clamp_min(1)
        kept = Bagged(tokens, coefficients, precise(g), len(weight))
        if len(tokens) == at.size and at.layout.owners is None:  # owners may have them in another order
            return kept
        every = kept.looked()
        return Looked(at.first(every.tokens).flatten(1), at.first(every.g).flatten(1, 2), len(weight))

    kept = [tensor for tensor in (input, offsets, per_sample_weights) if tensor is not None]
    return call.keep(output, kept, [ParameterShare(weight, settle)], 1)


def split_bags(
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


def refuse_options(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Options under which one example's gradient depends on the others, or the weights on private tokens."""
    if max_norm is not None:
        raise UnsupportedModel(f"{name} max_norm={max_norm} rewrites the rows that private tokens use: remove max_norm")
    if scale_grad_by_freq:
        raise UnsupportedModel(f"{name} scale_grad_by_freq=True scales by counts of the whole batch: set it to False")


RULES: Rules = {F.embedding: embedding, F.embedding_bag: embedding_bag}
