"""Any operation without a rule of its own: differentiated once more, for what is proven of its output.

The gradient of example i is ``J_pᵀ (g ∘ [entries of example i])``: the operation's Jacobian, applied to the output
gradient without all that belongs to other examples. Where the examples are in the output is proven by gradients, so
this is right whatever the arguments hold (`Masked`). It looks at the whole batch for every example; where the operation
provably treats each example alone, that example's rows of the arguments are enough (`Replayed`).

Lengths do not tell which arguments have rows that belong to examples: a constant, or a feature, may happen to be as
long as the batch. Only what came from data is ever cut, and only if `treats_alone` has shown for every example
that the operation, at other values of the parameter and of the data, gives the same with the rest of the batch away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.gradients.rules.base import (
    BLOCK_BYTES,
    Call,
    Examples,
    Kind,
    NoRule,
    ParameterShare,
    PerExample,
    Settle,
    Unproven,
    is_in_place,
    name_of,
    precise,
    zero_rows,
)
from sordino.noise import WITHOUT_DOUBLES

STIR = 1e-2
"""How far, relative to their size, values are moved to see whether an operation treats examples alone."""

BY_SHAPES = frozenset(
    {
        *(torch.einsum, F.bilinear, torch.matmul, torch.bmm, torch.baddbmm, torch.tensordot),
        *(torch.cdist, F.pairwise_distance),
    }
)
"""Products and distances: whether they treat examples alone does not depend on the values."""

KNOWN: dict[tuple[object, tuple[int, ...]], bool] = {}
"""Whether such operations on such shapes treat examples alone."""


@dataclass(frozen=True)
class Operation:
    """A function and its arguments, flattened, and the dtype that autocast had for it.

    `positions` are those of one parameter, `data` those that came with the batch.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    positions: list[int]
    data: list[int]
    autocast: torch.dtype | None

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def parameter(self) -> Tensor:
        parameter: Tensor = self.leaves[self.positions[0]]
        return parameter

    def run(self, parameter: Tensor, places: list[int] | None = None, *values: Tensor) -> Tensor:
        """The output with another parameter, and other values at `places` of the arguments."""
        leaves = list(self.leaves)
        for i in self.positions:
            leaves[i] = parameter
        for i, value in zip(places or (), values, strict=True):
            leaves[i] = value
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.autocast(parameter.device.type, self.autocast, self.autocast is not None, cache_enabled=False):
            result: Tensor = self.function(*args, **kwargs)
        return result

    def shapes(self) -> object:
        """Everything about the operation except the values of its tensors; None if some of those count or choose."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if not all(leaf.is_floating_point() for leaf in tensors):
            return None
        given = (tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf) for leaf in self.leaves)
        return self.function, str(self.spec), tuple(self.positions), tuple(given)

    def long(self, size: int) -> list[int]:
        """Data with one row for each of `size` examples, perhaps."""
        return [i for i in self.data if self.leaves[i].dim() > 0 and len(self.leaves[i]) == size]


class FormedInBlocks(PerExample):
    """Gradients that are formed a block of examples at a time, for norms and again for the sum."""

    def squared_norms(self) -> Tensor:
        return self.measure_formed()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.sum_formed(weights)


class Masked(FormedInBlocks):
    """gradient_i by one vector-Jacobian product of the whole operation; `owner` says whose every entry of g is.

    The operation runs once: norms and sum are of the same Jacobian, also if it draws random numbers.
    """

    def __init__(self, operation: Operation, output: Tensor, g: Tensor, owner: Tensor, size: int) -> None:
        try:
            again, self.pull = torch.func.vjp(operation.run, operation.parameter)[:2]
        except (RuntimeError, NotImplementedError) as error:
            raise NoRule(f"{operation.name}: has no rule and cannot be differentiated once more") from error
        if again.shape != output.shape or not torch.allclose(again, output, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise NoRule(f"{operation.name}: has no rule and gives another result each time")
        self.name = operation.name
        self.g, self.owner, self.size, self.shape = g.to(output.dtype), owner, size, operation.parameter.shape
        self.loop = True
        alone = self.form(0, min(2, size))
        self.loop = False
        try:  # torch's own rule for several backward passes of cdist at once gives other numbers
            self.loop = not torch.allclose(self.form(0, len(alone)), alone, rtol=1e-3, atol=1e-6)
        except RuntimeError:
            self.loop = True

    @property
    def manner(self) -> str:
        return "differentiated in a loop" if self.loop else "differentiated by vmap"

    def form(self, start: int, stop: int) -> Tensor:
        def one(example: Tensor) -> Tensor:
            gradient: Tensor = self.pull(self.g.where(self.owner == example, 0))[0]
            return gradient

        examples = torch.arange(start, stop, device=self.g.device)
        formed = torch.stack([one(each) for each in examples]) if self.loop else torch.func.vmap(one)(examples)
        if not bool(torch.isfinite(formed).all()):  # a bad example's infinity, times zero, is in all the others
            raise Unproven(f"{self.name}: something that is not finite reaches every example")
        return precise(formed)

    def blocks(self) -> list[tuple[int, int]]:
        """As many as fit in memory: a masked output gradient for each example, and what the operation makes of it."""
        step = max(1, BLOCK_BYTES // max(1, 8 * max(self.shape.numel(), 4 * self.g.numel())))
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def without(self, bad: Tensor) -> Masked:
        other = copy.copy(self)
        other.g = self.g.masked_fill(bad.to(self.owner.device)[self.owner], 0)
        return other


class Replayed(FormedInBlocks):
    """gradient_i by a vector-Jacobian product of the operation on example i alone, for many i at once by vmap.

    `batched` are the arguments that carry examples, [size, rows, ...] each; `run` maps (parameter, one example's rows)
    to the operation's output for them.
    """

    manner = "replayed by vmap"

    def __init__(self, run: Callable[..., Tensor], parameter: Tensor, batched: list[Tensor], g: Tensor) -> None:
        self.run, self.parameter, self.batched, self.g = run, parameter, batched, g
        self.size, self.shape = len(g), parameter.shape

    def form(self, start: int, stop: int) -> Tensor:
        def one(g: Tensor, *slices: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda parameter: self.run(parameter, *slices), self.parameter)[1]
            gradient: Tensor = pull(g)[0]
            return gradient

        slices = [tensor[start:stop] for tensor in self.batched]
        formed: Tensor = torch.func.vmap(one)(self.g[start:stop], *slices)
        return precise(formed)

    def without(self, bad: Tensor) -> Replayed:
        batched = [zero_rows(tensor, bad) for tensor in self.batched]
        return Replayed(self.run, self.parameter, batched, zero_rows(self.g, bad))


def replay(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Run the operation and keep its arguments; refuse what cannot be differentiated once more."""
    name = name_of(call.function)
    if is_in_place(name) or kwargs.get("inplace"):
        raise NoRule(f"{name}: has no rule and works in place")
    leaves, spec = tree_flatten((args, kwargs))
    plain = [call.plain(leaf) for leaf in leaves]
    run_args, run_kwargs = tree_unflatten(plain, spec)
    output = call.function(*run_args, **run_kwargs)
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() == 0:
        raise NoRule(f"{name}: has no rule and its result is not one tensor with a dimension of examples")
    if any(output is leaf for leaf in plain):
        raise NoRule(f"{name}: has no rule and works in place")
    if output._is_view():
        output = output.clone()  # a view of the parameter would count as the parameter changed in place
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in plain]
    settle_for = make_settle(call, call.function, kept, leaves, spec, output)
    shares = [ParameterShare(parameter, settle_for(parameter)) for parameter in call.tracked()]
    return call.keep(output, [leaf for leaf in plain if isinstance(leaf, Tensor)], shares, output.dim())


