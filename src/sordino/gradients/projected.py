"""Per-example gradient norms estimated by random projections: any architecture, in the memory of ordinary training.

With v_1 … v_r standard normal, M_i = sqrt(mean_j <∇L_i, v_j>²) is distributed as ‖∇L_i‖·sqrt(χ²_r / r) (DP-SGD-JL,
Prop. 2.1). All B products with one v_j are one Jacobian-vector product of the vector of losses, in forward mode; where
an operator has no forward-mode rule they are the derivative by α of <αᵀ∇L, v_j>, the double-vjp trick (Sec. 2.1). The
weighted sum is one ordinary backward pass of the reweighted loss.

The norms are estimates, so clipping by them costs more: see `sordino.accounting.jl_gaussian`. What the price assumes:
- the v_j are fresh for every draw, independent of the data, and the same for all of its microbatches: otherwise one
  record more would move others to other projections (`renew`);
- norm and sum are of the same gradient: dropout repeats its masks in every pass, and every sum is compared with the
  first projection (`Estimated.agrees`). Forward mode goes through ``torch.no_grad()`` and past backward hooks, and a
  model may draw random numbers that are not torch's: then a record would count more than its norm says. Terms of one
  record that cancel may also swallow the others in rounding. A record that does not agree by itself counts as zero;
  to refuse the draw would tell that it held this record. A model is refused if most records of a draw do not agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from randomgen import AESCounter
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sordino.errors import InvalidInput, UnsupportedModel, locate_error
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.engine import HALVES, Batch, Groups, Objective, accumulation_dtype, total_dtype
from sordino.gradients.looped import fill_unused, find_gradients
from sordino.gradients.rules.base import name_of
from sordino.gradients.vmapped import MEMORY_TARGET, keep_tensors
from sordino.noise import Source

_log = logging.getLogger("sordino")

MICROBATCH = 256
TOLERANCE = 1e-4
"""How far the projection of a sum may be from the sum of the projections, as a share of all lengths: only rounding."""


class Directions:
    """The projections of one draw: `count` standard normal vectors over all parameters, remade from a 128-bit key.

    They are kept only where they are small, so that many projections of a large model need no memory. Of all records of
    the draw that were summed so far, `odd` had norms that are not those of their gradients.
    """

    def __init__(self, key: int, count: int) -> None:
        self._key = key
        self._count = count
        self._kept: list[list[Tensor]] | None = None
        self.summed = self.odd = 0

    def note_odd(self) -> None:
        """One more of them; a single record never ends a run."""
        self.odd += 1
        if self.odd > max(1, self.summed // 2):
            raise UnsupportedModel(
                "estimated norms are not those of the summed gradients: torch.no_grad, backward hooks or random "
                "numbers of its own in the model or its loss, or TF32; take them out, or use exact norms (not jl)"
            )

    def over(self, parameters: list[nn.Parameter]) -> Iterable[list[Tensor]]:
        """One list of tensors, shaped like the parameters, per projection; the same ones at every call."""
        if self._kept is not None:
            return self._kept
        made = self._make(parameters)
        if 4 * self._count * sum(p.numel() for p in parameters) > MEMORY_TARGET:
            return made
        self._kept = list(made)
        return self._kept

    def _make(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        generator = np.random.Generator(AESCounter(key=self._key))
        for _ in range(self._count):
            yield [
                torch.from_numpy(generator.standard_normal(p.numel(), dtype=np.float32)).view(p.shape).to(p)
                for p in parameters
            ]


class Coins:
    """Torch's random state as it was, so that several passes over a batch drop the same units."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def rewind(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._own is not None:
            torch.get_device_module(self._device).set_rng_state(self._own, self._device)


@dataclass(frozen=True)
class _Pass:
    """A batch for several passes, each with the same random numbers."""

    objective: Objective
    parameters: list[nn.Parameter]
    batch: Batch
    coins: Coins


def by_jvp(task: _Pass, directions: Iterable[list[Tensor]]) -> Iterator[Tensor]:
    """<∇L_i, v_j> for all i, one v_j after the other, each by one forward pass in forward mode."""
    names = {id(p): name for name, p in task.objective.named_parameters()}
    values = {names[id(p)]: p.detach() for p in task.parameters}

    def losses_at(values: dict[str, Tensor]) -> Tensor:
        losses: Tensor = functional_call(task.objective, values, (task.batch.data,))
        return losses

    for direction in directions:
        task.coins.rewind()
        with torch.no_grad(), keep_tensors(task.objective):
            products = jvp(losses_at, (values,), (dict(zip(values, direction, strict=True)),))[1]
        if products.shape != (task.batch.size,):
            task.objective.losses(task.batch.data, task.batch.size)  # says what is wrong with the loss
        yield products


