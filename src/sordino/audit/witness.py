"""A witness at the noise source: whether the ledger pays for what was really drawn.

The books are checked against behaviour, not against other books: how often coins were tossed over all records, how much
noise was drawn on which receipt, and whether its event was in the ledger by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent
from sordino.accounting.filtered import Filtered
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.ledger import Ledger, Receipt
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.noise import Source
from sordino.private import Private

TOLERANCE = 1e-6
Tested = Erasure | AnnealedErasure | ComposedDpEvent
"""Events of a proposal and its test together."""


@dataclass(frozen=True)
class Drawn:
    """One request for noise and how long the ledger was by then; `multiplier` where it is the noise of a step's sum."""

    receipt: Receipt
    multiplier: float | None
    charged: int


class Witness:
    """Passes every request on to the real source and remembers it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._private: Private | None = None
        self._noises: list[Drawn] = []
        self._draws = 0

    @property
    def assumption(self) -> str:
        return self._source.assumption

    def watch(self, private: Private, source: Source | None = None) -> None:
        """From now on requests belong to the steps of this run, and go to `source` where that is another one."""
        self._private, self._source = private, source or self._source
        self._noises, self._draws = [], 0

    def uniform(self, size: int) -> NDArray[np.float64]:
        if self._private is not None and size == self._private.bench.records.count:
            self._draws += 1
        return self._source.uniform(size)

    def directions(self, size: int) -> NDArray[np.float32]:
        return self._source.directions(size)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        if self._private is not None:
            bench = self._private.bench
            terms = bench.recipe.terms(self._private.position, bench.states)
            multiplier = std / terms.clip if terms.event == receipt.event else None
            self._noises.append(Drawn(receipt, multiplier, len(bench.ledger)))
        return self._source.gaussian(receipt, size, std)

    def findings(self, ledger: Ledger) -> list[str]:
        """What the ledger does not pay for."""
        charges = dict(ledger.history())
        return [*self._unpaid(charges), *self._too_little_noise(charges), *self._draws_paid_twice(charges)]

    def _unpaid(self, charges: dict[int, DpEvent]) -> list[str]:
        found = {
            "were made before their event was in the ledger (law 5)": lambda d: d.receipt.sequence > d.charged,
            "have no event in the ledger (law 4)": lambda d: charges.get(d.receipt.sequence) != d.receipt.event,
            "were charged nothing (law 4)": lambda d: type(d.receipt.event) is NoOpDpEvent,
        }
        counts = {said: sum(map(wrong, self._noises)) for said, wrong in found.items()}
        return [f"{count} of {len(self._noises)} releases {said}" for said, count in counts.items() if count]

    def _too_little_noise(self, charges: dict[int, DpEvent]) -> list[str]:
        """All answers on one receipt together must be worth no more than its event: 1/σ² adds up (law 3).

        Where a proposal is tested, the first answer is the proposal: what the test draws has a scale of its own.
        """
        answers: dict[int, list[float]] = {}
        for drawn in self._noises:
            if drawn.multiplier is not None:
                worth = math.inf if drawn.multiplier == 0 else drawn.multiplier**-2
                answers.setdefault(drawn.receipt.sequence, []).append(worth)
        for sequence, worths in answers.items():
            event = charges.get(sequence)
            paid, worth = _noise_of(event), worths[0] if isinstance(event, Tested) else sum(worths)
            if paid is not None and worth > paid**-2 * (1 + TOLERANCE):
                return [f"the ledger says noise multiplier {paid:.4g}, {worth**-0.5:.4g} was drawn on the same receipt"]
        return []

    def _draws_paid_twice(self, charges: dict[int, DpEvent]) -> list[str]:
        sampled = sum(_is_sampled(event) for event in charges.values())
        if sampled <= self._draws:
            return []
        return [f"{sampled} events claim a draw of their own, {self._draws} draws were made: merge answers (law 3)"]


def _noise_of(event: DpEvent | None) -> float | None:
    """The noise multiplier of one answer, where the event is one."""
    if isinstance(event, PoissonSampledDpEvent | Filtered):
        return _noise_of(event.event)
    if isinstance(event, ComposedDpEvent):  # a proposal, then what its test costs
        return _noise_of(event.events[0])
    return (
        event.noise_multiplier
        if isinstance(event, GaussianDpEvent | PaidByEpoch | ProjectedGaussian | Erasure | AnnealedErasure)
        else None
    )


def _is_sampled(event: DpEvent) -> bool:
    return isinstance(event, PoissonSampledDpEvent) and event.sampling_probability < 1
