"""Epochs: every record is in exactly one batch of an epoch, and the epoch is one release."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from dp_accounting import GaussianDpEvent
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.errors import InvalidInput
from sordino.noise import Source
from sordino.parts import SEEDED_BY_LOADER, Draw, Foreign, Sampler, State, Terms

if TYPE_CHECKING:
    from sordino.step import Bench


@dataclass(frozen=True)
class _Dealt:
    """An epoch in progress: the records by batch, the next or current batch, and whether it was drawn. Private.

    The records are grouped once, so that a step looks only at its own. `ends` says where each batch ends in `order`.
    """

    order: Tensor
    ends: Tensor
    number: int = 0
    drawn: bool = True

    @classmethod
    def deal(cls, batch_of: NDArray[np.int64], batches: int) -> _Dealt:
        """Deal the records to batches, in order."""
        order = torch.from_numpy(np.argsort(batch_of, kind="stable"))
        return cls(order, torch.from_numpy(np.cumsum(np.bincount(batch_of, minlength=batches))))

    def batch(self) -> Tensor:
        """Return the records of the current batch."""
        start = int(self.ends[self.number - 1]) if self.number else 0
        return self.order[start : int(self.ends[self.number])]


@dataclass
class _Epoch(State):
    dealt: _Dealt | None = None


@dataclass(frozen=True)
class Shuffled(Sampler):
    """In each epoch every record picks one of `batches` batches by its own secret coin: balls into bins.

    `batches` is a public number, set by the recipe to records / batch_size, rounded up.

    Guarantees: with one record more or less, the other records' batches are the same, and one batch of the epoch has
    one record more or less. So an epoch is at most one Gaussian with its smallest noise, charged before its first batch
    (docs/proofs/shuffled.md). No amplification is claimed.
    Edge cases: batches differ in size and may be empty; the sum is divided by the public batch_size. An epoch that ends
    early (a killed run, a budget that runs out) stays paid for in full: the coins are not kept, and the next epoch has
    new ones. Dealing takes 8 bytes per record for the epoch; a batch takes time in proportion to its size.
    """

    batches: int | None = None

    def __post_init__(self) -> None:
        _check_batches(self.batches)

    def for_records(self, records: int, batch_size: int) -> Shuffled:
        return replace(self, batches=_batches(records, batch_size))

    @property
    def covers(self) -> int:
        return _known(self, self.batches)

    def start(self) -> _Epoch:
        return _Epoch()

    def prepare(self, bench: Bench, step: int) -> None:
        """Advance to the next batch once the last one was drawn, whatever happened to it; forget a finished epoch."""
        dealt = bench.states.sampler.dealt
        if dealt is None or not dealt.drawn:
            return
        last = dealt.number + 1 == self.covers
        bench.states.sampler.dealt = None if last else replace(dealt, number=dealt.number + 1, drawn=False)

    def terms(self, terms: Terms, state: _Epoch) -> Terms:
        opens = state.dealt is None or state.dealt.number == 0
        return _price_epoch(self, terms, opens, sensitivity=1.0)

    def draw(self, records: int, source: Source, state: _Epoch) -> Draw:
        dealt = state.dealt
        if dealt is None:
            coins = np.minimum(np.floor(source.uniform(records) * self.covers), self.covers - 1)
            dealt = _Dealt.deal(coins.astype(np.int64), self.covers)
        state.dealt = replace(dealt, drawn=True)
        return Draw(dealt.batch())


@dataclass
class _PassState(State):
    """Whether the next batch opens a pass that has to be charged, and to which pass the last batch belonged."""

    opens: bool = True
    last: object = None


@dataclass(frozen=True)
class ShuffledLoader(Foreign):
    """The user's own torch DataLoader with ``shuffle=True``: every record once per pass, in batches of fixed size.

    A pass is one epoch. Sordino's secret source draws its order instead of torch's generator, whose seed is public
    unless someone changes it. `batches`, the public number of batches in a pass, is set by the recipe to records /
    batch_size, rounded up: further batches of the loader are left out, missing ones are empty.

    Guarantees: with one record more, the last place of the order holds another record, and one other place holds the
    new one: one batch changes by replacement and one gains a record, so an epoch is at most one Gaussian with 1/√5 of
    its smallest noise (docs/proofs/shuffled.md), charged before its first batch.
    Edge cases: a pass that ends early stays paid for in full; one that continues after steps of another is charged
    again.
    """

    batches: int | None = None

    def __post_init__(self) -> None:
        _check_batches(self.batches)

    def for_records(self, records: int, batch_size: int) -> ShuffledLoader:
        return replace(self, batches=_batches(records, batch_size))

    @property
    def covers(self) -> int:
        return _known(self, self.batches)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            "batches came from a foreign loader, in an order that Sordino drew anew for every epoch; "
            "no amplification by sampling is claimed",
            "the foreign loader's dataset holds every record once",
            SEEDED_BY_LOADER,
        )

    def start(self) -> _PassState:
        return _PassState()

    def terms(self, terms: Terms, state: _PassState) -> Terms:
        return _price_epoch(self, terms, state.opens, sensitivity=math.sqrt(5))

    def passes(self, loader: Any, bench: Bench) -> Iterator[Any]:
        """Yield one pass over the user's loader: batches in a fresh secret order, None for each that is missing."""
        self._check(loader, bench.recipe.batch_size)
        records, size = len(loader.dataset), loader.batch_size
        order = np.argsort(bench.source.uniform(records), kind="stable").tolist()
        chunks = [order[start : start + size] for start in range(0, records, size)][: self.covers]
        dealt = DataLoader(
            loader.dataset,
            batch_sampler=chunks,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        mine, state = object(), bench.states.sampler
        for number, batch in enumerate(_pad(dealt, self.covers)):
            # Steps of another pass in between move this pass to later steps, and its event does not know their noise.
            state.opens = number == 0 or state.last is not mine
            state.last = mine
            yield batch

    def _check(self, loader: Any, batch_size: int) -> None:
        """Refuse a loader that is not clearly a uniform order cut into batches of one size."""
        way_out = "use a DataLoader with shuffle=True and drop_last=False, sampler=Shuffled(), or sampler=Foreign()"
        if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
            raise InvalidInput(f"a {type(loader).__name__} is not known to deal every record once per pass: {way_out}")
        order, whole = loader.sampler, cast(Sized, loader.dataset)
        if type(order) is not RandomSampler or order.replacement or order.num_samples != len(whole):
            raise InvalidInput(f"the loader's {type(order).__name__} does not shuffle all records once: {way_out}")
        if loader.drop_last:
            raise InvalidInput(
                f"drop_last=True makes a whole batch appear with one record, which costs as much as a batch: {way_out}"
            )
        if loader.batch_size != batch_size:
            raise InvalidInput(
                f"the loader has batch_size={loader.batch_size}, the recipe {batch_size}, by which sums are divided: "
                "give both the same"
            )


def _pad(batches: DataLoader[Any], count: int) -> Iterator[Any]:
    """Yield `count` batches: the existing ones, then None."""
    found = 0
    for batch in batches:
        found += 1
        yield batch
    for _ in range(found, count):
        yield None


def _price_epoch(sampler: Sampler, terms: Terms, opens: bool, sensitivity: float) -> Terms:
    """Price the whole epoch at its first batch, the others at nothing; ``terms.event`` has the epoch's least noise."""
    if not isinstance(terms.event, GaussianDpEvent):
        raise InvalidInput(
            f"sampler={type(sampler).__name__}() works with exact norms, not with {terms.event}: use Poisson draws"
        )
    if not opens:
        return replace(terms, event=PaidByEpoch(terms.noise_multiplier))
    return replace(terms, event=GaussianDpEvent(terms.event.noise_multiplier / sensitivity))


def _batches(records: int, batch_size: int) -> int:
    return -(-records // batch_size)


def _check_batches(batches: int | None) -> None:
    if batches is not None and batches < 1:
        raise InvalidInput(f"batches={batches} must be >= 1: leave it out to have records / batch_size")


def _known(sampler: Sampler, batches: int | None) -> int:
    if batches is None:
        raise InvalidInput(
            f"sampler={type(sampler).__name__}() does not know how many batches an epoch has: "
            "call recipe.calibrate(budget, records=N) or recipe.for_records(N)"
        )
    return batches


PARTS = {"Sampler": {"shuffled": Shuffled, "shuffled-loader": ShuffledLoader}}
"""Their names in recipes on disk; a recipe is given these parts, so no mechanism has their names."""