def by_double_vjp(task: _Pass, directions: Iterable[list[Tensor]]) -> Iterator[Tensor]:
    """<∇L_i, v_j> = ∂/∂α_i <αᵀ∇L, v_j>: one backward pass with a graph of its own, then one more per projection."""
    task.coins.rewind()
    with torch.enable_grad():
        losses = task.objective.losses(task.batch.data, task.batch.size)
        if not losses.requires_grad:
            yield from (torch.zeros_like(losses) for _ in directions)
            return
        alpha = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(losses, task.parameters, alpha, create_graph=True, allow_unused=True)
        for direction in directions:
            pairs = zip(gradients, direction, strict=True)
            along = torch.stack([(g * v).sum() for g, v in pairs if g is not None]).sum()
            yield torch.autograd.grad(along, alpha, retain_graph=True)[0]


Way = Callable[[_Pass, Iterable[list[Tensor]]], Iterator[Tensor]]
WAYS: dict[str, Way] = {"jvp": by_jvp, "double_vjp": by_double_vjp}


@dataclass(frozen=True)
class Estimated:
    """Estimated norms, and whatever is needed to run the same batch backwards once more."""

    task: _Pass
    norms: Tensor
    along: Tensor  # <∇L_i, v_1>
    directions: Directions

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        rows = weights.nonzero().flatten()
        self.directions.summed += len(rows)
        return self._sum(weights, rows)

    def _sum(self, weights: Tensor, rows: Tensor) -> list[Tensor]:
        """The sum over `rows`; one whose gradient is not finite, or not the one that was projected, is zero (law 6)."""
        if not len(rows):
            return [torch.zeros_like(p, dtype=accumulation_dtype(p)) for p in self.task.parameters]
        total = self._backward(weights, rows)
        finite = all(bool(torch.isfinite(g).all()) for g in total)
        if finite and self.agrees(total, weights, rows):
            return total
        if len(rows) == 1:
            if finite:
                self.directions.note_odd()
            return self._sum(weights, rows[:0])
        halves = (self._sum(weights, half) for half in rows.tensor_split(2))
        return [one + other for one, other in zip(*halves, strict=True)]

    def agrees(self, total: list[Tensor], weights: Tensor, rows: Tensor) -> bool:
        """<sum_i w_i ∇L_i, v_1> = sum_i w_i <∇L_i, v_1>: v_1 is a fresh normal, so that another gradient would show."""
        first = next(iter(self.directions.over(self.task.parameters)))
        found = sum(float((g.to(total_dtype(g)) * v).sum()) for g, v in zip(total, first, strict=True))
        shares = weights[rows].to(total_dtype(weights))
        wanted = float((shares * self.along[rows]).sum())
        lengths = float((shares * self.norms[rows].to(shares.dtype)).sum())
        return abs(found - wanted) <= TOLERANCE * lengths

    def _backward(self, weights: Tensor, rows: Tensor) -> list[Tensor]:
        """One backward pass. Rows that are left out are replaced by one that is kept, so that all shapes, and with them
        the masks of dropout, stay as they were, and no NaN meets a zero weight.
        """
        task, size = self.task, self.task.batch.size
        if (groups := task.batch.groups) is not None:  # each unit's examples in its place
            weights, rows = groups.spread(weights), torch.isin(groups.owners, rows).nonzero().flatten()
        places = rows[:1].repeat(size).index_copy(0, rows, rows)
        kept = torch.zeros_like(weights).index_copy(0, rows, weights[rows])
        data = task.batch.data if len(rows) == size else tree_map(lambda x: x[places.to(x.device)], task.batch.data)
        task.coins.rewind()
        with torch.enable_grad(), use_plain_attention(), _NoHalves():
            losses = task.objective.losses(data, size)
            gradients = find_gradients(losses, task.parameters, kept.to(losses))
        return [g.to_dense().to(accumulation_dtype(g)) for g in fill_unused(gradients, task.parameters)]


