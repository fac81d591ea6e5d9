"""The state that a dataset's history leads to: its budget and rules, who may draw on it, and what each run holds.

A run *holds* the events that it may draw. Reserving adds to what it holds; settling replaces that by what its ledger
says was drawn. Everything that is held counts as spent, drawn or not. So a run has nothing to report while it is in
progress, and a killed run is counted in full until its ledger is presented.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sordino.accounting.budget import Budget
from sordino.accounting.events import add_up
from sordino.errors import VaultForged
from sordino.vault import history as kinds
from sordino.vault.composing import BudgetRule
from sordino.vault.history import Entry

OPEN, SETTLED, WRITTEN_OFF = "reserved", "settled", "written off"
Counts = dict[str, int]


@dataclass(frozen=True)
class LedgerSight:
    """The state of a run's ledger when the vault last saw it: how many events, which head, in which file."""

    events: int
    head: str
    file: str

    @classmethod
    def parse(cls, said: Any) -> LedgerSight:
        return cls(int(said["events"]), str(said["head"]), str(said["file"]))


@dataclass(frozen=True)
class Holding:
    """The part of a dataset's budget that one run holds."""

    run: str
    person: str
    held: Mapping[str, int]
    seen: LedgerSight
    status: str = OPEN
    began: str = ""
    last: str = ""
    receipt: str = ""

    @property
    def events(self) -> int:
        return sum(self.held.values())


@dataclass
class DatasetState:
    """One dataset as its history leaves it; `fold` adds the next entries."""

    name: str
    rule: BudgetRule
    owner: str
    unit: str
    created: str
    number: int = 0
    chain: bytes = b""
    closed: bool = False
    granted: dict[str, float | None] = field(default_factory=dict)
    runs: dict[str, Holding] = field(default_factory=dict)
    held: Counts = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    nonces: set[str] = field(default_factory=set)

    @property
    def total(self) -> float:
        """Return the ε of everything that is spent or reserved, by the dataset's rule."""
        return self.rule.price(self.held)

    def held_by(self, *, person: str | None = None, status: tuple[str, ...] | None = None) -> Counts:
        """Return what the runs of a person, or all runs in some state, hold together."""
        found: Counts = {}
        for run in self.runs.values():
            if (person is None or run.person == person) and (status is None or run.status in status):
                found = add_up(found, run.held)
        return found

    def may_draw(self, person: str) -> bool:
        return person == self.owner or person in self.granted

    def fold(self, entries: Iterable[Entry]) -> DatasetState:
        """Add the next entries; an unreadable one is an error."""
        for entry in entries:
            try:
                self._add(entry, entry.said)
            except (KeyError, TypeError, ValueError) as error:
                raise VaultForged(
                    f"entry {entry.number} of {entry.dataset} cannot be read ({error}): restore the vault from a copy"
                ) from None
            self.number, self.chain = entry.number, entry.chain
            self.nonces.add(entry.nonce)
        return self

    def _add(self, entry: Entry, said: dict[str, Any]) -> None:
        if entry.number != self.number + 1 or entry.dataset != self.name:
            raise ValueError(f"it comes after entry {self.number} of {self.name}")
        match entry.kind:
            case kinds.RAISE:
                budget = replace(self.rule.budget, epsilon=float(said["epsilon"]))
                self.rule = replace(self.rule, budget=budget)
            case kinds.GRANT:
                cap = said["epsilon"]
                self.granted[str(said["person"])] = None if cap is None else float(cap)
            case kinds.REVOKE:
                self.granted.pop(str(said["person"]), None)
            case kinds.CLOSE:
                self.closed = True
            case kinds.RESERVE:
                self._reserve(entry, said)
            case kinds.SETTLE:  # also for an unknown run: the vault was set back to a state before it
                new = Holding(entry.run, entry.person, {}, _see(said), began=entry.at, receipt=entry.receipt)
                before = self.runs.get(entry.run, new)
                self._hold(replace(before, held=_parse(said), status=SETTLED, last=entry.at, seen=_see(said)))
            case kinds.WRITE_OFF:
                self._hold(replace(self._find(entry), status=WRITTEN_OFF, last=entry.at))
            case _:
                raise ValueError(f"kind {entry.kind!r} is unknown")

    def _reserve(self, entry: Entry, said: dict[str, Any]) -> None:
        before = self.runs.get(entry.run)
        held = add_up({} if before is None else before.held, _parse(said))
        began = entry.at if before is None else before.began
        person = entry.person if before is None else before.person
        self._hold(Holding(entry.run, person, held, _see(said), OPEN, began, entry.at, entry.receipt))
        if found := str(said.get("fingerprint", "")):
            self.fingerprints.setdefault(found.partition(" ")[0], found)

    def _find(self, entry: Entry) -> Holding:
        if entry.run not in self.runs:
            raise ValueError(f"run {entry.run} reserved nothing")
        return self.runs[entry.run]

    def _hold(self, holding: Holding) -> None:
        before = self.runs.get(holding.run)
        change = dict(holding.held)
        for text, count in (before.held if before is not None else {}).items():
            change[text] = change.get(text, 0) - count
        self.held = {text: count for text, count in add_up(self.held, change).items() if count}
        self.runs[holding.run] = holding


def start(first: Entry) -> DatasetState:
    """Return the state after the entry that created the dataset."""
    try:
        said = first.said
        if first.kind != kinds.CREATE or first.number != 1:
            raise ValueError(f"it is a {first.kind}, number {first.number}")
        budget = Budget(float(said["epsilon"]), float(said["delta"]), "pld", str(said["adjacency"]))
        order = None if said["order"] is None else float(said["order"])
        rule = BudgetRule(budget, said["composition"], order, float(said["failing"]))
        state = DatasetState(first.dataset, rule, first.person, str(said["unit"]), first.at)
    except (KeyError, TypeError, ValueError) as error:
        raise VaultForged(f"the first entry of {first.dataset} cannot be read ({error}): restore a copy") from None
    state.number, state.chain = 1, first.chain
    state.nonces.add(first.nonce)
    return state


def _parse(said: Mapping[str, Any]) -> Counts:
    """Read the events of an entry and how often each occurs."""
    found: Counts = {}
    for text, count in said["events"]:
        if not isinstance(text, str) or type(count) is not int or count < 0:
            raise ValueError(f"{count!r} is not a count")
        found[text] = found.get(text, 0) + count
    return found


def _see(said: Mapping[str, Any]) -> LedgerSight:
    return LedgerSight.parse(said["ledger"])
