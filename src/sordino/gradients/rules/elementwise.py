"""Parameters that are added, multiplied or expanded: gradient_i = the sum of G_i ∘ factor over broadcast dimensions.

Sums, products and quotients have their factors here. Every other operation by entries (powers, where, clamp, ...), also
in place, is run on the parameter expanded to the shape of the result: to autograd that is an activation like any other,
and its gradient is summed over what was expanded, for each example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
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
    is_in_place,
    name_of,
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


def pointwise(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Any operation by entries with broadcasting: the parameters take part as activations of the result's shape."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if is_in_place(name_of(call.function)):
        require_activation(call, args[0])
        shape = args[0].shape
    else:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    wide = {id(parameter): widen(call, parameter, shape, tensors) for parameter in call.tracked()}
    given = [wide.get(id(each), each) for each in args]
    named = {name: wide.get(id(each), each) for name, each in kwargs.items()}
    output: Tensor = call.function(*given, **named)
    return output


def widen(call: Call, parameter: Tensor, shape: tuple[int, ...], among: Sequence[Tensor]) -> Tensor:
    """The parameter expanded to a shape, as an activation whose gradient is kept.

    A number among tensors takes their dtype, as it would without being expanded.
    """
    plain = call.plain(parameter)
    others = [each.dtype for each in among if each.dim() and each.is_floating_point()]
    if plain.dim() == 0 and others:
        plain = plain.to(reduce(torch.promote_types, others))
    return call.keep(plain.clone().expand(shape), (), [share_broadcast(parameter, lambda g: g)], len(shape))


def require_activation(call: Call, input: Tensor) -> None:
    """Refuse to change a user's tensor in place: a gradient would be lost."""
    if not input.requires_grad or input.is_leaf:
        raise NoRule(f"{name_of(call.function)}: modifies in place a tensor that is not an activation")


