"""Any operation without a rule of its own, isolated: replayed for one example at a time from what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.gradients.bookkeeping_layout import Examples, Kind
from sordino.gradients.rules.base import Call, NoRule, PerExample, Share, name_of, precise, zeroed


class Replayed(PerExample):
    """gradient_i by a vector-Jacobian product of the operation on example i alone, for many i at once by vmap.

    `batched` are the arguments that carry examples, [size, ...] each; `run` maps (parameter, one example's slices) to
    the operation's output for that example.
    """

    def __init__(
        self, run: Callable[..., Tensor], parameter: Tensor, batched: list[Tensor], g: Tensor, loop: bool = False
    ) -> None:
        self.run, self.parameter, self.batched, self.g, self.loop = run, parameter, batched, g, loop
        self.size, self.shape = len(g), parameter.shape

    @property
    def manner(self) -> str:
        return "replayed in a loop" if self.loop else "replayed by vmap"

    def form(self, start: int, stop: int) -> Tensor:
        slices = [tensor[start:stop] for tensor in self.batched]
        g = self.g[start:stop]

        def one(g: Tensor, *slices: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda parameter: self.run(parameter, *slices), self.parameter)[1]
            gradient: Tensor = pull(g)[0]
            return gradient

        if self.loop:
            return precise(torch.stack([one(*each) for each in zip(g, *slices, strict=True)]))
        formed: Tensor = torch.func.vmap(one)(g, *slices)
        return precise(formed)

    def squared_norms(self) -> Tensor:
        return torch.cat([self.form(*block).flatten(1).square().sum(1) for block in self.blocks()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=precise(self.g[:0]).dtype, device=self.g.device)
        for start, stop in self.blocks():
            total += torch.tensordot(weights[start:stop].to(total.dtype), self.form(start, stop), 1)
        return total

    def without(self, bad: Tensor) -> Replayed:
        batched = [zeroed(tensor, bad) for tensor in self.batched]
        return Replayed(self.run, self.parameter, batched, zeroed(self.g, bad), self.loop)


def replay(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Run the operation and keep its arguments; refuse what cannot be replayed for one example alone."""
    name = name_of(call.function)
    leaves, spec = tree_flatten((args, kwargs))
    plain = [call.plain(leaf) for leaf in leaves]
    run_args, run_kwargs = tree_unflatten(plain, spec)
    output = call.function(*run_args, **run_kwargs)
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() == 0:
        raise NoRule(f"{name}: has no rule and its result is not one tensor with a dimension of examples")
    if any(output is leaf for leaf in plain):
        raise NoRule(f"{name}: has no rule and works in place")
    where = {id(t): [i for i, leaf in enumerate(leaves) if leaf is t] for t in call.tracked()}

    def settle_for(positions: list[int]) -> Callable[[Tensor, Examples], PerExample]:
        def settle(g: Tensor, at: Examples) -> PerExample:
            return settle_replayed(call.function, plain, spec, positions, output.detach(), g, at)

        return settle

    shares = [Share(t, settle_for(where[id(t)])) for t in call.tracked()]
    data = [leaf for leaf in plain if isinstance(leaf, Tensor)]
    return call.keep(output, data, shares, 1)


def settle_replayed(
    function: Callable[..., Any],
    plain: list[Any],
    spec: TreeSpec,
    positions: list[int],
    output: Tensor,
    g: Tensor,
    at: Examples,
) -> PerExample:
    """Find which arguments carry examples and prove it: replaying one example must give that example's output."""
    name, size = name_of(function), at.size
    if at.layout.kind is Kind.WHOLE:
        return replayed_whole(function, plain, spec, positions, output, at.first(g))
    if at.layout.kind is not Kind.DIMENSION:
        raise NoRule(f"{name}: has no rule and its first dimension is not the examples")
    carrying = [
        i
        for i, leaf in enumerate(plain)
        if isinstance(leaf, Tensor) and i not in positions and leaf.dim() > 0 and len(leaf) == size
    ]

    def run(parameter: Tensor, *slices: Tensor) -> Tensor:
        leaves = list(plain)
        for i in positions:
            leaves[i] = parameter
        for i, part in zip(carrying, slices, strict=True):
            leaves[i] = part.unsqueeze(0)
        args, kwargs = tree_unflatten(leaves, spec)
        result: Tensor = function(*args, **kwargs)
        return result.squeeze(0)

    parameter = plain[positions[0]]
    batched = [plain[i].detach() for i in carrying]
    try:
        again = run(parameter, *[tensor[-1] for tensor in batched])
    except (RuntimeError, ValueError, IndexError) as error:
        raise NoRule(f"{name}: has no rule and cannot be replayed for one example") from error
    if again.shape != output.shape[1:] or not torch.allclose(again, output[-1], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise NoRule(f"{name}: has no rule and gives another result for one example alone")
    kept = Replayed(run, parameter, batched, g)
    try:
        kept.form(0, min(1, size))
    except RuntimeError:
        kept.loop = True
    return kept


def replayed_whole(
    function: Callable[..., Any], plain: list[Any], spec: TreeSpec, positions: list[int], output: Tensor, g: Tensor
) -> PerExample:
    """All of the operation belongs to one example: replay it as it was."""

    def run(parameter: Tensor) -> Tensor:
        leaves = [parameter if i in positions else leaf for i, leaf in enumerate(plain)]
        args, kwargs = tree_unflatten(leaves, spec)
        result: Tensor = function(*args, **kwargs)
        return result

    if not torch.allclose(run(plain[positions[0]]), output, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise NoRule(f"{name_of(function)}: has no rule and gives another result each time")
    return Replayed(run, plain[positions[0]], [], g, loop=True)
