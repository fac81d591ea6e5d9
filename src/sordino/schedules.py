"""How clipping bound and noise change over the steps: pure functions of the step, knowing nothing of torch.

A schedule is a shape, a factor on the recipe's base value: the noise of step t is ``noise_multiplier * shape(t, T)``.
Calibration finds the base value; the shape stays what the paper says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """A positive factor for step `step` of `steps`, counted from 0."""

    def __call__(self, step: int, steps: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    def __call__(self, step: int, steps: int) -> float:
        return 1.0
