"""Ways back that are operations themselves, for losses that have gradients by activations within (gradient penalties).

The gradient of an output by an operation's input is made from the parameter again: that of ``F.linear(x, W)`` is
``g @ W``, which is a use of W like any other. A loss that differentiates asks for such gradients with their graph, and
an operation that is part of one goes back by the operations here, which are recorded when they run. What adds a
parameter to an activation has no part of it in its way back. Where a parameter is an activation, expanded to the shape
of the result, torch's own ways back are right. All else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import Call, NoRule, Rules, name_of
from sordino.gradients.rules.conv import RULES as CONVOLUTIONS
from sordino.gradients.rules.conv import conv, per_dimension
from sordino.gradients.rules.elementwise import RULES as ELEMENTWISE
from sordino.gradients.rules.elementwise import add, add_, div, mul, pointwise, prelu, rsub, sub
from sordino.gradients.rules.linear import RULES as PRODUCTS
from sordino.gradients.rules.linear import addmm, linear
from sordino.gradients.rules.normalisation import RULES as NORMALISATIONS
from sordino.gradients.rules.normalisation import group_norm, layer_norm

Apply = Callable[..., Tensor]
"""Runs a function on tensors: recorded, or on parameters without their gradients."""
Back = Callable[[Apply, Tensor], Tensor]
"""From an output gradient to that of the input."""


def find_way(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Tensor, Back] | None:
    """The input of an operation that has a way back of its own, and that way; None if torch's is right."""
    if function not in WAYS:
        return None
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise NoRule(f"{name_of(function)}: gradients within the loss are not recorded under autocast")
    found: tuple[Tensor, Back] = WAYS[function](*args, **kwargs)
    return found


def back_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Back]:
    """F.linear."""
    return input, lambda run, g: run(torch.matmul, g, weight)


def back_matmul(input: Tensor, other: Tensor) -> tuple[Tensor, Back]:
    """``x @ W``."""
    if other.dim() != 2 or input.dim() < 2:
        raise NoRule("matmul: gradients within the loss are recorded of x @ W alone")
    return input, lambda run, g: run(F.linear, g, other)


def back_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Tensor, Back]:
    """Convolutions: back by the transposed one, to a size that its stride does not tell."""
    if isinstance(padding, str):
        raise NoRule("convolution: with padding in words, gradients within the loss are not recorded")
    space = weight.dim() - 2
    strides, paddings, dilations = (per_dimension(each, space) for each in (stride, padding, dilation))
    shape = zip(input.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True)
    left = tuple((n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in shape)
    back = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[space - 1]
    return input, lambda run, g: run(back, g, weight, None, strides, paddings, left, groups, dilations)


def back_conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> tuple[Tensor, Back]:
    """Transposed convolutions: back by the plain one."""
    back = (torch.conv1d, torch.conv2d, torch.conv3d)[weight.dim() - 3]
    return input, lambda run, g: run(back, g, weight, None, stride, padding, dilation, groups)


def scale_layer(
    call: Call,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    """F.layer_norm: normalised, then scaled and shifted."""
    return shift(call, F.layer_norm(input, normalized_shape, None, None, eps), weight, bias)


def scale_groups(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    """F.group_norm, by channels."""
    along = (1, -1, *[1] * (input.dim() - 2))
    channels = (call.use(torch.reshape, each, along) if call.tracks(each) else each for each in (weight, bias))
    scale, offset = (each if each is None or each.dim() > 1 else each.reshape(along) for each in channels)
    return shift(call, F.group_norm(input, num_groups, None, None, eps), scale, offset)


def shift(call: Call, normalised: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Scale and offset, of which each may be missing or frozen."""
    scaled = normalised if scale is None else call.use(torch.mul, normalised, scale)
    shifted: Tensor = scaled if offset is None else call.use(torch.add, scaled, offset)
    return shifted


WAYS: Mapping[Any, Callable[..., tuple[Tensor, Back]]] = MappingProxyType(
    {
        **dict.fromkeys((each for each, rule in PRODUCTS.items() if rule not in (linear, addmm)), back_matmul),
        **dict.fromkeys((each for each, rule in PRODUCTS.items() if rule is linear), back_linear),
        **{each: back_conv if rule is conv else back_conv_transpose for each, rule in CONVOLUTIONS.items()},
    }
)
"""Operations with a way back that has to be recorded."""

REPLACED = {mul: pointwise, div: pointwise, layer_norm: scale_layer, group_norm: scale_groups}
RIGHT = (add, add_, sub, rsub, pointwise, prelu)
SLOPES: Rules = {
    each: REPLACED.get(rule, rule)
    for each, rule in {**ELEMENTWISE, **NORMALISATIONS}.items()
    if rule in RIGHT or rule in REPLACED
}
"""Rules for operations whose way back torch knows."""
