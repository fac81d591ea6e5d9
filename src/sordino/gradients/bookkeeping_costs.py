"""What each use of a parameter costs, for people: `sordino check` prints these rows."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.gradients.rules.base import PerExample


@dataclass(frozen=True)
class Row:
    """One use of one parameter: how it is measured, bytes kept per example, and milliseconds for norms and sum."""

    parameter: str
    operation: str
    rule: str
    bytes_per_example: int
    milliseconds: float

    @staticmethod
    def of(parameter: str, operation: str, kept: PerExample) -> Row:
        """Measure one use by doing it once on the side; on a copy, as a measured one lets go of what it held."""
        manner, trial = kept.manner, copy.copy(kept)
        before = time.perf_counter()
        trial.squared_norms()
        trial.weighted_sum(torch.ones(kept.size))
        spent = 1000 * (time.perf_counter() - before)
        return Row(parameter, operation, manner, tensor_bytes(kept) // max(1, kept.size), spent)


def tensor_bytes(holder: object, depth: int = 2) -> int:
    """Bytes of the tensors that an object holds, itself or one level down."""
    if isinstance(holder, Tensor):
        return holder.numel() * holder.element_size()
    if depth == 0 or not hasattr(holder, "__dict__"):
        return 0
    return sum(tensor_bytes(value, depth - 1) for value in vars(holder).values())
