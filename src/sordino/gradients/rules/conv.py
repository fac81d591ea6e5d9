"""Convolutions, also transposed ones: gradient_i = sum over positions of G_i[position] ⊗ patch_i[position]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    Formed,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    precise,
    squares,
    sum_channels,
    zero_rows,
)
from sordino.gradients.rules.halves import are_halves, cast_as_multiplied, multiplying_halves
from sordino.gradients.rules.kernels import multiply_each
from sordino.gradients.rules.linear import FORM_BYTES, Way, choose_way, gram_norms, round_up

CACHED = 2**19
"""Entries of patches that are copied at a time, 2 MB: they are used while a cache still has them."""


@dataclass(frozen=True)
class Geometry:
    """What a convolution does in space, each entry once per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """[items, groups, channels/groups * prod(kernel), prod(positions)]: what each output position looked at."""
        if any(self.padding):
            x = F.pad(x, [pad for each in reversed(self.padding) for pad in (each, each)])
        items, channels, strides = len(x), x.shape[1], x.stride()
        moved, looked = self._steps(strides[2:])
        view = x.as_strided((items, channels, *self.kernel, *positions), (*strides[:2], *looked, *moved))
        return view.reshape(items, self.groups, channels // self.groups * prod(self.kernel), prod(positions))

    def rows(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """[items, 1, prod(positions), prod(kernel) * channels]: the same of one group, with channels innermost.

        Many channels on a small map are then copied in long runs instead of a few entries at a time.
        """
        items, channels, *extents = x.shape
        last = x.new_zeros(items, *(e + 2 * pad for e, pad in zip(extents, self.padding, strict=True)), channels)
        inner = last
        for dim, (extent, pad) in enumerate(zip(extents, self.padding, strict=True), 1):
            inner = inner.narrow(dim, pad, extent)
        inner.copy_(x.movedim(1, -1))
        strides = last.stride()
        moved, looked = self._steps(strides[1:-1])
        view = last.as_strided((items, *positions, *self.kernel, channels), (strides[0], *moved, *looked, 1))
        return view.reshape(items, 1, prod(positions), prod(self.kernel) * channels)

    def _steps(self, strides: Sequence[int]) -> tuple[list[int], list[int]]:
        """How far in memory the next position is, and the next entry of the kernel."""
        moved = [step * stride for step, stride in zip(strides, self.stride, strict=True)]
        return moved, [step * dilation for step, dilation in zip(strides, self.dilation, strict=True)]


class Convolved(PerExample):
    """Per-example gradients of a convolution's weight from x [size, items, C, ...] and g [size, items, O, ...].

    Both are held as the model computed them. Gradients that are all of their parameter's are formed in that precision,
    where a processor is faster in it (`rules/halves.py`), and kept; all else sees float32 or better.
    """

    def __init__(self, x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> None:
        self.held_x, self.held_g, self.shape, self.geometry = x, g, shape, geometry
        self.rounded = False
        self.size, self.items = x.shape[:2]
        self.formed: Formed | None = None
        groups, self.positions = geometry.groups, self.items * prod(g.shape[3:])
        self.depthwise = shape[1] == 1 and shape[0] == groups
        self.way = choose_way(self.size * groups, self.positions, shape.numel() // shape[0], shape[0] // groups)
        if self.depthwise:  # a convolution of maps by maps is cheaper than any patches
            self.way = Way.FORM if 4 * self.size * shape.numel() <= FORM_BYTES else Way.PASS
        # Formed gradients that are kept lie as the weight does: turning them costs what longer runs save.
        self.channels_last = groups == 1 and self.way is not Way.FORM and x.shape[2] > g.shape[-1]

    @property
    def x(self) -> Tensor:
        """The input."""
        return precise(self.held_x)

    @property
    def g(self) -> Tensor:
        """The output gradient."""
        return precise(self.held_g)

    def stand_alone(self) -> None:
        if self.depthwise or not are_halves(self.held_x, self.held_g):
            return
        if self.side_by_side and torch.get_num_threads() > 1:
            return  # a single record is then added up in another order than one among others, and rounded otherwise
        self.rounded = self.way is Way.FORM

    def pick(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Input and output gradient of some examples, as they are multiplied."""
        x, g = self.held_x[start:stop], self.held_g[start:stop]
        return (x, g) if self.rounded else (precise(x), precise(g))

    def factors(self, start: int, stop: int, as_weight: bool = False) -> tuple[Tensor, Tensor]:
        """[b, groups, L, C/groups*K] patches and [b, groups, O/groups, L] gradients, L all positions of an example.

        Patches lie as the weight does, or with channels innermost where that is cheaper and the order does not matter.
        """
        x, g = self.pick(start, stop)
        size, positions = len(x), g.shape[3:]
        gradients = g.reshape(size * self.items, self.geometry.groups, -1, prod(positions))
        if self.items > 1:
            gradients = join_items(gradients, size)
        if self.channels_last and not as_weight:
            rows = self.geometry.rows(x.flatten(0, 1), positions)
            return rows.reshape(size, 1, self.positions, -1), gradients
        patches = self.geometry.patches(x.flatten(0, 1), positions)
        return (patches if self.items == 1 else join_items(patches, size)).mT, gradients

    @property
    def manner(self) -> str:
        return f"patches: {self.way.value}"

    def squared_norms(self) -> Tensor:
        if self.way is Way.GRAM:
            return torch.cat([self.gram(start, stop) for start, stop in self.ranges()])
        if self.way is Way.PASS:
            formed = torch.cat([self.measure(*some) for some in self.ranges()])
            return round_up(formed, self.mass())
        self.formed = Formed(self.form_all())
        del self.held_x, self.held_g
        return self.formed.squared_norms()

    def mass(self) -> Tensor:
        """An entry of the input is seen from at most as many positions as the kernel has entries."""
        if self.formed is not None:
            return self.formed.mass()
        seen = prod(self.geometry.kernel) * squares(self.x.flatten(1))
        return (seen * squares(self.g.flatten(1))).sqrt()

    def form_all(self) -> Tensor:
        """All gradients at once, or some after the other where patches are copied."""
        if self.depthwise or self.side_by_side:
            return self.form(0, self.size)
        formed = self.held_x.new_empty(self.size, *self.shape, dtype=precise(self.held_x[:0]).dtype)
        for start, stop in self.ranges():
            formed[start:stop] = self.form(start, stop)
        return formed

    @property
    def side_by_side(self) -> bool:
        """Whether one convolution of all examples beside each other is faster than copying patches.

        Measured: where there are many positions, but with many channels and strides its kernels are the slower ones.
        """
        channels, geometry = self.shape[1], self.geometry
        if self.items > 1 or (geometry.groups > 1 and channels < 8):
            return False
        if channels <= 32:
            return geometry.groups > 1 or self.positions >= 128
        plain = geometry.groups == 1 and set(geometry.stride) == {1} and prod(geometry.kernel) > 1
        return plain and self.positions >= 192

    def correlate(self, x: Tensor, g: Tensor) -> Tensor:
        """Depthwise: each channel of each example is convolved with its own output gradient, strides for dilations."""
        kernel, stride, padding, dilation = (
            list(each)
            for each in (self.geometry.kernel, self.geometry.stride, self.geometry.padding, self.geometry.dilation)
        )
        maps, seen = x.flatten(0, 2), g.flatten(0, 2).unsqueeze(1)
        found = torch.convolution(
            maps.unsqueeze(0), seen, None, dilation, padding, stride, False, [0] * len(kernel), len(maps)
        )
        for dim, extent in enumerate(kernel, 2):
            found = found.narrow(dim, 0, extent)  # what the strides never reached
        apart = found.reshape(len(x), self.items, *self.shape)
        return apart[:, 0] if self.items == 1 else apart.sum(1)

    def ranges(self) -> list[tuple[int, int]]:
        """Ranges of examples of `CACHED` patches."""
        entries = self.positions * self.held_x.shape[2] * prod(self.geometry.kernel)
        step = max(1, CACHED // max(1, entries))
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def gram(self, start: int, stop: int) -> Tensor:
        patches, g = self.factors(start, stop)
        with multiplying_halves(self.held_x, self.held_g):
            return gram_norms(patches, g.mT, lambda i, j: self.form(start + i, start + j))

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        if self.depthwise:
            return self.correlate(*self.pick(start, stop))
        if self.side_by_side:
            x, g = (each.flatten(0, 2).unsqueeze(0) for each in self.pick(start, stop))
            shape = torch.Size(((stop - start) * self.shape[0], *self.shape[1:]))
            together = replace(self.geometry, groups=(stop - start) * self.geometry.groups)
            return precise(weight_gradient(x, g, shape, together)).reshape(stop - start, *self.shape)
        patches, g = self.factors(start, stop, as_weight=True)
        return precise(multiply_groups(g, patches)).reshape(stop - start, *self.shape)

    def measure(self, start: int, stop: int) -> Tensor:
        """Squared norms of gradients that are formed and forgotten."""
        if self.depthwise or self.side_by_side:
            formed = self.form(start, stop)
        else:
            patches, g = self.factors(start, stop)
            formed = multiply_groups(g, patches)
        return squares(formed.flatten(1))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return self.formed.weighted_sum(weights)
        g = self.g
        scaled = g * weights.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1))
        return weight_gradient(self.x.flatten(0, 1), scaled.flatten(0, 1), self.shape, self.geometry)

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        return Convolved(zero_rows(self.held_x, bad), zero_rows(self.held_g, bad), self.shape, self.geometry)


def multiply_groups(g: Tensor, patches: Tensor) -> Tensor:
    """g @ patches for [b, groups, O, L] and [b, groups, L, K]."""
    if g.shape[1] > 1:
        return g @ patches
    return multiply_each(g.squeeze(1).mT, patches.squeeze(1)).unsqueeze(1)


def join_items(part: Tensor, size: int) -> Tensor:
    """[size * items, groups, features, L] as [size, groups, features, items * L]."""
    apart = part.reshape(size, -1, *part.shape[1:])
    return apart.permute(0, 2, 3, 1, 4).flatten(3)


def weight_gradient(x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The ordinary weight gradient, summed over the items."""
    weight = x.new_empty(shape)
    no_output_padding = [0] * len(geometry.kernel)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, no_output_padding,
        geometry.groups, [False, True, False],
    )[1]  # fmt: skip
    return gradient


def per_dimension(value: int | Sequence[int], space: int) -> tuple[int, ...]:
    """One entry for each spatial dimension."""
    return (value,) * space if isinstance(value, int) else tuple(value) if len(value) == space else tuple(value) * space


def conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """torch.conv1d, conv2d and conv3d on batched input."""
    call.only(weight, bias)
    space = weight.dim() - 2
    if input.dim() != weight.dim():
        raise NoRule("convolution: the input has no dimension for examples")
    dilated = per_dimension(dilation, space)
    kernel = tuple(weight.shape[2:])
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilated, kernel, strict=True)]
        odd = any(each % 2 for each in total)
        # An uneven 'same' padding has one more entry at the end; pad first, so that what is kept is what was seen.
        input = F.pad(input, [p for t in reversed(total) for p in (t // 2, t - t // 2)]) if odd else input
        padded = (0,) * space if odd else tuple(each // 2 for each in total)
    else:
        padded = per_dimension(padding, space)
    input = cast_as_multiplied(input)
    geometry = Geometry(kernel, per_dimension(stride, space), padded, dilated, groups)
    output = call.function(input, call.plain(weight), call.plain(bias), geometry.stride, padded, dilated, groups)
    shape = weight.shape

    def settle(g: Tensor, at: Examples) -> PerExample:
        return Convolved(at.items(input), at.items(g), shape, geometry)

    return call.keep(output, (input,), [ParameterShare(weight, settle), ParameterShare(bias, sum_channels())], 1)


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
    """torch.conv_transpose1d, 2d and 3d: adjoints of convolutions, so their weight gradients have G and X swapped."""
    call.only(weight, bias)
    space = weight.dim() - 2
    if input.dim() != weight.dim():
        raise NoRule("transposed convolution: the input has no dimension for examples")
    plain = (call.plain(weight), call.plain(bias))
    input = cast_as_multiplied(input)
    output = call.function(input, *plain, stride, padding, output_padding, groups, dilation)
    strides, paddings, dilations = (per_dimension(each, space) for each in (stride, padding, dilation))
    geometry = Geometry(tuple(weight.shape[2:]), strides, paddings, dilations, groups)

    def settle(g: Tensor, at: Examples) -> PerExample:
        return Convolved(at.items(g), at.items(input), weight.shape, geometry)

    return call.keep(output, (input,), [ParameterShare(weight, settle), ParameterShare(bias, sum_channels())], 1)


RULES: Rules = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d), conv),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), conv_transpose),
}