def make_settle(
    call: Call, function: Callable[..., Any], kept: list[Any], leaves: list[Any], spec: TreeSpec, output: Tensor
) -> Callable[[Tensor], Settle]:
    """From a parameter among the `leaves` to how its gradients are found by running the function again."""
    data = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not call.is_shared(leaf)]
    device = output.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def settle_for(parameter: Tensor) -> Settle:
        positions = [i for i, leaf in enumerate(leaves) if leaf is parameter]
        operation = Operation(function, kept, spec, positions, data, autocast)
        return lambda g, at: settle_replayed(operation, output.detach(), g, at)

    return settle_for


def settle_again(
    call: Call, function: Callable[..., Tensor], kept: list[Tensor], given: list[Tensor], output: Tensor
) -> Callable[[Tensor], Settle]:
    """The same for a function of tensors alone, as a rule may fall back to it."""
    leaves, spec = tree_flatten((tuple(given), {}))
    return make_settle(call, function, kept, leaves, spec, output)


def settle_replayed(operation: Operation, output: Tensor, g: Tensor, at: Examples) -> PerExample:
    """Each example's rows alone where the operation provably treats rows so; otherwise the whole batch for each."""
    first = at.layout.kind in (Kind.DIMENSION, Kind.MAJOR) and at.layout.dim == 0
    places = operation.long(len(g)) if first else []
    if places and treats_alone(operation, places, output):

        def run(parameter: Tensor, *rows: Tensor) -> Tensor:
            return operation.run(parameter, places, *rows)

        kept = Replayed(run, operation.parameter, [at.items(operation.leaves[i]) for i in places], at.items(g))
        try:
            kept.form(0, 1)
        except RuntimeError:
            pass  # an operation that vmap cannot run
        else:
            return kept
    return Masked(operation, output, g, at.owners(g), at.size)


