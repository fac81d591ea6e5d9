"""Parameters that are indexed by data, or that take the shape or the dtype of data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import Call, NoRule, Rules, name_of

WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def get_item(call: Call, input: Tensor, index: Any) -> Any:
    """``table[tokens]`` is an embedding; ``experts[i]`` with a number in a tensor is a piece of the parameter."""
    parts = index if isinstance(index, tuple) else (index,)
    if all(is_number(part) for part in parts if isinstance(part, Tensor)):
        numbers = tuple(int(part) if isinstance(part, Tensor) else part for part in parts)
        return call.use(Tensor.__getitem__, input, numbers)
    if len(parts) == 1 and parts[0].dtype in WHOLE_NUMBERS[:2]:
        return look_up(call, input, parts[0])
    raise NoRule("__getitem__: only an index by one tensor of whole numbers has a rule")


def is_number(index: Tensor) -> bool:
    """Whether a tensor is one whole number."""
    return index.dim() == 0 and index.dtype in WHOLE_NUMBERS


def index_select(call: Call, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows of a table."""
    if not call.tracks(input) or dim not in (0, -input.dim()) or index.dim() != 1:
        raise NoRule("index_select: only rows of a parameter have a rule")
    return look_up(call, input, index)


def look_up(call: Call, table: Tensor, index: Tensor) -> Tensor:
    """The entries of the first dimension at the indices, which may count from the end."""
    call.only(table)
    if table.dim() == 0 or index.dim() == 0:
        raise NoRule("__getitem__: an index of a number has no rule")
    rows = call.use(torch.reshape, table, (len(table), -1))
    found = call.use(F.embedding, torch.where(index < 0, index + len(table), index), rows)
    result: Tensor = call.use(torch.reshape, found, (*index.shape, *table.shape[1:]))  # found may be shared by all
    return result


def convert(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``to`` and ``type_as``: of the other tensor only its dtype and device are taken."""
    other = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("other")
    if not isinstance(other, Tensor):
        raise NoRule(f"{name_of(call.function)}: unusual arguments")
    if call.tracks(input):
        return call.use(Tensor.to, input, other.device, other.dtype)
    return call.function(input, call.plain(other), *args[1:])


def reshape_as(call: Call, input: Tensor, other: Tensor) -> Any:
    """``view_as`` and ``reshape_as``: of the other tensor only its shape is taken."""
    return call.use(torch.reshape, input, tuple(other.shape)) if call.tracks(input) else input.reshape(other.shape)


RULES: Rules = {
    Tensor.__getitem__: get_item,
    **dict.fromkeys((torch.index_select, Tensor.index_select), index_select),
    **dict.fromkeys((Tensor.to, Tensor.type_as), convert),
    **dict.fromkeys((Tensor.view_as, Tensor.reshape_as), reshape_as),
}
