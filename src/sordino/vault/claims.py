"""A run's claim on a dataset's budget: everything that its ledger may come to hold is reserved before the first event.

The plan of a run is in its ledger before anything is charged. The claim reserves everything in the ledger's plans, or
what was charged if that is more. For a run that chooses its noise as it goes, it reserves everything that the filter
allows. From then on the run draws without asking the vault, and nothing passes that is not reserved.

The reservation and the ledger refer to each other. A line with a random number is added to the ledger first; the vault
keeps where the ledger's chain stood after it. So a copy of the run's folder, or an older state of it, is noticed when
someone tries to continue it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sordino.accounting import plans
from sordino.accounting.chain import find_key
from sordino.accounting.events import DpEvent, Events, count_alike, from_json, to_json
from sordino.accounting.filtered import Filter, Filtered
from sordino.accounting.ledger import Ledger, Receipt
from sordino.errors import BudgetExhausted, InvalidInput, LedgerError, SordinoError, VaultError, VaultForged
from sordino.vault.composing import is_whole_filter, whole_filter
from sordino.vault.history import Entry
from sordino.vault.state import Counts, Holding, LedgerSight
from sordino.vault.vault import Ask, Vault

_log = logging.getLogger("sordino")

KIND = "vault"
"""The kind of line in a ledger that ties it to a dataset's budget."""


@dataclass(frozen=True)
class DatasetBudget:
    """The budget of one dataset in a vault: pass it to `Private` as `vault`.

    `digest` identifies the records; it is kept, keyed, only if a key is set. Digests are compared only with those of
    the same `form`: a table has a different one from the tensors made from it.
    """

    vault: Vault
    name: str
    digest: Callable[[], str] | None = None
    form: str = "records"

    def over(self, digest: Callable[[], str], form: str = "records") -> DatasetBudget:
        """Return the same budget for these records."""
        return replace(self, digest=digest, form=form)

    def claim(
        self,
        *,
        unit: str = "record",
        basis: str = "proven",
        rdp_filter: Filter | None = None,
        repeatable: bool = False,
    ) -> RunClaim:
        """Make the claim of one run, which reserves nothing yet; refuse a run whose noise is `repeatable`."""
        if repeatable:
            raise InvalidInput(
                f"seed: noise that can be repeated protects no one, and is not part of what dataset {self.name!r} "
                "promises; leave the seed out"
            )
        if basis != "proven":
            raise InvalidInput(
                f"basis={basis!r}: a dataset's budget accepts only proven prices; calibrate with the accountant pld"
            )
        return RunClaim(self, unit, rdp_filter)

    def reserve(self, ledger: Ledger, *, unit: str = "record") -> BookedEvents:
        """Wrap `ledger` for releases that no plan names: each event is reserved before it is charged."""
        return BookedEvents(self.claim(unit=unit), ledger)

    def fingerprint(self) -> str:
        """Return a keyed digest of the records; empty without a key, because anyone could then test for records."""
        key = find_key()
        if key is None or self.digest is None or not (found := self.digest()):
            return ""
        text = f"dataset\n{self.name}\n{self.form}\n{found}"
        return f"{self.form} {key.sign(hashlib.sha256(text.encode()).digest()).hex()}"