@dataclass(frozen=True)
class Joined:
    """Several batches as one."""

    parts: list[Estimated]

    @property
    def norms(self) -> Tensor:
        return torch.cat([part.norms for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        shares = weights.split([len(part.norms) for part in self.parts])
        sums = (part.weighted_sum(share) for part, share in zip(self.parts, shares, strict=True))
        return [torch.stack(column).sum(0) for column in zip(*sums, strict=True)]


class ProjectedEngine:
    """Norms by `projections` random projections drawn from `source`, afresh at every `renew`.

    `way` is "jvp", "double_vjp", or "auto" for the first of them that can differentiate the model.
    """

    name = "jl"

    def __init__(self, projections: int, source: Source, way: str = "auto") -> None:
        if way != "auto" and way not in WAYS:
            raise InvalidInput(f"engine={way!r} must be one of auto, {', '.join(WAYS)}: others know exact norms only")
        self._projections = projections
        self._source = source
        self._ways = list(WAYS) if way == "auto" else [way]
        self._worked = False
        self._directions: Directions | None = None

    def renew(self) -> None:
        """Draw new projections: once before every draw of records, never within one."""
        key = (self._source.uniform(16) * 256).astype(np.uint8)
        self._directions = Directions(int.from_bytes(key.tobytes(), "big"), self._projections)

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Estimated | Joined:
        if self._directions is None:
            raise InvalidInput("no projections were drawn: call renew() once before every draw")
        _require_precision(parameters)
        if batch.sliceable:
            return self._estimate(objective, parameters, batch, self._directions)
        parts = [self._estimate(objective, parameters, alone, self._directions) for alone in take_apart(batch)]
        return Joined(parts)

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        return MICROBATCH

    def _estimate(
        self, objective: Objective, parameters: list[nn.Parameter], batch: Batch, directions: Directions
    ) -> Estimated:
        task = _Pass(objective, parameters, batch, Coins(parameters[0].device))
        while True:
            try:
                found = Estimated(task, *self._norms(task, directions), directions)
                self._worked = True
                return found
            except (RuntimeError, NotImplementedError, TypeError) as error:
                self._give_up_on(
                    self._ways[0], locate_error(error), error
                )  # torch's message may reveal the size of the batch

    def _norms(self, task: _Pass, directions: Directions) -> tuple[Tensor, Tensor]:
        """Estimated norms, and the products with the first projection."""
        way, along = WAYS[self._ways[0]], None
        device, dtype, groups = task.parameters[0].device, total_dtype(task.parameters[0]), task.batch.groups
        squares = torch.zeros((), dtype=dtype, device=device)
        with use_plain_attention():
            for products in way(task, directions.over(task.parameters)):
                each = products.detach().to(dtype) if groups is None else groups.mean(products.detach().to(dtype))
                along = each if along is None else along
                squares = squares + each.square()
        assert along is not None
        return (squares / self._projections).sqrt().to(accumulation_dtype(task.parameters[0])), along

    def _give_up_on(self, way: str, reason: str, error: Exception) -> None:
        if len(self._ways) == 1:
            raise UnsupportedModel(
                f"{way} cannot project this model ({reason}): leave engine at 'auto', or use exact norms"
            ) from error
        self._ways.remove(way)
        if not self._worked:  # later it is because of a record, and the line's place in the log would tell of it
            _log.info("%s cannot project this model (%s): using %s", way, reason, self._ways[0])


def use_plain_attention() -> AbstractContextManager[None]:
    """Fused attention has neither a forward-mode rule nor a double backward on the CPU; the plain kernel has both."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


class _NoHalves(TorchFunctionMode):
    """Refuses half precision between the parameters and the loss, as under autocast.

    There the one backward pass adds up the gradients of all examples in half precision, where one more record can move
    the sum by far more than its own gradient.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(tensor.requires_grad and tensor.dtype in HALVES for tensor in find_tensors((result,), {})):
            raise UnsupportedModel(
                f"{name_of(func)} computes in half precision, which rounds sums of gradients before the noise: "
                "take autocast and casts out of the loss, or use exact norms (not jl)"
            )
        return result


def take_apart(batch: Batch) -> Iterator[Batch]:
    """Each example, or each unit with its examples, as a batch of its own."""
    if batch.groups is None:
        yield from (Batch(single, 1, _only(single)) for single in batch.singles())
        return
    if batch.regroup is None:
        raise UnsupportedModel(
            "estimated norms of units need batches of tensors whose first dimension counts the examples: "
            "leave other values out of the records, or use exact norms (not jl)"
        )
    for unit in range(batch.groups.size):
        places = (batch.groups.owners == unit).nonzero().flatten().tolist()
        data, alone = batch.regroup(places), Groups(batch.groups.owners.new_zeros(len(places)), 1)
        yield Batch(data, len(places), _only(data), False, groups=alone)


def _only(single: Any) -> Callable[[int], Any]:
    return lambda _: single


def _require_precision(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UnsupportedModel(
                f"a parameter is {parameter.dtype}: projections in half precision do not estimate the norm that the "
                "backward pass has; train in float32, or use exact norms"
            )
