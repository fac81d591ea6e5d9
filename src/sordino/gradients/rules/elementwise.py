"""Parameters that are added, multiplied or expanded: gradient_i = the sum of G_i ∘ factor over broadcast dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    Formed,
    Kind,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    precise,
)


def reduce_to(values: Tensor, shape: torch.Size, at: Examples) -> Tensor:
    """Sum [*output] values over what a parameter of `shape` was broadcast along, per example: [size, *shape]."""
    aligned = [1] * (values.dim() - len(shape)) + list(shape)
    if at.layout.kind is not Kind.WHOLE and aligned[at.layout.dim] != 1:
        raise NoRule("elementwise: the parameter has an entry for every example of the batch")
    if at.layout.kind is Kind.DIMENSION:
        del aligned[at.layout.dim]  # of what is folded, the first length is that of the others
    if at.layout.kind is Kind.OWNED:
        aligned.insert(0, aligned.pop(at.layout.dim))
    first = at.first(values)
    dims = [dim for dim, length in enumerate(aligned, 1) if length == 1]
    summed = first.sum(dims, keepdim=True) if dims else first
    return summed.reshape(at.size, *shape)


def share_broadcast(parameter: Tensor, factor: Callable[[Tensor], Tensor]) -> ParameterShare:
    """The share of a parameter whose output gradient reaches it through an elementwise factor."""

    def settle(g: Tensor, at: Examples) -> PerExample:
        return Formed(reduce_to(factor(precise(g)), parameter.shape, at))

    return ParameterShare(parameter, settle)


def split_operands(call: Call, left: Any, right: Any) -> tuple[Any, Any, bool]:
    """Both operands plain, and whether the left one is the parameter."""
    if call.tracks(left) and call.tracks(right):
        raise NoRule("elementwise: two parameters in one operation with data")
    return call.plain(left), call.plain(right), call.tracks(left)


def add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """input + alpha * other."""
    left, right, is_left = split_operands(call, input, other)
    parameter, scale = (input, 1.0) if is_left else (other, alpha)
    output = torch.add(left, right, alpha=alpha)
    share = share_broadcast(parameter, lambda g: g if scale == 1 else g * scale)
    return call.keep(output, (), [share], output.dim())


def sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """input - alpha * other."""
    return add(call, input, other, alpha=-alpha)


def rsub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """other - alpha * input."""
    return add(call, other, input, alpha=-alpha)


def mul(call: Call, input: Any, other: Any) -> Tensor:
    """input * other."""
    left, right, is_left = split_operands(call, input, other)
    parameter, factor = (input, right) if is_left else (other, left)
    output = torch.mul(left, right)
    return call.keep(output, (factor,), [share_broadcast(parameter, lambda g: g * factor)], output.dim())


def div(call: Call, input: Any, other: Any, *, rounding_mode: None = None) -> Tensor:
    """input / other: the gradient of the divisor p is -G ∘ input / p²."""
    left, right, is_left = split_operands(call, input, other)
    if rounding_mode is not None:
        raise NoRule("div: rounding has no gradient")
    parameter = input if is_left else other
    output = torch.div(left, right)
    factor = (lambda g: g / right) if is_left else (lambda g: -g * left / right.square())
    data = right if is_left else left
    return call.keep(output, (data,), [share_broadcast(parameter, factor)], output.dim())


def add_(call: Call, input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """``x += parameter`` on an activation; on a tensor of the user's it would leave a gradient behind."""
    call.only(other)
    if not input.requires_grad or input.is_leaf:
        raise NoRule("add_: modifies in place a tensor that is not an activation")
    output = input.add_(call.plain(other), alpha=alpha)
    share = share_broadcast(other, lambda g: g if alpha == 1 else g * alpha)
    return call.keep(output, (), [share], output.dim())


def expand(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Tensor:
    """A parameter repeated for every example, such as a class token."""
    call.only(input)
    output = call.function(call.plain(input), *sizes, **named)
    return call.keep(output, (), [share_broadcast(input, lambda g: g)], output.dim())


EXPANSIONS = frozenset(
    {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to, Tensor.repeat, torch.tile}
)


def expands_examples(args: Any, kwargs: Any, size: int | None) -> bool:
    """Whether an expansion makes a dimension of `size` (unknown: any size) from nothing, which may be the examples."""
    tensor, rest = args[0], args[1:] or tuple(kwargs.values())
    target = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
    target = target.shape if isinstance(target, Tensor) else target
    before = [1] * (len(target) - tensor.dim()) + list(tensor.shape)
    grown = [now for was, now in zip(before, target, strict=True) if was == 1 and now not in (1, -1)]
    return size in grown if size is not None else bool(grown)


def repeat(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Tensor:
    """``parameter.repeat(size, 1, …)`` where only dimensions of length 1 are repeated is an expansion."""
    call.only(input)
    output: Tensor = call.function(call.plain(input), *sizes, **named)
    aligned = [1] * (output.dim() - input.dim()) + list(input.shape)
    if any(was not in (1, now) for was, now in zip(aligned, output.shape, strict=True)):
        raise NoRule("repeat: repeats a dimension longer than 1")
    return call.keep(output, (), [share_broadcast(input, lambda g: g)], output.dim())


RULES: Rules = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), add),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract), sub),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), rsub),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply), mul),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide), div),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), add_),
    **dict.fromkeys((Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to), expand),
    **dict.fromkeys((Tensor.repeat, torch.tile), repeat),
}