class RunClaim:
    """What one run may draw from a dataset's budget."""

    def __init__(self, budget: DatasetBudget, unit: str, rdp_filter: Filter | None) -> None:
        self.budget, self._unit, self._filter = budget, unit, rdp_filter
        self._held: Counts = {}
        self._drawn: Counts = {}
        self._covered: Ledger | None = None
        self._version: tuple[int, int] | None = None

    def preview(self, plan: Events, adjacency: str = "add-or-remove-one") -> None:
        """Raise what `cover` would for a new ledger with this plan; nothing is reserved."""
        vault, kept = self.budget.vault, self._filter
        if kept is not None:
            plan = [*plan, (whole_filter(kept.order, kept.limit, kept.adjacency), 1)]
        try:
            vault.require_room(self.budget.name, count_alike(plan), _name_unit(self._unit), adjacency)
        finally:
            vault.store.release()

    def cover(self, ledger: Ledger, *, partly: bool = False) -> None:
        """Reserve what this ledger may still come to hold; raises `BudgetExhausted` before anything is released.

        With `partly`, a resumed run that is refused more keeps what it holds and ends with that: it must ask `require`
        before each release.
        """
        said = read_ties(ledger)
        name = self.budget.name
        if said and said[-1]["dataset"] != name:
            raise LedgerError(f"ledger {ledger.path} draws on dataset {said[-1]['dataset']!r}, not on {name!r}")
        vault, fingerprint = self.budget.vault, self.budget.fingerprint()
        if receipts := [line["receipt"] for line in said if "receipt" in line]:
            vault.require_receipt(name, str(receipts[-1]), f"ledger {ledger.path}")
        ask = self._ask(ledger, {}, lambda before: self._list_missing(ledger, before), fingerprint)
        known = fingerprint and vault.state(name).fingerprints.get(self.budget.form)
        if known and not hmac.compare_digest(known, fingerprint):
            _log.warning(
                "these records are not those that dataset %r was first used with: is it the right budget?", name
            )
        try:
            held, entry = vault.reserve(name, ask)
            self._tie(ledger, entry)
        except BudgetExhausted:
            before = vault.state(name).runs.get(ledger.run_id)
            if not partly or before is None or not len(ledger):
                raise
            held, entry = vault.reserve(name, self._ask(ledger, {}, lambda _: {}))
            _log.warning("dataset %r has no more for this run than it holds: it ends with that", name)
        finally:
            vault.store.release()
        self._held, self._covered = dict(held.held), ledger
        self._recount(ledger)

    def _ask(
        self, ledger: Ledger, more: dict[str, Any], need: Callable[[Holding | None], Counts], fingerprint: str = ""
    ) -> Ask:
        """Return what the ledger says about itself, after adding a line to it that no copy has."""
        line = {"dataset": self.budget.name, "nonce": uuid.uuid4().hex, **more}
        ledger.declare(KIND, json.dumps(line, sort_keys=True))
        head = ledger.head()
        seen = LedgerSight(head.events, head.chain.hex(), ledger.file)
        unit = _name_unit(ledger.header.get("unit", self._unit))
        adjacency = ledger.header.get("adjacency", "add-or-remove-one")

        def passed(before: LedgerSight) -> bool:
            return ledger.passed(before.events, before.head)

        return Ask(ledger.run_id, need, seen, passed, unit, adjacency, fingerprint)

    def _tie(self, ledger: Ledger, entry: Entry) -> None:
        """Write the receipt into the ledger, with the state of the dataset's budget, for the run's report."""
        state = self.budget.vault.state(self.budget.name)
        rule = state.rule
        line = {
            "dataset": state.name,
            "receipt": entry.receipt,
            "epsilon": state.total,
            "budget": rule.budget.epsilon,
            "delta": rule.budget.delta,
            "composition": rule.composition,
            "at": entry.at,
        }
        ledger.declare(KIND, json.dumps(line, sort_keys=True))

    def _list_missing(self, ledger: Ledger, before: Holding | None) -> Counts:
        """List what the ledger may come to hold beyond what is held for it."""
        held = {} if before is None else before.held
        wanted = foresee(ledger)
        missing = {text: count - held.get(text, 0) for text, count in wanted.items() if count > held.get(text, 0)}
        if self._filter is None:
            return missing
        missing = {text: count for text, count in missing.items() if not isinstance(from_json(text), Filtered)}
        filtered = [run for run in ledger.events() if isinstance(run[0], Filtered)]
        left = self._filter.allowance(filtered).left if before is not None else self._filter.limit
        whole = [event for text in held if isinstance(event := from_json(text), Filtered) and is_whole_filter(event)]
        if not any(event.order == self._filter.order and event.limit >= left for event in whole):
            missing[to_json(whole_filter(self._filter.order, left, self._filter.adjacency))] = 1
        return missing

    # -- before each release ------------------------------------------------------------------------------------

    def require(self, ledger: Ledger, event: DpEvent) -> None:
        """Return if `event` is reserved, else raise `BudgetExhausted`; the first call reserves the whole plan."""
        if self._covered is not ledger:
            self._follow(ledger)
        if ledger.version != self._version:
            self._recount(ledger)
        text = to_json(event)
        if not self._has(event, text) and not self._look_again(event, text, ledger):
            raise BudgetExhausted(
                f"all that is reserved for this run of dataset {self.budget.name!r} is drawn: training ends here with "
                "the model as it is"
            )

    def note(self, ledger: Ledger, event: DpEvent) -> None:
        """Note that `event` was charged."""
        text = to_json(event)
        self._drawn[text] = self._drawn.get(text, 0) + 1
        self._version = ledger.version

    def covers(self, events: Sequence[DpEvent]) -> int:
        """Count how many of `events`, in order, are reserved in addition to those drawn and the one being drawn."""
        left = {text: count - self._drawn.get(text, 0) for text, count in self._held.items()}
        for number, event in enumerate(events):
            text = to_json(event)
            if left.get(text, 0) < 2:  # one is for the event that is being charged now
                return number
            left[text] -= 1
        return len(events)

    def _has(self, event: DpEvent, text: str) -> bool:
        if isinstance(event, Filtered):
            return any(is_whole_filter(from_json(held)) for held in self._held)
        return self._drawn.get(text, 0) < self._held.get(text, 0)

    def _follow(self, ledger: Ledger) -> None:
        """Follow another ledger: that of the same run, moved to a file, or a new one that must be covered."""
        if self._covered is not None and self._covered.run_id == ledger.run_id:
            self._covered = ledger
            self._recount(ledger)
        else:
            self.cover(ledger, partly=True)

    def _look_again(self, event: DpEvent, text: str, ledger: Ledger) -> bool:
        """Look again, because another run on the same ledger may have reserved more meanwhile."""
        held = self.budget.vault.state(self.budget.name).runs.get(ledger.run_id)
        self.budget.vault.store.release()
        self._held = {} if held is None else dict(held.held)
        return self._has(event, text)

    def _recount(self, ledger: Ledger) -> None:
        self._drawn, self._version = count_alike(ledger.events()), ledger.version

    # -- releases that nobody planned ---------------------------------------------------------------------------

    def add(self, ledger: Ledger, event: DpEvent) -> None:
        """Reserve one event beyond what the ledger holds; raises `BudgetExhausted` before anything is released."""
        if self._covered is not ledger:
            self.cover(ledger)
        text = to_json(event)
        drawn = count_alike(ledger.events()).get(text, 0)

        def need(before: Holding | None) -> Counts:
            held = 0 if before is None else before.held.get(text, 0)
            return {text: drawn + 1 - held}

        try:
            held, entry = self.budget.vault.reserve(self.budget.name, self._ask(ledger, {}, need))
            self._tie(ledger, entry)
        finally:
            self.budget.vault.store.release()
        self._held = dict(held.held)

    # -- at the end ---------------------------------------------------------------------------------------------

    def settle(self, ledger: Ledger) -> None:
        """Present the ledger and return what was never drawn; if that fails, it stays counted, with a warning."""
        if self._covered is None or self._covered.run_id != ledger.run_id:
            return
        try:
            settle(self.budget, ledger, self._unit)
        except VaultForged as error:
            _log.error(
                "the vault has lost what this run reserved of dataset %r, and counts too little until `sordino budget "
                "settle` shows it this run's ledger: %s",
                *(self.budget.name, error),
            )
        except SordinoError as error:
            _log.warning(
                "what this run reserved of dataset %r stays counted until `sordino budget settle`: %s",
                self.budget.name,
                error,
            )
        finally:
            self._held, self._covered = {}, None


