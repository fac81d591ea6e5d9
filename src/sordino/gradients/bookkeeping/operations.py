"""What a recording knows about operations: what torch's functions do to their arguments, and what a loss did with them.

Where the examples are in every tensor follows from the operations, what they were applied to, their integers and the
shapes, except where an operation arranges entries by the values of data. Two batches with equal traces therefore have
equal layouts, and a trace that `reorders` says nothing about any other batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import UnsupportedModel
from sordino.gradients.rules.base import NoRule, name_of
from sordino.gradients.rules.embedding import refuse_options

METADATA = frozenset({"__get__", "__set__", "__len__", "__hash__", "__repr__", "__bool__", "detach", "size"})
PROPERTIES = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf"),
    *("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized"),
)
QUESTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in PROPERTIES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
        *(Tensor.element_size, Tensor.get_device),
    }
)
"""Functions that ask a tensor about its shape and kind."""

BACKWARDS = frozenset(
    {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, getattr(Tensor, "grad_fn").__get__}  # noqa: B009
)
"""Functions by which a user may change gradients on their way back; following the forward pass cannot see that."""

VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH"})
REARRANGE = VIEW_PROPERTIES | {
    *("t", "transpose", "swapaxes", "permute", "movedim", "adjoint", "neg", "flip", "contiguous", "clone"),
    *("reshape", "reshape_as", "view", "view_as", "flatten", "unflatten", "unsqueeze", "squeeze"),
}
CUT = frozenset({"chunk", "split", "unbind", "tensor_split", "narrow", "select"})
WRITERS: dict[Any, inspect.Signature] = {
    function: inspect.signature(function) for function in (F.batch_norm, F.instance_norm, F.embedding, F.embedding_bag)
}
FOLLOWED = (Tensor.index_select, torch._C._VariableFunctions._pack_padded_sequence)


def find_tensors(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, also inside tuples and lists."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from find_tensors(value, {})
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from find_tensors(value, {})


def is_metadata(func: Any) -> bool:
    """Whether this asks a tensor about itself rather than computing with its values."""
    return getattr(func, "__name__", "") in METADATA and name_of(func) not in VIEW_PROPERTIES


def is_basic_index(index: Any) -> bool:
    """Whether an index cuts by numbers alone, and not by the values of a tensor or a list."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, slice, type(None), type(...))) for part in parts)


def keeps_lengths(func: Any, args: Any) -> bool:
    """Whether an operation only rearranges or cuts its first argument, so that gradients keep their lengths."""
    name = name_of(func)
    if name == "__getitem__":
        return is_basic_index(args[1])
    return name in REARRANGE or name in CUT


def refuse_statistics(func: Any, args: Any, kwargs: Any, shared: Callable[[Tensor], bool], size: int | None) -> None:
    """Refuse layers that write private records into the model, or mix examples, whether they are trained or not.

    Statistics of a weight (weight standardisation) are `shared` by all examples, and those of one example are its own.
    """
    if func not in WRITERS:
        return
    name, bound = name_of(func), WRITERS[func].bind(*args, **kwargs).arguments
    if name == "batch_norm" and bound.get("running_mean") is None and (size == 1 or shared(bound["input"])):
        return
    if name.startswith("embedding"):
        refuse_options(name, bound.get("max_norm"), scale_grad_by_freq=False)
    elif name == "batch_norm" and (bound.get("training") or bound.get("running_mean") is None):
        raise UnsupportedModel(
            "batch_norm with statistics of the batch mixes records: use GroupNorm, or put the layer in eval mode"
        )
    elif name == "instance_norm" and bound.get("use_input_stats", True) and bound.get("running_mean") is not None:
        raise UnsupportedModel(
            "instance_norm updates running statistics from private records: set track_running_stats=False"
        )


def asks_slopes(func: Any, tracked: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether this takes gradients by activations, with their graph."""
    plain = torch._C._functorch.peek_interpreter_stack() is None
    return func is torch.autograd.grad and bool(kwargs.get("create_graph")) and not tracked and plain


def refuse_derivatives(func: Any, tracked: list[Tensor], kwargs: dict[str, Any], lenient: bool) -> None:
    """Refuse gradients inside the loss that depend on parameters: a recording has them detached."""
    asks = func is Tensor.backward or (func is torch.autograd.grad and (kwargs.get("create_graph") or tracked))
    nested = bool(tracked) and (
        torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
    )
    if not (asks or nested):
        return
    if lenient:
        raise UnsupportedModel(
            "backward() or grad() inside private.loader(): call private.backward(losses) instead; "
            "a loss that itself differentiates the model needs engine='loop'"
        )
    raise NoRule("the loss differentiates the model: its second derivatives are not recorded")


def accepts(rule: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a rule knows every named argument that its operation was given."""
    code = rule.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return bool(code.co_flags & inspect.CO_VARKEYWORDS) or all(name in known for name in kwargs)


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
        """Where a tensor came from, if known."""
        found = self.made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, shared: Callable[[Tensor], bool]) -> None:
        """Remember one operation; `shared` says of a tensor that it is the same for every example."""
        results = list(find_tensors((result,), {}))
        name = name_of(func)
        if not self.reorders:
            tensors = list(find_tensors(args, kwargs))
            self.reorders = any(map(self.is_opaque, tensors)) or (
                arranges_by_values(name, args) and not all(map(shared, pick_arranged(name, tensors)))
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
        return tuple(count_in_batches(step, size) for step in self.steps)


def count_in_batches(value: Any, size: int) -> object:
    """Mark integers that are multiples of the batch size as multiples."""
    if type(value) is tuple:
        return tuple(count_in_batches(each, size) for each in value)
    return ("batches", value // size) if type(value) is int and value > 0 and value % size == 0 else value


def pick_arranged(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The arguments that an operation may rearrange: tokens only pick from a table, which may be data."""
    return [tensor for tensor in tensors if tensor.is_floating_point()] if "embedding" in name else tensors


def arranges_by_values(name: str, args: Any) -> bool:
    """Whether the places of a result's entries may depend on the values of an argument."""
    if name in ("__getitem__", "__setitem__"):
        return not is_basic_index(args[1])
    return name in REORDERING or name.startswith(("scatter", "index_", "_index", "masked_scatter", "nested", "_nested"))
