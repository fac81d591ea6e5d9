"""Mechanisms that are wrong on purpose, each the way that real code has been wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor

from sordino import Private
from sordino.accounting.ledger import Ledger, Receipt
from sordino.mechanisms.dpis import Importance
from sordino.mechanisms.dpsur import Selective
from sordino.mechanisms.jl import ProjectedNorms
from sordino.noise import Seeded, Source
from sordino.parts import Always, Draw, Exact, Flat, Poisson, Sampler, Snapshot, State, Terms
from sordino.step import Attempt

# -- noise ----------------------------------------------------------------------------------------------------------


class Halved(Seeded):
    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return super().gaussian(receipt, size, std / 2)


@dataclass
class AsksForHalf:
    """Noise that is asked for by half, as a step would with a wrong factor: the source itself is right."""

    source: Source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return self.source.gaussian(receipt, size, std / 2)


class Repeated(Seeded):
    """The same noise at every step: differences between releases are free of it."""

    first: Tensor | None = None

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        if self.first is None:
            self.first = super().gaussian(receipt, size, std)
        return self.first


class SharedAmongParts(Seeded):
    """Each of four microbatches gets a quarter of the noise: together they have half of it."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return sum(
            (super(SharedAmongParts, self).gaussian(receipt, size, std / 4) for _ in range(4)), torch.zeros(size)
        )


class SomeCoordinates(Seeded):
    """Every fourth parameter, say the biases, is released without noise."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        noise = super().gaussian(receipt, size, std)
        noise[::4] = 0
        return noise


class OneSided(Seeded):
    """Noise that is never negative."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return super().gaussian(receipt, size, std).abs()


# -- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unclipped:
    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return torch.ones_like(norms)


@dataclass(frozen=True)
class TwiceTheBound:
    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return (2 * clip / norms).clamp(max=1.0)


@dataclass(frozen=True)
class ByTheMean:
    """One weight for all: the mean norm of the batch is clipped instead of every norm."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return (clip / norms.mean()).clamp(max=1.0).expand_as(norms)


@dataclass(frozen=True)
class NothingFromABatchWithNaN(Flat):
    """One record that is not a number silences all others."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return super().weights(norms, clip, draw) * float(torch.isfinite(norms).all())


# -- draws ----------------------------------------------------------------------------------------------------------


@dataclass
class Deck(State):
    """The records that are left of an epoch."""

    left: Tensor | None = None


@dataclass(frozen=True)
class Shuffled(Sampler):
    """Batches of a shuffled loader, each record exactly once per epoch, priced as if Poisson."""

    rate: float

    def start(self) -> Deck:
        return Deck()

    def terms(self, terms: Terms, state: Any) -> Terms:
        return Poisson(self.rate).terms(terms, state)

    def draw(self, records: int, source: Source, state: Deck) -> Draw:
        left = state.left
        if left is None or not len(left):
            left = torch.from_numpy(np.argsort(source.uniform(records)))
        size = round(self.rate * records)
        state.left = left[size:]
        return Draw(left[:size])


@dataclass(frozen=True)
class MoreThanItSays(Shuffled):
    """Draws at three times the rate that is charged."""

    def draw(self, records: int, source: Source, state: Any) -> Draw:
        return Poisson(min(1.0, 3 * self.rate)).draw(records, source, state)


@dataclass(frozen=True)
class WithoutCap(Importance):
    """DPIS whose bound may exceed what coins reach, as in the paper: a long gradient is drawn for sure."""

    def bounds(self, norms: Tensor, clip: float) -> Tensor:
        return (self.multiplier * norms.clamp(min=self.floor * clip)).float()

    def draw(self, records: int, source: Source, state: Any) -> Draw:
        heights = torch.from_numpy(source.uniform(records)) * state.epoch.reach
        drawn = (heights < state.bounds).nonzero().squeeze(1)
        return Draw(drawn, heights[drawn], self.floor * state.epoch.clip)


# -- what is divided, kept and charged ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DividesByTheDraw(Always):
    """The mean over the records that happened to be drawn."""

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        attempt.terms = replace(attempt.terms, divisor=max(1, len(attempt.draw)))
        return None


@dataclass(frozen=True, kw_only=True)
class KeepsMomentum(Selective):
    """Puts the parameters back, but not the optimizer: rejected gradients live on in its momentum."""

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        kept = super().accepts(attempt, before)
        if not kept:
            state = attempt.bench.optimizer.state
            momenta = [state[p]["momentum_buffer"].clone() for p in attempt.parameters]
            assert before is not None
            before.restore()
            for parameter, momentum in zip(attempt.parameters, momenta, strict=True):
                state[parameter] = {"momentum_buffer": momentum}
            return True  # nothing is left to restore
        return kept


@dataclass(frozen=True)
class LedgeredAtTheStart(Exact):
    """Every step is charged as if it had the noise of the first."""

    first: float = 1.0

    def event(self, noise_multiplier: float) -> DpEvent:
        return GaussianDpEvent(self.first)


@dataclass(frozen=True)
class PricedAsExact(ProjectedNorms):
    """Estimated norms at the price of exact ones."""

    def event(self, noise_multiplier: float) -> DpEvent:  # type: ignore[override]
        return GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class AnswersTwice(Always):
    """Asks the same draw again, and charges a second draw for it."""

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        bench = attempt.bench
        receipt = bench.charge(attempt.terms.event)
        bench.source.gaussian(receipt, 1, attempt.terms.noise_std)
        return True


class Forgetful:
    """A ledger that takes every second charge for paid."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.charges = ledger, 0
        self.last: Receipt | None = None

    def charge(self, event: DpEvent, note: str = "", **ahead: Any) -> Receipt:
        self.charges += 1
        if self.charges % 2 or self.last is None:
            self.last = self.ledger.charge(event, note)
        return self.last

    def __len__(self) -> int:
        return len(self.ledger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)


class Late(Forgetful):
    """A ledger that writes an event down when the next one comes."""

    def charge(self, event: DpEvent, note: str = "", **ahead: Any) -> Receipt:
        if self.last is not None:
            self.ledger.charge(self.last.event, note)
        self.last = Receipt(len(self.ledger) + 1, event)
        return self.last


def forgetful(private: Private) -> None:
    private.run.ledger = Forgetful(private.bench.ledger)  # type: ignore[assignment]


def asking_for_half(private: Private) -> None:
    private.run.source = AsksForHalf(private.bench.source)


def late(private: Private) -> None:
    private.run.ledger = Late(private.bench.ledger)  # type: ignore[assignment]


@dataclass(frozen=True)
class Falling:
    """Noise that falls with every step."""

    def __call__(self, step: int, steps: int) -> float:
        return 1 - 0.5 * step / steps