class BookedEvents:
    """A ledger that reserves every event in the vault before charging it: for your own statistics.

    ::

        with budget.reserve(ledger) as book:
            norm = private_normalisation(features, ..., ledger=book, source=Secure())

    Afterwards you can pass the ledger to a training on the same records, `Private(..., ledger=ledger, vault=budget)`.
    """

    def __init__(self, claim: RunClaim, ledger: Ledger) -> None:
        self._claim, self._ledger = claim, ledger

    def charge(self, event: DpEvent, note: str = "") -> Receipt:
        """Reserve the event, then record it durably; only then may noise be drawn."""
        self._claim.add(self._ledger, event)
        return self._ledger.charge(event, note)

    def __enter__(self) -> BookedEvents:
        return self

    def __exit__(self, *error: object) -> None:
        self._claim.settle(self._ledger)


def settle(budget: DatasetBudget, ledger: Ledger, unit: str = "record") -> Holding:
    """Present a ledger to the vault: its events were drawn, and the rest of its run's reservation is returned.

    The ledger must be open for writing, so that no one draws on it meanwhile. If the vault was set back to an earlier
    state and does not know the run, from now on it counts everything that the run drew.
    """
    claim = RunClaim(budget, unit, None)
    if not any(line["dataset"] == budget.name for line in read_ties(ledger)):
        raise VaultError(f"ledger {ledger.path} has reserved nothing of dataset {budget.name!r}")
    try:
        drawn = count_alike(ledger.events())
        held, _ = budget.vault.settle(budget.name, claim._ask(ledger, {"settled": True}, lambda _: drawn))
        return held
    finally:
        budget.vault.store.release()


def foresee(ledger: Ledger) -> Counts:
    """List everything that a ledger holds or has planned: events before its first plan, the plans, and any excess.

    Events that are reserved in the ledger itself, without a receipt, are in its plan.
    """
    planned = plans.declared(ledger)
    before = count_alike(plans.list_unplanned(ledger, planned))
    spent, wanted = count_alike(ledger.events()), count_alike([run for plan in planned for run in plan.events])
    found: Counts = {}
    for text in dict.fromkeys((*spent, *wanted)):
        early = before.get(text, 0)
        found[text] = early + max(wanted.get(text, 0), spent.get(text, 0) - early)
    return found


def _name_unit(unit: str) -> str:
    """Name what is protected, without the number of its records that some ledgers add in brackets."""
    return unit.partition(" (")[0]


def read_ties(ledger: Ledger) -> list[dict[str, Any]]:
    """Read what a ledger says about the dataset's budget that it draws on, in order."""
    found = []
    for line in ledger.declared(KIND):
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("dataset"), str):
            raise LedgerError(f"ledger {ledger.path} has an unreadable line about a vault: other version?")
        found.append(said)
    return found


def require_untied(ledger: Ledger) -> None:
    """Refuse to spend on a ledger that draws on a dataset's budget without giving that budget."""
    if said := read_ties(ledger):
        raise LedgerError(
            f"ledger {ledger.path} draws on the budget of dataset {said[-1]['dataset']!r}: give that vault to go on "
            "with it (vault=, or SORDINO_VAULT)"
        )
