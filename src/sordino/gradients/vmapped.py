"""Per-example gradients by ``torch.func.vmap``: exact for almost every module, at B copies of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sordino.errors import UnsupportedModel
from sordino.gradients.engine import (
    Batch,
    FullPrecision,
    Groups,
    Objective,
    accumulation_dtype,
    add_widely,
    choose_weights,
)
from sordino.gradients.stretch import Stretches

MEMORY_TARGET = 256 * 2**20
"""Bytes that materialised per-example gradients may take by default."""


@dataclass(frozen=True)
class Materialised:
    """Per-example gradients held in memory, one tensor [size, *shape] per parameter."""

    gradients: list[Tensor]
    norms: Tensor
    squares: Tensor
    blocks: Sequence[int] | None = None

    @staticmethod
    def of(
        gradients: list[Tensor],
        groups: Groups | None = None,
        blocks: Sequence[int] | None = None,
        stretches: Stretches | None = None,
    ) -> Materialised:
        """Measure the gradients, or their means by unit, and blank those whose norm is not finite (law 6)."""
        gradients = [g.to(accumulation_dtype(g)) for g in gradients]
        if groups is not None:
            gradients = [groups.mean(g) for g in gradients]
        if stretches is not None:
            gradients = stretches.apply(gradients)
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients])
        norms = squares.sum(0).sqrt()
        bad = ~torch.isfinite(norms)
        if bad.any():
            gradients = [g.masked_fill(bad.view(-1, *[1] * (g.dim() - 1)), 0.0) for g in gradients]
        return Materialised(gradients, norms, squares, blocks)

    @property
    def block_norms(self) -> Tensor:
        assert self.blocks is not None
        places = torch.tensor(self.blocks, device=self.squares.device)
        return self.squares.new_zeros(max(self.blocks) + 1, len(self.norms)).index_add(0, places, self.squares).sqrt()

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        with FullPrecision(weights.device):
            return [
                torch.tensordot(choose_weights(weights, self.blocks, place).to(g.dtype), g, dims=1)
                for place, g in enumerate(self.gradients)
            ]


class InChunks:
    """Per-example gradients that `compute` makes for a range of examples, kept only if all of them are one chunk.

    Otherwise they are computed once more for the sum. A backward pass of the weighted losses would be cheaper, but it
    adds up in the precision of the model, and that one record moves by more than its clipped gradient. If the second
    time gives another gradient (a backward pass of the user's own may draw random numbers), it is made no longer than
    the one that was measured.
    """

    def __init__(self, size: int, chunk: int, compute: Callable[[range], list[Tensor]]) -> None:
        self._compute = compute
        self._chunks = [range(start, min(start + chunk, size)) for start in range(0, size, chunk)]
        self._kept = Materialised.of(compute(self._chunks[0])) if len(self._chunks) == 1 else None
        self.norms = torch.cat([self._measure(each).norms for each in self._chunks])

    def _measure(self, chunk: range) -> Materialised:
        return self._kept or Materialised.of(self._compute(chunk))

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        total: list[Tensor] = []
        for chunk in self._chunks:
            places, again = slice(chunk.start, chunk.stop), self._measure(chunk)
            shorter = (self.norms[places] / again.norms).clamp(max=1.0).nan_to_num(nan=0.0)
            sums = again.weighted_sum(weights[places] * shorter)
            total = [add_widely(*pair) for pair in zip(total, sums, strict=True)] if total else sums
        return total


def choose_microbatch(parameters: list[nn.Parameter]) -> int:
    """As many examples as fit the memory target with one float32 gradient each, at most 256."""
    per_example = 4 * max(1, sum(p.numel() for p in parameters))
    return int(min(256, max(1, MEMORY_TARGET // per_example)))


@contextmanager
def keep_tensors(module: nn.Module) -> Iterator[None]:
    """If calls with other tensors in place of the module's own are interrupted, put everything back.

    `functional_call` and the transforms do that themselves, unless Ctrl-C falls into the very lines that do it: then
    the model would hold others' tensors, and torch would think itself within a transform for ever.
    """
    depth = _functorch.get_dynamic_layer_stack_depth()
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables: list[dict[str, Any]] = [*(part._parameters for part in parts), *(part._buffers for part in parts)]
    held = [(table, dict(table)) for table in tables if table]
    try:
        yield
    except BaseException:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for table, tensors in held:
            table.update(tensors)
        raise


class Materialising(ABC):
    """An engine that forms every example's gradient: norms and sums, of all or of blocks, follow from them."""

    stretches: Stretches | None = None

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Materialised:
        return Materialised.of(self._compute(objective, parameters, batch), batch.groups, None, self.stretches)

    def differentiate_blocks(
        self, objective: Objective, parameters: list[nn.Parameter], batch: Batch, blocks: Sequence[int]
    ) -> Materialised:
        return Materialised.of(self._compute(objective, parameters, batch), batch.groups, blocks, self.stretches)

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        return choose_microbatch(parameters)

    @abstractmethod
    def _compute(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[Tensor]:
        """[size, *shape] for each parameter."""
        ...


class _Refusing(TorchFunctionMode):
    """Refuses operations whose gradients torch gets wrong under vmap: those of cdist between shared tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cdist:
            raise UnsupportedModel("torch.cdist: torch's own rule for it under vmap gives other gradients")
        return func(*args, **(kwargs or {}))


class Vmapped(Materialising):
    """``vmap(grad(loss))`` over the examples of a batch."""

    name = "vmap"

    def _compute(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[Tensor]:
        if not batch.sliceable:
            raise UnsupportedModel("vmap needs batches made of tensors whose first dimension counts the examples")
        names = {id(p): name for name, p in objective.named_parameters()}
        values = {names[id(p)]: p.detach() for p in parameters}

        def loss_of_one(values: dict[str, Tensor], example: Any) -> Tensor:
            single = tree_map(lambda x: x.unsqueeze(0), example)
            losses: Tensor = functional_call(objective, values, (single,))
            return losses.squeeze()

        with keep_tensors(objective), _Refusing():
            per_example = vmap(grad(loss_of_one), in_dims=(None, 0), randomness="different")(values, batch.data)
        return [per_example[names[id(p)]] for p in parameters]
