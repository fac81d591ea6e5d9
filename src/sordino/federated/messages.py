"""Updates in Flower's messages: written by our clients, read from anybody. Reading is total and runs no foreign code.

The bytes of an array are never parsed: name, type and shape must be the expected ones and its last bytes are the
numbers. Whatever else a client sends is no update, which is a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

ARRAYS, CONFIG, UPDATE, REPORT, WITHIN = "arrays", "config", "update", "report", "within"
_TYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4"), "float64": np.dtype("<f8")}
_FORTRAN = b"'fortran_order': True"


def reply(message: Message, update: Mapping[str, Tensor], within: bool) -> Message:
    """A client's answer: its clipped update and its vote, and nothing else, such as how many records it has."""
    arrays = ArrayRecord({name: Array(u.detach().float().cpu().contiguous().numpy()) for name, u in update.items()})
    return Message(RecordDict({UPDATE: arrays, REPORT: MetricRecord({WITHIN: int(within)})}), reply_to=message)


def update_in(message: Message, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor] | None:
    """The update in a reply, or None where there is none of these names and shapes."""
    if message.has_error() or not message.has_content():
        return None
    record = message.content.get(UPDATE)
    if not isinstance(record, ArrayRecord) or set(record) != set(shapes):
        return None
    tensors = {name: _tensor(record[name], shape) for name, shape in shapes.items()}
    read = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return read if len(read) == len(shapes) else None


def vote_in(message: Message) -> bool:
    """Whether a client says that its update was within the bound; anything unclear is a no."""
    record = message.content.get(REPORT)
    value = record.get(WITHIN) if isinstance(record, MetricRecord) else None
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0.5


def _tensor(array: Array, shape: torch.Size) -> Tensor | None:
    kind = _TYPES.get(array.dtype)
    if kind is None or tuple(array.shape) != tuple(shape):
        return None
    wanted = shape.numel() * kind.itemsize
    if len(array.data) < wanted:
        return None
    head, body = array.data[: len(array.data) - wanted], array.data[len(array.data) - wanted :]
    order = "F" if _FORTRAN in head[:256] else "C"
    numbers = np.frombuffer(body, dtype=kind).reshape(tuple(shape), order=order)  # type: ignore[call-overload]
    return torch.from_numpy(numbers.astype(np.float64))
