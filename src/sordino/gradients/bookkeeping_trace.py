"""What a loss did, operation by operation: whether what was proven of one batch holds for another.

Where the examples are in every tensor follows from the operations, what they were applied to, their integers and the
shapes, except where an operation arranges entries by the values of data. Two batches with equal traces therefore have
equal layouts, and a trace that `reorders` says nothing about any other batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any
from weakref import ref

from torch import Tensor

from sordino.gradients.bookkeeping.operations import is_basic_index, tensors_in
from sordino.gradients.rules.base import name_of

REORDERING = frozenset(
    {
        *("sort", "argsort", "msort", "topk", "kthvalue", "unique", "unique_consecutive", "roll", "flip", "fliplr"),
        *("flipud", "rot90", "gather", "take", "take_along_dim", "index_select", "masked_select", "nonzero"),
        *("argwhere", "repeat_interleave", "embedding", "embedding_bag", "_pack_padded_sequence"),
        *("_pad_packed_sequence", "numpy", "__array__", "__dlpack__", "to_dlpack"),
    }
)
"""Functions whose results are arranged by values, or leave torch; so are all scatter…, index_… and nested ones."""


class Trace:
    """The operations of one forward pass; `known` are the parameters and buffers."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.steps: list[tuple[object, ...]] = []
        self.made: dict[int, tuple[ref[Tensor], str]] = {}
        self.given, self.reorders = 0, False
        for index, tensor in enumerate(known):
            self.remember(tensor, f"known {index}")

    def remember(self, tensor: Tensor, origin: str) -> None:
        """Where a tensor came from; weakly, as another one may take its place in memory and then its id."""
        self.made[id(tensor)] = (ref(tensor), origin)

    def origin(self, tensor: Tensor) -> str | None:
        """Where a tensor came from, if that is known."""
        found = self.made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, shared: Callable[[Tensor], bool]) -> None:
        """Remember one operation; `shared` says of a tensor that it is the same for every example."""
        results = list(tensors_in((result,), {}))
        name = name_of(func)
        if not self.reorders:
            tensors = list(tensors_in(args, kwargs))
            self.reorders = any(map(self.is_opaque, tensors)) or (
                arranges_by_values(name, args) and not all(map(shared, arranged(name, tensors)))
            )
        if results:
            given = self.plain(args), self.plain(tuple(kwargs.items()))
            self.steps.append((name, *given, *(tuple(each.shape) for each in results)))
            for place, each in enumerate(results):
                self.remember(each, f"made {len(self.steps)}.{place}")

    def is_opaque(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed by something that no mode sees, such as an autograd.Function."""
        return self.origin(tensor) is None and tensor.grad_fn is not None

    def plain(self, value: Any) -> Any:
        """An argument without its values: which operation made a tensor, and integers; floats place nothing."""
        if isinstance(value, Tensor):
            if self.origin(value) is None:
                self.given += 1
                self.remember(value, f"given {self.given}")
            return self.origin(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self.plain, value))
        if isinstance(value, slice):
            return "slice", self.plain(value.start), self.plain(value.stop), self.plain(value.step)
        if isinstance(value, Integral):  # of numpy, too
            return int(value)
        return value if isinstance(value, (str, type(None))) else type(value).__name__

    def key(self, size: int) -> tuple[object, ...]:
        """The trace whatever the batch size: its multiples are counted in batches."""
        return tuple(in_batches(step, size) for step in self.steps)


def in_batches(value: Any, size: int) -> object:
    """Integers that are multiples of the batch size as such."""
    if type(value) is tuple:
        return tuple(in_batches(each, size) for each in value)
    return ("batches", value // size) if type(value) is int and value > 0 and value % size == 0 else value


def arranged(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The arguments that an operation may rearrange: tokens only pick from a table, which may be data."""
    return [tensor for tensor in tensors if tensor.is_floating_point()] if "embedding" in name else tensors


def arranges_by_values(name: str, args: Any) -> bool:
    """Whether the places of a result's entries may depend on the values of an argument."""
    if name in ("__getitem__", "__setitem__"):
        return not is_basic_index(args[1])
    return name in REORDERING or name.startswith(("scatter", "index_", "_index", "masked_scatter", "nested", "_nested"))
