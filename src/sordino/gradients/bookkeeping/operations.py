"""What torch's functions do to their arguments, as far as a recording needs to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import UnsupportedModel
from sordino.gradients.rules.base import NoRule, name_of
from sordino.gradients.rules.embedding import refuse

METADATA = frozenset({"__get__", "__set__", "__len__", "__hash__", "__repr__", "__bool__", "detach", "size"})
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


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, also inside tuples and lists."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value, {})
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value, {})


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


def refuse_statistics(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse layers that write private records into the model, or mix examples, whether they are trained or not."""
    if func not in WRITERS:
        return
    name, bound = name_of(func), WRITERS[func].bind(*args, **kwargs).arguments
    if name.startswith("embedding"):
        refuse(name, bound.get("max_norm"), scale_grad_by_freq=False)
    elif name == "batch_norm" and (bound.get("training") or bound.get("running_mean") is None):
        raise UnsupportedModel(
            "batch_norm with statistics of the batch mixes records: use GroupNorm, or put the layer in eval mode"
        )
    elif name == "instance_norm" and bound.get("use_input_stats", True) and bound.get("running_mean") is not None:
        raise UnsupportedModel(
            "instance_norm updates running statistics from private records: set track_running_stats=False"
        )


def refuse_derivatives(func: Any, tracked: list[Tensor], kwargs: dict[str, Any], lenient: bool) -> None:
    """Refuse gradients inside of the loss that parameters have a part in: a recording has them detached."""
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
