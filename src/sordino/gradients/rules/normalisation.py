"""Scale and shift of layer, group, instance, RMS and (with fixed statistics) batch normalisation, per example."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    Formed,
    Normalise,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    Settle,
    precise,
    sum_channels,
)


def sum_trailing(shape: Sequence[int], normalised: Normalise | None = None) -> Settle:
    """Share of a scale (or of a shift, without `normalised`) over the last dimensions: sum_rows G ∘ normalised."""

    def settle(g: Tensor, at: Examples) -> PerExample:
        values = precise(g) if normalised is None else precise(g) * precise(normalised())
        first = at.first(values)
        middle = list(range(1, first.dim() - len(shape)))
        return Formed(first.sum(middle) if middle else first)

    return settle


def layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm."""
    call.only(weight, bias)
    output = F.layer_norm(input, normalized_shape, call.plain(weight), call.plain(bias), eps)
    scale = sum_trailing(normalized_shape, lambda: F.layer_norm(precise(input.detach()), normalized_shape, eps=eps))
    shares = [ParameterShare(weight, scale), ParameterShare(bias, sum_trailing(normalized_shape))]
    return call.keep(output, (input,), shares, output.dim() - len(normalized_shape))


def rms_norm(
    call: Call, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """F.rms_norm."""
    call.only(weight)
    output = F.rms_norm(input, normalized_shape, call.plain(weight), eps)
    scale = sum_trailing(normalized_shape, lambda: F.rms_norm(input.detach(), normalized_shape, eps=eps))
    return call.keep(output, (input,), [ParameterShare(weight, scale)], output.dim() - len(normalized_shape))


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.group_norm."""
    call.only(weight, bias)
    output = F.group_norm(input, num_groups, call.plain(weight), call.plain(bias), eps)
    scale = sum_channels(lambda: F.group_norm(precise(input.detach()), num_groups, eps=eps))
    return call.keep(output, (input,), [ParameterShare(weight, scale), ParameterShare(bias, sum_channels())], 1)


def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm; running statistics that are updated would carry records unclipped, so they have no rule."""
    call.only(weight, bias)
    if use_input_stats and running_mean is not None:
        raise NoRule("instance_norm: running statistics are updated from private records")
    statistics = (running_mean, running_var)
    output = F.instance_norm(input, *statistics, call.plain(weight), call.plain(bias), use_input_stats, momentum, eps)
    scale = sum_channels(
        lambda: F.instance_norm(input.detach(), *statistics, None, None, use_input_stats, momentum, eps)
    )
    return call.keep(output, (input,), [ParameterShare(weight, scale), ParameterShare(bias, sum_channels())], 1)


def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm with fixed statistics; with batch statistics examples are mixed and there is no rule."""
    call.only(weight, bias)
    if training or running_mean is None:
        raise NoRule("batch_norm: batch statistics mix examples; use GroupNorm or put the layer in eval mode")
    output = F.batch_norm(input, running_mean, running_var, call.plain(weight), call.plain(bias), False, momentum, eps)
    scale = sum_channels(
        lambda: F.batch_norm(input.detach(), running_mean, running_var, None, None, False, momentum, eps)
    )
    return call.keep(output, (input,), [ParameterShare(weight, scale), ParameterShare(bias, sum_channels())], 1)


RULES: Rules = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
}
