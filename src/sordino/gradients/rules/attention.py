"""F.multi_head_attention_forward, as nn.MultiheadAttention calls it: linear maps around attention.

The function arrives as one. It is rewritten with the examples first; its projections go through the rule of F.linear.
Attention itself, and similarities, may be given parameters too: learned positions in the place of a mask, or learned
queries. They take part as activations, one copy for each example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import Call, NoRule, Rules
from sordino.gradients.rules.elementwise import widen


@dataclass(frozen=True)
class Projections:
    """The parameters of an attention layer, under torch's own names."""

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None

    def apply(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; one product for those that come from the same tensor."""
        width = query.shape[-1]
        if self.in_proj_weight is not None and query is key and key is value:
            together: Tensor = call.use(F.linear, query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = together.chunk(3, -1)
            return q, k, v
        if self.in_proj_weight is not None:
            weights = call.use(torch.split, self.in_proj_weight, width)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else call.use(torch.split, self.in_proj_bias, width)
        q, k, v = (call.use(F.linear, x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v


def attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The function with its own signature; query, key and value are [time, examples, features]."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise NoRule("multi_head_attention_forward: unbatched input or static keys")
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        raise NoRule("multi_head_attention_forward: features do not fit the heads")
    q, k, v = move_examples_first(query, key, value)
    projections = Projections(
        None if use_separate_proj_weight else in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight
    )
    q, k, v = projections.apply(call, q, k, v)
    k, v, extra = append_extra_steps(call, k, v, bias_k, bias_v, add_zero_attn)
    mask = merge_masks(q, num_heads, key_padding_mask, attn_mask, extra)
    q, k, v = (each.unflatten(-1, (num_heads, -1)).transpose(1, 2) for each in (q, k, v))
    dropout = dropout_p if training else 0.0
    if need_weights:
        mixed, weights = attend_explicitly(q, k, v, mask, dropout)
    else:
        causal = is_causal and key_padding_mask is None
        mixed, weights = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal), None
    output: Tensor = call.use(F.linear, mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return output.transpose(0, 1), weights


def move_examples_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[examples, time, features]; arguments that were the same tensor stay the same."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def append_extra_steps(
    call: Call, k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, zero: bool
) -> tuple[Tensor, Tensor, int]:
    """Keys and values with a learned step (bias_k, bias_v) and a zero step appended, and how many those are."""
    extra = 0
    if bias_k is not None and bias_v is not None:
        size, width = len(k), k.shape[-1]
        k = call.use(torch.cat, [k, call.use(Tensor.expand, bias_k, size, 1, width)], 1)
        v = call.use(torch.cat, [v, call.use(Tensor.expand, bias_v, size, 1, width)], 1)
        extra += 1
    if zero:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra += 1
    return k, v, extra


def merge_masks(
    q: Tensor, heads: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None, extra: int
) -> Tensor | None:
    """One additive mask that broadcasts to [examples, heads, targets, sources]; extra steps are always seen."""
    merged = None
    if attn_mask is not None:
        additive = F.pad(make_additive(attn_mask, q), (0, extra))
        merged = additive if additive.dim() == 2 else additive.unflatten(0, (len(q), heads))
    if key_padding_mask is not None:
        padding = F.pad(make_additive(key_padding_mask, q), (0, extra))[:, None, None, :]
        merged = padding if merged is None else merged + padding
    return merged


def make_additive(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask (True: not seen) as zeros and minus infinities."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Attention that also returns its weights."""
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ v, weights


def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """F.scaled_dot_product_attention with learned positions (Swin, T5), queries, keys or values."""
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in (query, key, value)))

    def widened(tensor: Tensor, *last: int) -> Tensor:
        return widen(call, tensor, (*batch, *last), ()) if call.tracks(tensor) else tensor

    q, k, v = (widened(each, *each.shape[-2:]) for each in (query, key, value))
    mask = None if attn_mask is None else widened(attn_mask, query.shape[-2], key.shape[-2])
    if kwargs.get("enable_gqa"):
        raise NoRule("scaled_dot_product_attention: groups of queries with a parameter have no rule")
    return F.scaled_dot_product_attention(q, k, v, mask, *args, **kwargs)


def similarity(call: Call, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """F.cosine_similarity with learned prototypes."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    left, right = (widen(call, each, shape, ()) if call.tracks(each) else each for each in (x1, x2))
    return F.cosine_similarity(left, right, dim, eps)


RULES: Rules = {
    F.multi_head_attention_forward: attention,
    F.scaled_dot_product_attention: attend,
    F.cosine_similarity: similarity,
}
