"""A noise source that records everything a run asks of it, and plays the releases of an earlier run back to another.

On the first run it notes every coin, every projection, every noise with its receipt, and every value before and after
its noise. The second run is on a neighbouring dataset. There, records that both have toss the same coins, and the
releases are those of the first run. So only the values before the noise may still differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from sordino.accounting.events import DpEvent
from sordino.accounting.ledger import Ledger, Receipt
from sordino.audit.conformance.payments import Answer, Noised, Unseen, answers
from sordino.bits import Tossed
from sordino.errors import InvalidInput
from sordino.noise import Settling, Source

ABSENT = 1 - 2**-20
"""A coin at which no record joins a draw."""
BESIDE = 1e-6
"""A coin this much above the rate that is charged must keep its record out."""
Extra = Literal["joins", "joins once", "stays out"]


@dataclass(frozen=True)
class Happening:
    """One thing that happened, in the words of a finding, and its numbers, which must be public.

    A release may be a sum clipped by projections, and coins may have been tossed for these since the last release.
    """

    what: str
    numbers: tuple[float, ...] = ()
    projected: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class DrawnNoise:
    """One request for noise: how many numbers, of which deviation, and how many events the ledger held then."""

    receipt: Receipt
    std: float
    drawn: Tensor
    charged: int


@dataclass(frozen=True)
class Release:
    """A value, what left in its place, and the noise that was drawn for it."""

    receipt: Receipt
    value: Tensor
    released: Tensor
    noises: tuple[DrawnNoise, ...]


@dataclass
class Tape(Settling):
    """The source of one run about `records` records, the last of which is `extra` if the other dataset lacks it.

    `empty` keeps all common records out of every draw. `recorded` is the tape of the neighbour's run to play back.
    `missed` are the events in whose draws the extra record is not.
    """

    source: Source
    records: int
    extra: Extra | None = None
    empty: bool = False
    recorded: Tape | None = None
    ledger: Ledger | None = None
    log: list[Happening] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    noises: list[DrawnNoise] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)
    _coins: list[NDArray[np.float64]] = field(default_factory=list)
    _directions: list[NDArray[np.float32]] = field(default_factory=list)
    _pending: list[DrawnNoise] = field(default_factory=list)
    _charges: list[DpEvent] = field(default_factory=list)
    _draws: dict[int, int] = field(default_factory=dict)
    _renewed: bool = False
    _joined: bool = False
    _closed: bool = False

    @property
    def assumption(self) -> str:
        return "releases are RECORDED or replayed by the conformance suite: a rehearsal, no protection"

    def watch(self, ledger: Ledger) -> None:
        """Count everything that this ledger is charged from now on as part of the run."""
        self.ledger = ledger
        self._charges = [event for _, event, *_ in ledger.history()]

    @property
    def charges(self) -> list[DpEvent]:
        """Every event of the run, in order."""
        return self._charges

    def draws(self, sequence: int) -> int:
        """Count how often every record tossed a coin between event `sequence` and the next."""
        return self._draws.get(sequence, 0)

    # -- what a source does -------------------------------------------------------------------------------------

    def uniform(self, size: int) -> NDArray[np.float64]:
        self._note_charges()
        each = size == self.records
        self.log.append(Happening("every record tosses a coin" if each else f"{size} coins are tossed"))
        coins = self._toss(size, each)
        self._renewed |= not each
        if each:
            draw = self._draws.get(len(self._charges), 0)
            self._draws[len(self._charges)] = draw + 1
            if self.extra is not None:
                coins[-1] = self._decide(draw)
        self._coins.append(coins)
        return coins.copy()

    def toss(self, records: int, rate: float) -> Tossed:
        """Toss every coin, so that neighbours can toss the same ones."""
        coins = self.uniform(records)
        return Tossed(np.flatnonzero(coins < rate), coins[coins < rate])

    def directions(self, size: int) -> NDArray[np.float32]:
        self._note_charges()
        self.log.append(Happening(f"projections of {size} numbers are drawn"))
        self._renewed = True
        drawn = self.source.directions(size)
        earlier = self.recorded._directions if self.recorded else []
        if len(earlier) > len(self._directions) and len(earlier[len(self._directions)]) == size:
            drawn = earlier[len(self._directions)].copy()
        self._directions.append(drawn.copy())
        return drawn

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self._note_charges()
        drawn = self.source.gaussian(receipt, size, std)
        noise = DrawnNoise(receipt, std, drawn.clone(), len(self._charges))
        self.noises.append(noise)
        self._pending.append(noise)
        return drawn

    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        """Return the release; on the second run, that of the first."""
        noises, self._pending = tuple(self._pending), []
        place = len(self.releases)
        self.releases.append(Release(receipt, value.clone(), released.clone(), noises))
        stds = tuple(noise.std for noise in noises)
        paid = self._find_paid(receipt.event)
        size = "a list" if any(isinstance(answer, Unseen) for answer in paid) else f"{value.numel()} numbers"
        projected = any(isinstance(answer, Noised) and answer.projections for answer in paid)
        self.log.append(Happening(f"{size} are released on receipt {receipt.sequence}", stds, projected, self._renewed))
        self._renewed = False
        if self.recorded is None or place >= len(self.recorded.releases):
            return released
        before = self.recorded.releases[place].released
        return before.clone() if before.shape == released.shape else self._lengthen(receipt, before, value, released)

    # -- details ------------------------------------------------------------------------------------------------

    def _note_charges(self) -> None:
        """Note every event that the ledger was charged since, in the log before the releases that it paid for."""
        if self.ledger is None:
            raise InvalidInput("the run has no ledger: call tape.watch(ledger) before its first release")
        if len(self.ledger) > len(self._charges):
            new = [event for sequence, event, *_ in self.ledger.history() if sequence > len(self._charges)]
            self._charges += new
            self.log += [Happening(f"{type(event).__name__} is charged", _list_numbers(event)) for event in new]
        if self._pending and len(self._charges) > self._pending[0].charged:
            self._drop_pending()

    def _drop_pending(self) -> None:
        self.findings.append(
            f"noise was drawn on receipt {self._pending[0].receipt.sequence} and nothing is known to have been "
            "released with it: add it with sordino.noise.add_noise, perturb or settle"
        )
        self._pending = []

    def close(self) -> None:
        """Note the last charges. Call it before the ledger is closed; otherwise the suite does it after the run."""
        if not self._closed and self.ledger is not None:
            self._closed = True
            self._note_charges()
            if self._pending:
                self._drop_pending()

    def _find_paid(self, event: DpEvent) -> list[Answer]:
        try:
            return answers(event)
        except InvalidInput as unknown:
            if str(unknown) not in self.findings:
                self.findings.append(str(unknown))
            return []

    def _toss(self, size: int, each: bool) -> NDArray[np.float64]:
        coins = np.full(size, ABSENT) if each and self.empty else self.source.uniform(size)
        earlier = self.recorded._coins if self.recorded else []
        if len(earlier) > len(self._coins):
            before = earlier[len(self._coins)]
            common = min(size, len(before))
            coins[:common] = before[:common]
        return coins

    def _decide(self, draw: int) -> float:
        """Toss the coin of the extra record."""
        if self.extra == "joins" or (self.extra == "joins once" and not self._joined):
            self._joined = True
            return 0.0
        self.missed.add(len(self._charges))
        return self._miss(draw)

    def _miss(self, draw: int) -> float:
        """Return a coin beyond the rate of the event that was charged last, for this draw on its receipt."""
        paid = self._find_paid(self._charges[-1]) if self._charges else []
        rates = list(dict.fromkeys(answer.rate for answer in paid)) or [1.0]
        return min(rates[min(draw, len(rates) - 1)] * (1 + BESIDE), ABSENT)

    def _lengthen(self, receipt: Receipt, before: Tensor, value: Tensor, released: Tensor) -> Tensor:
        """Lengthen a list as one record did, if its event pays for that: the new entry is nearly visible."""
        paid = [answer for answer in self._find_paid(receipt.event) if isinstance(answer, Unseen)]
        noises = self.releases[-1].noises
        if not paid or not noises or value.dim() != 1:
            return released
        common = min(len(before), len(value))
        kept = released.clone()
        kept[:common] = before[:common]
        kept[common:] = value[common:] + noises[-1].std * float(norm.isf(paid[0].delta)) * (1 - BESIDE)
        return kept


def _list_numbers(event: Any) -> tuple[float, ...]:
    """List every number of an event, however deep."""
    if isinstance(event, bool | str) or event is None:
        return ()
    if isinstance(event, int | float):
        return (float(event),)
    parts = event if isinstance(event, list | tuple) else [getattr(event, name) for name in _list_names(event)]
    return tuple(number for part in parts for number in _list_numbers(part))


def _list_names(event: Any) -> list[str]:
    fields = getattr(event, "__dataclass_fields__", None)
    return list(fields) if fields else [field.name for field in getattr(type(event), "__attrs_attrs__", ())]
