"""The public terms of one step: everything that is fixed before any record is touched."""

from __future__ import annotations

from dataclasses import dataclass

from dp_accounting import DpEvent


@dataclass(frozen=True)
class Terms:
    """What a step will do and what it will cost.

    `clip` bounds every weighted gradient and so is the sensitivity of their sum; noise of deviation
    ``noise_multiplier * clip`` is added to the sum, which is then divided by the public constant `divisor` (law 1).
    """

    step: int
    clip: float
    noise_multiplier: float
    divisor: float
    event: DpEvent

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip
