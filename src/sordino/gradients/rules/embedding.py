"""F.embedding: the gradient of example i has few non-zero rows, one sum of output gradients for each distinct token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import Call, PerExample, Share, precise, zeroed


class Looked(PerExample):
    """gradient_i[v] = sum of g[i, t] over the t with tokens[i, t] = v; tokens [size, T], g [size, T, d].

    Norms: sort the (example, token) pairs and add up each run of equal pairs; nothing [size, vocabulary] exists.
    """

    def __init__(self, tokens: Tensor, g: Tensor, vocabulary: int) -> None:
        self.tokens, self.g = tokens, g
        self.size = len(tokens)
        self.shape = torch.Size((vocabulary, g.shape[-1]))

    def squared_norms(self) -> Tensor:
        if self.tokens.shape[1] <= 1:
            return self.g.square().sum((1, 2))
        # Equal tokens of one example become neighbours; each run's sum lands in the slot of its first position.
        ordered, order = self.tokens.sort(dim=1)
        fresh = torch.ones_like(ordered, dtype=torch.bool)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        run = fresh.flatten().cumsum(0).sub_(1)
        offset = torch.arange(self.size, device=order.device).mul_(self.tokens.shape[1]).unsqueeze(1)
        slots = torch.empty_like(run).scatter_(0, (order + offset).flatten(), run)
        d = self.g.shape[-1]
        sums = self.g.new_zeros(len(run), d).index_add_(0, slots, self.g.reshape(-1, d))
        example = torch.arange(len(run), device=run.device) // self.tokens.shape[1]
        owner = torch.zeros_like(run).scatter_(0, run, example)
        return self.g.new_zeros(self.size).index_add_(0, owner, sums.square_().sum(1))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        scaled = self.g * weights.to(self.g.dtype).reshape(-1, 1, 1)
        return self.g.new_zeros(self.shape).index_add_(0, self.tokens.flatten(), scaled.flatten(0, 1))

    def form(self, start: int, stop: int) -> Tensor:
        tokens, g = self.tokens[start:stop], self.g[start:stop]
        index = tokens.unsqueeze(-1).expand_as(g)
        return g.new_zeros(stop - start, *self.shape).scatter_add_(1, index, g)

    def without(self, bad: Tensor) -> Looked:
        return Looked(self.tokens, zeroed(self.g, bad), self.shape[0])


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
    refuse("embedding", max_norm, scale_grad_by_freq)
    padding = None if padding_idx is None else padding_idx % len(weight)
    output = F.embedding(input, call.plain(weight), padding_idx)

    def settle(g: Tensor, at: Examples) -> PerExample:
        tokens = at.rows(input.unsqueeze(-1)).squeeze(-1)
        g = precise(at.rows(g))
        if padding is not None:
            g = g.masked_fill((tokens == padding).unsqueeze(-1), 0)
        return Looked(tokens, g, len(weight))

    return call.keep(output, (input,), [Share(weight, settle)], output.dim() - 1)


def refuse(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Options under which one example's gradient depends on the others, or the weights on private tokens."""
    if max_norm is not None:
        raise UnsupportedModel(f"{name} max_norm={max_norm} rewrites the rows that private tokens use: remove max_norm")
    if scale_grad_by_freq:
        raise UnsupportedModel(f"{name} scale_grad_by_freq=True scales by counts of the whole batch: set it to False")


RULES: dict[Callable[..., Any], Callable[..., Any]] = {F.embedding: embedding}
