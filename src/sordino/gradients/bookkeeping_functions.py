"""What torch's functions do to their arguments, as far as a recording needs to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.base import name_of

METADATA = frozenset({"__get__", "__set__", "__len__", "__hash__", "__repr__", "__bool__", "detach", "size"})
VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH"})
REARRANGE = VIEW_PROPERTIES | {
    *("t", "transpose", "swapaxes", "permute", "movedim", "adjoint", "neg", "flip", "contiguous", "clone"),
    *("reshape", "reshape_as", "view", "view_as", "flatten", "unflatten", "unsqueeze", "squeeze"),
}
CUT = frozenset({"chunk", "split", "unbind", "tensor_split", "narrow", "select"})
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


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


def keeps_lengths(func: Any, args: Any) -> bool:
    """Whether an operation only rearranges or cuts its first argument, so that gradients keep their lengths."""
    name = name_of(func)
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(isinstance(part, (int, slice, type(None), type(...))) for part in index)
    return name in REARRANGE or name in CUT


def accepts(rule: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a rule knows every named argument that its operation was given."""
    code = rule.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return bool(code.co_flags & inspect.CO_VARKEYWORDS) or all(name in known for name in kwargs)