def masked_fill(call: Call, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """input, or a number where the mask says so; also in place."""
    tensors = [each for each in (input, mask, value) if isinstance(each, Tensor)]
    in_place = is_in_place(name_of(call.function))
    if in_place:
        require_activation(call, input)
    shape = input.shape if in_place else torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    wide = {id(parameter): widen(call, parameter, shape, tensors) for parameter in call.tracked()}
    output = torch.where(mask, wide.get(id(value), value), wide.get(id(input), input))
    return input.copy_(output) if in_place else output


def between(call: Call, input: Any, other: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """torch.maximum under its older name, which is also that of a reduction."""
    if not isinstance(other, Tensor):
        raise NoRule(f"{name_of(call.function)}: a reduction of a parameter and data")
    return pointwise(call, input, other, *args, **kwargs)


def prelu(call: Call, input: Tensor, weight: Tensor) -> Tensor:
    """input where it is positive, otherwise a slope times input: one for all, or one for each entry of dimension 1."""
    call.only(weight)
    if weight.numel() == 1:
        slope = call.use(torch.reshape, weight, (1,) * input.dim())
    else:
        slope = call.use(torch.reshape, weight, (1, -1, *[1] * (input.dim() - 2)))
    steep = call.use(torch.mul, input, slope)
    result: Tensor = call.use(torch.where, input > 0, input, steep)  # steep may be shared by all
    return result


def add_(call: Call, input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """``x += parameter`` on an activation."""
    call.only(other)
    require_activation(call, input)
    if input._is_view():  # the gradient comes back by the base, past the view
        return pointwise(call, input, other, alpha=alpha)
    output = input.add_(call.plain(other), alpha=alpha)
    share = share_broadcast(other, lambda g: g if alpha == 1 else g * alpha)
    return call.keep(output, (), [share], output.dim())


def expand(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Tensor:
    """A parameter repeated for every example, such as a class token."""
    call.only(input)
    # A copy, as the parameter itself would count as changed in place by whatever is done to this view of it.
    output = call.function(call.plain(input).clone(), *sizes, **named)
    return call.keep(output, (), [share_broadcast(input, lambda g: g)], output.dim())


EXPANSIONS = frozenset(
    {
        *(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to),
        *(Tensor.repeat, torch.tile, Tensor.tile),
    }
)


REPETITIONS = frozenset({Tensor.repeat, torch.tile, Tensor.tile})


def expands_examples(func: Any, args: Any, kwargs: Any, size: int | None) -> bool:
    """Whether an expansion makes a dimension of `size` (unknown: any size) from nothing, which may be the examples."""
    tensor, rest = args[0], args[1:] or tuple(kwargs.values())
    target = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
    target = target.shape if isinstance(target, Tensor) else target
    if func in REPETITIONS:
        return any(count > 1 and (size is None or count % size == 0) for count in target)
    before = [1] * (len(target) - tensor.dim()) + list(tensor.shape)
    grown = [now for was, now in zip(before, target, strict=True) if was == 1 and now not in (1, -1)]
    return size in grown if size is not None else bool(grown)


def find_spread(tensor: Tensor, result: Tensor, size: int) -> int | None:
    """The first dimension of an expansion that was made from nothing and may be the examples."""
    before = [1] * (result.dim() - tensor.dim()) + list(tensor.shape)
    pairs = enumerate(zip(before, result.shape, strict=True))
    return next((dim for dim, (was, now) in pairs if was == 1 and now == size), None)


def repeat(call: Call, input: Tensor, *sizes: Any, **named: Any) -> Tensor:
    """``parameter.repeat(size, 1, …)``: an expansion, or the rows of a matrix again and again for every example."""
    call.only(input)
    output: Tensor = call.function(call.plain(input), *sizes, **named)
    aligned = [1] * (output.dim() - input.dim()) + list(input.shape)
    if any(was not in (1, now) for was, now in zip(aligned[1:], output.shape[1:], strict=True)):
        raise NoRule("repeat: repeats a dimension longer than 1")
    if aligned[0] in (1, len(output)):
        return call.keep(output, (), [share_broadcast(input, lambda g: g)], output.dim())
    share = ParameterShare(input, lambda g, at: Formed(reduce_repeated(precise(g), input.shape, at)))
    return call.keep(output, (), [share], 1)


def reduce_repeated(values: Tensor, shape: torch.Size, at: Examples) -> Tensor:
    """Sum over the repetitions of the first dimension, each example's a whole number of them, and as `reduce_to`."""
    first = at.first(values)
    if at.layout.kind not in (Kind.MAJOR, Kind.WHOLE) or first.shape[1] % shape[0]:
        raise NoRule("repeat: the examples cut through a repetition")
    parts = first.reshape(at.size, -1, shape[0], *first.shape[2:]).sum(1)
    return parts.sum_to_size(at.size, *shape).reshape(at.size, *shape)


POINTWISE = """
    pow float_power where clamp clip clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv atan2
    arctan2 hypot xlogy xlog1py copysign logaddexp logaddexp2 remainder fmod __pow__ __rpow__ __rtruediv__ __rdiv__
    __mod__ mul_ multiply_ div_ divide_ true_divide_ sub_ subtract_ pow_ clamp_ clip_ clamp_min_ clamp_max_
    lerp_ addcmul_ addcdiv_ copysign_ atan2_ hypot_ xlogy_ __imul__ __isub__ __itruediv__ __idiv__ __ipow__
"""
"""Operations by entries, by name."""


def find_pointwise() -> list[Any]:
    """The functions of these names, wherever torch has them."""
    owners: tuple[Any, ...] = (torch, Tensor, torch.special)
    found = (getattr(owner, name, None) for name in POINTWISE.split() for owner in owners)
    return [function for function in found if callable(function)]


RULES: Rules = {
    **dict.fromkeys(find_pointwise(), pointwise),
    **dict.fromkeys((torch.max, Tensor.max, torch.min, Tensor.min), between),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), masked_fill),
    **dict.fromkeys((torch.prelu, Tensor.prelu), prelu),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), add),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract), sub),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), rsub),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply), mul),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide), div),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), add_),
    **dict.fromkeys((Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to), expand),
    **dict.fromkeys((Tensor.repeat, torch.tile, Tensor.tile), repeat),
}
