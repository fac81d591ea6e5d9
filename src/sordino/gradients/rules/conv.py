"""Convolutions: gradient_i = sum over positions of G_i[position] ⊗ patch_i[position], an outer product per position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import Call, Formed, NoRule, PerExample, Share, precise, squares, zeroed
from sordino.gradients.rules.ways import Way, bounded, cheapest, gram_norms


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
        steps = strides[2:]
        view = x.as_strided(
            (items, channels, *self.kernel, *positions),
            (
                *strides[:2],
                *(step * dilation for step, dilation in zip(steps, self.dilation, strict=True)),
                *(step * stride for step, stride in zip(steps, self.stride, strict=True)),
            ),
        )
        return view.reshape(items, self.groups, channels // self.groups * prod(self.kernel), prod(positions))


class Convolved(PerExample):
    """Per-example gradients of a convolution's weight from x [size, items, C, ...] and g [size, items, O, ...]."""

    def __init__(self, x: Tensor, g: Tensor, shape: torch.Size, geometry: Geometry) -> None:
        self.x, self.g, self.shape, self.geometry = x, g, shape, geometry
        self.size, self.items = x.shape[:2]
        self.formed: Formed | None = None
        groups, self.positions = geometry.groups, self.items * prod(g.shape[3:])
        self.way = cheapest(self.size * groups, self.positions, shape.numel() // shape[0], shape[0] // groups)

    def factors(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """[b, groups, C/groups*K, L] patches and [b, groups, O/groups, L] gradients, L all positions of an example."""
        x, g = self.x[start:stop], self.g[start:stop]
        size, positions = len(x), g.shape[3:]
        patches = self.geometry.patches(x.flatten(0, 1), positions)
        gradients = g.reshape(len(patches), self.geometry.groups, -1, prod(positions))
        if self.items == 1:
            return patches, gradients
        return joined(patches, size), joined(gradients, size)

    @property
    def manner(self) -> str:
        return f"patches: {self.way.value}"

    def squared_norms(self) -> Tensor:
        if self.way is Way.GRAM:
            return torch.cat([self.gram(start, stop) for start, stop in self.ranges()])
        if self.way is Way.PASS:
            formed = torch.cat([self.form(*some).flatten(1).square().sum(1) for some in self.ranges()])
            return bounded(formed, self.mass())
        self.formed = Formed(self.form_all())
        del self.x, self.g
        return self.formed.squared_norms()

    def mass(self) -> Tensor:
        """An entry of the input is seen from at most as many positions as the kernel has entries."""
        if self.formed is not None:
            return self.formed.mass()
        seen = prod(self.geometry.kernel) * squares(self.x.flatten(1))
        return (seen * squares(self.g.flatten(1))).sqrt()

    def form_all(self) -> Tensor:
        """All gradients at once: by one grouped convolution for few channels on large maps, otherwise by patches."""
        channels, groups = self.x.shape[2], self.geometry.groups
        if self.items == 1 and groups == 1 and channels <= 32 and self.positions >= 128:
            x, g = self.x.flatten(0, 2).unsqueeze(0), self.g.flatten(0, 2).unsqueeze(0)
            shape = torch.Size((self.size * self.shape[0], *self.shape[1:]))
            apart = weight_gradient(x, g, shape, replace(self.geometry, groups=self.size))
            return apart.reshape(self.size, *self.shape)
        formed = self.x.new_empty(self.size, *self.shape)
        for start, stop in self.ranges():
            formed[start:stop] = self.form(start, stop)
        return formed

    def ranges(self) -> list[tuple[int, int]]:
        """Ranges of examples whose patches fit in a cache of about 1 MB."""
        entries = self.positions * self.x.shape[2] * prod(self.geometry.kernel)
        step = max(1, 2**18 // max(1, entries))
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def gram(self, start: int, stop: int) -> Tensor:
        patches, g = self.factors(start, stop)
        return gram_norms(patches.mT, g.mT, lambda i, j: self.form(start + i, start + j))

    def form(self, start: int, stop: int) -> Tensor:
        if self.formed is not None:
            return self.formed.form(start, stop)
        patches, g = self.factors(start, stop)
        return (g @ patches.mT).reshape(stop - start, *self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return self.formed.weighted_sum(weights)
        scaled = self.g * weights.to(self.g.dtype).reshape(-1, *[1] * (self.g.dim() - 1))
        return weight_gradient(self.x.flatten(0, 1), scaled.flatten(0, 1), self.shape, self.geometry)

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        return Convolved(zeroed(self.x, bad), zeroed(self.g, bad), self.shape, self.geometry)


def joined(part: Tensor, size: int) -> Tensor:
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
    geometry = Geometry(kernel, per_dimension(stride, space), padded, dilated, groups)
    output = call.function(input, call.plain(weight), call.plain(bias), geometry.stride, padded, dilated, groups)
    shape = weight.shape

    def settle(g: Tensor, at: Examples) -> PerExample:
        return Convolved(precise(at.items(input)), precise(at.items(g)), shape, geometry)

    return call.keep(output, (input,), [Share(weight, settle), Share(bias, channel_sum)], 1)


def channel_sum(g: Tensor, at: Examples) -> PerExample:
    """The share of a bias per channel: the sum of G over items and positions."""
    items = at.items(precise(g))
    return Formed(items.sum([1, *range(3, items.dim())]))


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d), conv),
}
