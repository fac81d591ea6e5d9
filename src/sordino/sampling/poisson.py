"""Poisson sampling: every record tosses its own coin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from dp_accounting import DpEvent, PoissonSampledDpEvent

from sordino.errors import InvalidInput
from sordino.noise import Source
from sordino.sampling.draw import Draw, Sampler
from sordino.terms import Terms


@dataclass(frozen=True)
class Poisson(Sampler):
    """Each record joins the draw independently with probability `rate`.

    Guarantees: inclusions are independent of the data and of each other, so the draw amplifies
    (Mironov, Talwar, Zhang 2019, Def. 3; Poisson-subsampled PLD).
    Edge cases: an empty draw is a draw, and the step then releases noise alone; rate 1 is the full data.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InvalidInput(f"rate={self.rate} must lie in (0, 1]: it is the expected batch size over the records")

    def for_records(self, records: int, batch_size: int) -> Poisson:
        return Poisson(batch_size / records)

    def terms(self, terms: Terms, memory: dict[str, Any]) -> Terms:
        return replace(terms, event=self.amplify(terms.event))

    def amplify(self, event: DpEvent) -> DpEvent:
        """The event of answering once about a fresh draw; several answers are merged before (law 3)."""
        return PoissonSampledDpEvent(self.rate, event)

    def draw(self, records: int, source: Source, memory: dict[str, Any]) -> Draw:
        joined = source.uniform(records) < self.rate
        return Draw(torch.from_numpy(joined.nonzero()[0]))
