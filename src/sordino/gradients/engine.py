"""What every gradient engine promises: per-example norms first, then one weighted sum of gradients.

An engine never hands out per-example gradients. `differentiate` runs the loss on a batch and keeps whatever it needs;
the result answers two questions: how long is each example's gradient, and what is ``sum_i weight_i * gradient_i``.
Clipping, automatic clipping, JL clipping and importance weights are all functions between the two answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sordino.errors import UnsupportedModel
from sordino.noise import WITHOUT_DOUBLES

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)`` returns one loss per example of the batch, as a vector."""

HALVES = (torch.float16, torch.bfloat16)
"""Half precision."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Which unit owns each example of a batch, if a unit of protection may own several: its loss is the mean of theirs.

    `owners` has the unit's place in the draw for every example, in ascending order; `size` counts the units, each of
    which owns at least one example. Means are linear, so that a unit's gradient is the mean of its examples' gradients.
    """

    owners: Tensor
    size: int

    @cached_property
    def counts(self) -> Tensor:
        """How many examples each unit has."""
        return torch.bincount(self.owners, minlength=self.size)

    @cached_property
    def shares(self) -> Tensor:
        """The share of its unit that each example is: one over their number."""
        return self.counts.to(total_dtype(self.counts)).reciprocal()[self.owners]

    def to(self, device: torch.device) -> Groups:
        """The same on another device."""
        return self if self.owners.device == device else Groups(self.owners.to(device), self.size)

    def mean(self, each: Tensor) -> Tensor:
        """[size, ...] from one row for each example; a bad example spoils only its own unit."""
        scaled = each * self.shares.to(each.dtype).reshape(-1, *[1] * (each.dim() - 1))
        return each.new_zeros(self.size, *each.shape[1:]).index_add(0, self.owners, scaled)

    def spread(self, weights: Tensor) -> Tensor:
        """The weight of each example in a weighted sum over units."""
        return weights[self.owners] * self.shares.to(weights.dtype)


@dataclass(frozen=True)
class Batch:
    """Collated examples on the model's device.

    `groups` says whose they are where units of protection own several; otherwise each example is its own unit.
    `single(i)` collates example `i` alone, for engines that cannot slice what a user's collate function made;
    `by_rows` says whether the first dimension is known to count the examples; `regroup` collates some of its examples
    anew, in any order, where they are at hand.
    """

    data: Any
    size: int
    single: Callable[[int], Any]
    by_rows: bool = True
    regroup: Callable[[Sequence[int]], Any] | None = None
    groups: Groups | None = None

    @property
    def sliceable(self) -> bool:
        """Whether every leaf is a tensor whose first dimension counts the examples."""
        return self.by_rows and counts_examples(self.data, self.size)

    @property
    def bytes(self) -> int:
        """The bytes that its tensors take."""
        plain = type(self.data) is tuple and all(isinstance(x, Tensor) for x in self.data)
        leaves = self.data if plain else tree_leaves(self.data)
        return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))

    def singles(self) -> Iterator[Any]:
        """Each example as a batch of one."""
        for i in range(self.size):
            yield tree_map(lambda x, i=i: x[i : i + 1], self.data) if self.sliceable else self.single(i)


def counts_examples(data: Any, size: int) -> bool:
    """Whether every leaf is a tensor with `size` rows; a time-first batch may have that many steps by accident."""
    leaves = tree_leaves(data)
    return bool(leaves) and all(isinstance(x, Tensor) and x.dim() > 0 and len(x) == size for x in leaves)


def describe_kind(value: object) -> str:
    """A value described by its type alone: a length would reveal the size of a draw, which is private."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return {0: "a scalar", 1: "a vector of another length"}.get(value.dim(), f"a tensor of {value.dim()} dimensions")


def list_modules(root: nn.Module) -> list[nn.Module]:
    """``list(root.modules())`` without the names, which take most of the time; a step calls it several times."""
    found: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(part for part in reversed(list(module._modules.values())) if part is not None)
    return list(found)


class Objective(nn.Module):
    """The user's model and loss as one module, so that parameters can be substituted without touching the model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, data: Any) -> Tensor:
        return self.loss(self.model, data)

    def list_owned(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The parameters and the buffers, each once and in torch's order."""
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, Tensor] = {}
        for module in list_modules(self):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
            for buffer in module._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
        return list(parameters.values()), list(buffers.values())

    def losses(self, data: Any, size: int) -> Tensor:
        """One loss per example, or a refusal that says what came instead."""
        losses = self(data)
        if not isinstance(losses, Tensor) or losses.shape != (size,):
            raise UnsupportedModel(
                f"loss returned {describe_kind(losses)}, must be a vector with one loss per example: "
                "use reduction='none' and average over everything but the examples"
            )
        return losses


class Differentiated(Protocol):
    """One batch after the backward pass: norms, then the weighted sum.

    Where the batch has `groups`, its units take the place of examples here: norms and weights are one for each unit.
    """

    @property
    def norms(self) -> Tensor:
        """Per-example gradient norms over all parameters, shape [size], float32 or better.

        Not finite for a bad example.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> Iterable[Tensor]:
        """``sum_i weights[i] * gradient_i`` of one parameter after the other, float32 or better.

        Noise is written into the result, so nobody else may rely on it. An example whose weight is 0
        contributes exactly 0, even where its gradient is NaN or infinite.
        """
        ...


class Blocked(Differentiated, Protocol):
    """The same with norms for every block of parameters, and one weight for every block of an example."""

    @property
    def block_norms(self) -> Tensor:
        """Norms over the parameters of each block, shape [blocks, size]; `norms` are those over all of them.

        Not finite in every block that a bad example has a bad gradient in.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> Iterable[Tensor]:
        """``sum_i weights[block, i] * gradient_i`` of one parameter after the other, each with its block's weights.

        An example that is not finite anywhere must have the weight 0 in all blocks.
        """
        ...


class Engine(Protocol):
    """A way to compute per-example norms and weighted sums; performance aside, all engines agree (law 8)."""

    name: str

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Differentiated:
        """Run the loss on a non-empty batch; `parameters` are distinct, trainable and owned by ``objective.model``."""
        ...

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        """How many examples to process at once by default: a performance knob that changes no numbers."""
        ...


class BlockEngine(Engine, Protocol):
    """An engine that can measure blocks of parameters apart."""

    def differentiate_blocks(
        self, objective: Objective, parameters: list[nn.Parameter], batch: Batch, blocks: Sequence[int]
    ) -> Blocked:
        """As `differentiate`, where ``blocks[k]`` is the block of ``parameters[k]``, counted from 0 without a gap."""
        ...


def choose_weights(weights: Tensor, blocks: Sequence[int] | None, place: int) -> Tensor:
    """The weights of the examples for the parameter at `place`: those of its block, or the same for all parameters."""
    return weights if blocks is None else weights[blocks[place]]


class Recorder(Protocol):
    """The other way to use an engine, if the user runs the forward pass: record it, then differentiate."""

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *error: object) -> None: ...

    def differentiate(self, losses: Tensor) -> Differentiated: ...


class FullPrecision:
    """A context in which float32 means float32, whatever the user chose for the loss.

    Autocast is off, and matrix products and convolutions do not round their factors to TF32 or bfloat16: a norm and a
    sum of the same gradients must not differ by more than the rounding of float32. It may be entered again and again.
    """

    def __init__(self, device: torch.device) -> None:
        backends: Any = torch.backends
        above: Any = backends
        slots: tuple[Any, ...] = ()
        if device.type == "cpu":
            above, slots = backends.mkldnn, (backends.mkldnn.matmul, backends.mkldnn.conv)
        elif device.type == "cuda":
            above, slots = backends.cudnn, (backends.cuda.matmul, backends.cudnn.conv)
        self._type = device.type
        general = _specify(above.fp32_precision, backends.fp32_precision)
        self._coarse = [slot for slot in slots if _specify(slot.fp32_precision, general) not in ("ieee", "none")]
        self._left: list[tuple[list[str], AbstractContextManager[object] | None]] = []

    def __enter__(self) -> None:
        autocast = None
        if torch.is_autocast_enabled(self._type):
            autocast = torch.autocast(self._type, enabled=False)
            autocast.__enter__()
        self._left.append(([slot.fp32_precision for slot in self._coarse], autocast))
        for slot in self._coarse:
            slot.fp32_precision = "ieee"

    def __exit__(self, *error: object) -> None:
        chosen, autocast = self._left.pop()
        for slot, precision in zip(self._coarse, chosen, strict=True):
            slot.fp32_precision = precision
        if autocast is not None:
            autocast.__exit__(None, None, None)


def _specify(own: str, general: str) -> str:
    """The precision that a setting names, or where it names none, the more general one; none at all is float32."""
    return general if own == "none" else own


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Norms, sums and noise are at least float32, whatever the model's dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def total_dtype(tensor: Tensor) -> torch.dtype:
    """Sums over many microbatches are in double precision, where the device has it."""
    return torch.float32 if tensor.device.type in WITHOUT_DOUBLES else torch.float64


def add_widely(total: Tensor, some: Tensor) -> Tensor:
    """``total + some`` in double precision where the device has it, and in place where `total` has it already."""
    wide = total_dtype(total)
    held = total if total.dtype == wide else torch.empty(total.shape, dtype=wide, device=total.device)
    if total.device.type == "cpu" and some.dtype in (torch.float32, torch.float64):
        # numpy adds mixed precisions without copying either; for a large model the copy would take longer than the sum.
        np.add(total.numpy(), some.detach().numpy(), out=held.numpy(), dtype=np.float64)
        return held
    return torch.add(total.to(wide), some, out=held)