def one_alone(operation: Operation, places: list[int]) -> Callable[..., Tensor]:
    """The operation on one example, whose rows are given for the arguments at `places`."""

    def run(parameter: Tensor, *rows: Tensor) -> Tensor:
        return operation.run(parameter, places, *[row.unsqueeze(0) for row in rows]).squeeze(0)

    return run


def treats_alone(operation: Operation, places: list[int], output: Tensor) -> bool:
    """Whether the rows at `places` of an example are all of the data that its row of the output depends on.

    Parameter and data are moved a little, in double precision, to a point in general position. An operation is
    (piecewise) analytic: if at such a point its output for each example is the same with the example alone, it is so
    around that point, and so are the derivatives. At the values themselves nothing would be shown: where a parameter is
    zero, what it is multiplied by is not seen in the output, but it is in the gradient. Of products and distances the
    answer depends on shapes alone and is remembered.
    """
    key = operation.shapes() if operation.function in BY_SHAPES else None
    if key is not None and (key, tuple(places)) in KNOWN:
        return KNOWN[key, tuple(places)]
    leaves = [stir(leaf, i) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(operation.leaves)]
    answer = alone_equals_together(replace(operation, leaves=leaves), places, output)
    if key is not None:
        if len(KNOWN) > 1000:
            KNOWN.clear()
        KNOWN[key, tuple(places)] = answer
    return answer


def alone_equals_together(moved: Operation, places: list[int], output: Tensor) -> bool:
    """Run the operation on all examples, and on each of them alone, and compare."""
    try:
        together = moved.run(moved.parameter)
        rows = [moved.leaves[i] for i in places]
        alone = torch.func.vmap(one_alone(moved, places), (None, *[0] * len(rows)))(moved.parameter, *rows)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return False
    if together.dtype != torch.float64 or alone.shape != together.shape:
        return False
    finite = torch.isfinite(together)
    if bool((torch.isfinite(output).to(finite.device) & ~finite).any()):
        return False  # the move left the operation's domain, where nothing can be seen
    largest = float(together[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.allclose(alone, together, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)


def stir(tensor: Tensor, place: int) -> Tensor:
    """In double precision, with every entry moved at random; numbers that count or choose stay as they are."""
    if tensor.device.type in WITHOUT_DOUBLES:
        tensor = tensor.cpu()
    if not tensor.is_floating_point():
        return tensor
    chance = torch.Generator().manual_seed(place)  # the host's, so that every device sees the same moves
    moves = torch.rand(tensor.shape, generator=chance).double().sub_(0.5).to(tensor.device)
    values = tensor.double()
    size = float(values.abs().nan_to_num(0, 0).mean()) if values.numel() else 0.0
    return moves.mul_(STIR * (size or 1.0)).add_(values)
