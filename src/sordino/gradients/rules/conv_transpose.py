"""Transposed convolutions: adjoints of convolutions, so their weight gradients are those with G and X swapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import Call, NoRule, PerExample, Share, precise
from sordino.gradients.rules.conv import Convolved, Geometry, channel_sum, per_dimension


def conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """torch.conv_transpose1d, 2d and 3d on batched input."""
    call.only(weight, bias)
    space = weight.dim() - 2
    if input.dim() != weight.dim():
        raise NoRule("transposed convolution: the input has no dimension for examples")
    plain = (call.plain(weight), call.plain(bias))
    output = call.function(input, *plain, stride, padding, output_padding, groups, dilation)
    strides, paddings, dilations = (per_dimension(each, space) for each in (stride, padding, dilation))
    geometry = Geometry(tuple(weight.shape[2:]), strides, paddings, dilations, groups)

    def settle(g: Tensor, at: Examples) -> PerExample:
        return Convolved(precise(at.items(g)), precise(at.items(input)), weight.shape, geometry)

    return call.keep(output, (input,), [Share(weight, settle), Share(bias, channel_sum)], 1)


RULES: dict[Callable[..., Any], Callable[..., Any]] = dict.fromkeys(
    (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), conv_transpose
)
