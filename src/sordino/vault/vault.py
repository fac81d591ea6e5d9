"""The vault: budgets of datasets, and the reservations of all runs on them, by anyone and anywhere.

Every change is one entry, decided and written in one transaction in which no one else changes the same dataset. So two
clients who race for the last ε are served one after the other. A client that loses its connection checks whether its
entry, which has its own number, was written, and writes it if not. So nothing is counted twice or lost.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sordino.accounting.budget import Budget
from sordino.accounting.events import add_up
from sordino.errors import BudgetExhausted, InvalidInput, LedgerForked, VaultError, VaultForged
from sordino.figures import round_up
from sordino.vault import history as kinds
from sordino.vault.composing import BudgetRule
from sordino.vault.history import Draft, Entry, parse_receipt, require_name, root
from sordino.vault.reviewing import check_entry, check_links
from sordino.vault.state import WRITTEN_OFF, Counts, DatasetState, Holding, LedgerSight, start
from sordino.vault.storing import ConnectionLost, Store, Transaction

T = TypeVar("T")

PAUSES = (0.1, 0.5, 2.0)
"""How many seconds to wait before another attempt if the store went away."""


@dataclass(frozen=True)
class Ask:
    """What a run wants: to hold what `need` says, given what it holds already.

    `seen` is the present state of its ledger, and `passed` tells whether the ledger once was in an earlier state.
    """

    run: str
    need: Callable[[Holding | None], Counts]
    seen: LedgerSight
    passed: Callable[[LedgerSight], bool]
    unit: str = "record"
    adjacency: str = "add-or-remove-one"
    fingerprint: str = ""


class Vault:
    """Open one with `sordino.vault.open_vault`.

    Guarantees: what all runs on a dataset hold together stays within its budget by the dataset's rule, however many
    clients reserve at once; a reservation that returned is on disk; history is never changed.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, DatasetState] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Vault, (self.store,)  # a copy, or another process, opens it again

    # -- what the owner does ------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        budget: Budget,
        *,
        unit: str = "record",
        composition: str = "adaptive",
        order: float | None = None,
    ) -> DatasetState:
        """Create a budget for a new dataset, owned by its creator. Its δ, unit, adjacency and rule never change."""
        require_name(name, "dataset")
        if budget.accountant != "pld":
            raise InvalidInput(f"accountant={budget.accountant!r}: a dataset's budget is kept by its composition alone")
        rule = BudgetRule.choose(budget, composition, order)
        said = {
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
            "unit": require_name(unit, "unit"),
            "composition": rule.composition,
            "order": rule.order,
            "limit": rule.limit,
            "failing": rule.failing,
        }

        def decide(state: DatasetState | None) -> Draft:
            if state is not None:
                raise InvalidInput(f"dataset {name!r} has a budget already, of {state.owner}: choose another name")
            return Draft.write(name, kinds.CREATE, said)

        self._append(name, decide)
        return self.state(name)

    def raise_to(self, name: str, epsilon: float) -> DatasetState:
        """Give the dataset a larger ε; δ, unit and rule stay. The smaller ε promised before no longer holds."""

        def decide(state: DatasetState) -> Draft:
            if not epsilon > state.rule.budget.epsilon:
                raise InvalidInput(f"epsilon={epsilon:g} must be above the present {state.rule.budget.epsilon:g}")
            rule = replace(state.rule, budget=replace(state.rule.budget, epsilon=epsilon))
            return Draft.write(name, kinds.RAISE, {"epsilon": rule.budget.epsilon, "limit": rule.limit})

        return self._as_owner(name, decide)

    def grant(self, name: str, person: str, epsilon: float | None = None) -> DatasetState:
        """Let a person reserve; with `epsilon`, their runs together, without others', may cost at most so much."""
        require_name(person, "person")
        if epsilon is not None:
            Budget(epsilon, 0.5)  # refuses a number that is no ε
        said = {"person": person, "epsilon": epsilon}
        return self._as_owner(name, lambda _: Draft.write(name, kinds.GRANT, said))

    def revoke(self, name: str, person: str) -> DatasetState:
        """Stop a person from reserving more; what they hold stays theirs."""

        def decide(state: DatasetState) -> Draft:
            if person not in state.granted:
                raise InvalidInput(f"{person!r} was not granted anything of {name!r}: nothing to revoke")
            return Draft.write(name, kinds.REVOKE, {"person": person})

        return self._as_owner(name, decide)

    def close(self, name: str) -> DatasetState:
        """Allow no more reservations, permanently; runs that hold something may finish."""
        return self._as_owner(name, lambda _: Draft.write(name, kinds.CLOSE, {}))

    def write_off(self, name: str, run: str) -> DatasetState:
        """Count everything that a run holds as spent, permanently: its ledger is lost, or no one trusts it."""

        def decide(state: DatasetState) -> Draft:
            found = _find_run(state, run)
            return Draft.write(name, kinds.WRITE_OFF, {}, run=found.run)

        return self._as_owner(name, decide)

    def _as_owner(self, name: str, decide: Callable[[DatasetState], Draft]) -> DatasetState:
        def checked(state: DatasetState | None) -> Draft:
            state = _require_state(state, name)
            if self.store.person != state.owner:
                raise VaultError(f"dataset {name!r} is {state.owner}'s: {self.store.person} may not change its budget")
            return decide(state)

        self._append(name, checked)
        return self.state(name)

    # -- what a run does ----------------------------------------------------------------------------------------

    def reserve(self, name: str, ask: Ask) -> tuple[Holding, Entry]:
        """Let a run hold what it needs, or raise `BudgetExhausted` and change nothing.

        A known run is recognised by its ledger. A ledger that does not continue from where the vault last saw it, or
        that is in another file, is a copy, and two copies could spend the same reservation twice.
        """

        def decide(state: DatasetState | None) -> Draft:
            state = _require_state(state, name)
            before = state.runs.get(ask.run)
            self._require_granted(state)
            _require_same_unit(state, ask.unit, ask.adjacency)
            self._require_own(state, ask, before)
            more = {text: count for text, count in ask.need(before).items() if count > 0}
            state.rule.require_priced(more)
            if more:
                self._require_room(state, more)
            said: dict[str, Any] = {"events": sorted(more.items()), "ledger": vars(ask.seen)}
            if ask.fingerprint:
                said["fingerprint"] = ask.fingerprint
            if failing := state.rule.add_failures(more):
                said["failing"] = failing
            return Draft.write(name, kinds.RESERVE, said, run=ask.run, cost=state.rule.cost(more))

        entry = self._append(name, decide)
        return self.state(name).runs[ask.run], entry

    def _require_granted(self, state: DatasetState) -> None:
        if not state.may_draw(person := self.store.person):
            raise VaultError(f"{person} may not draw on dataset {state.name!r}: ask {state.owner} for `budget grant`")

    def _require_own(self, state: DatasetState, ask: Ask, before: Holding | None) -> None:
        if before is not None:
            _require_same_ledger(before, ask)
            if before.person != self.store.person:
                raise VaultError(f"run {ask.run} is {before.person}'s: only they may continue it")
            if before.status == WRITTEN_OFF:
                raise BudgetExhausted(f"run {ask.run} was written off by {state.owner}: start a new one")

    def require_room(self, name: str, more: Counts, unit: str, adjacency: str) -> None:
        """Raise what `reserve` would, as far as that is known without a ledger; asking changes nothing."""
        state = self.state(name)
        self._require_granted(state)
        _require_same_unit(state, unit, adjacency)
        state.rule.require_priced(more)
        self._require_room(state, more)

    def _require_room(self, state: DatasetState, more: Counts) -> None:
        rule, person, name = state.rule, self.store.person, state.name
        if state.closed:
            raise BudgetExhausted(f"the budget of dataset {name!r} is closed: nothing more may be reserved")
        if not rule.allows_failures(add_up(state.held, more)):
            raise BudgetExhausted(
                f"dataset {name!r} sets delta={rule.failing:g} aside for values that are named by release, and with "
                "this run more would be used: nothing was released; give --schema and --classes, or a smaller delta"
            )
        if not rule.allows(add_up(state.held, more)):
            total, now = rule.price(add_up(state.held, more)), state.total
            raise BudgetExhausted(
                f"dataset {name!r} has epsilon={rule.budget.epsilon:g} at delta={rule.budget.delta:g}, of which "
                f"{round_up(now)} is spent or reserved; with this run it would be {round_up(total)}: nothing was "
                f"released; calibrate a smaller run, or ask {state.owner}"
            )
        cap = state.granted.get(person)
        if cap is not None and (alone := rule.price_alone(add_up(state.held_by(person=person), more))) > cap:
            raise BudgetExhausted(
                f"{person} may spend epsilon={cap:g} of dataset {name!r}; with this run it would be {round_up(alone)}: "
                f"nothing was released; calibrate a smaller run, or ask {state.owner}"
            )

    def settle(self, name: str, ask: Ask) -> tuple[Holding, Entry]:
        """Replace what a run holds by what its ledger says was drawn, which `ask.need` gives; the rest is returned.

        If more was drawn than reserved, it is counted too, whatever the budget. So is a whole run that the vault does
        not know because the vault was set back to an earlier state: anyone who may reserve can present its ledger.
        """

        def decide(state: DatasetState | None) -> Draft:
            state = _require_state(state, name)
            before = state.runs.get(ask.run)
            held: Counts = {} if before is None else dict(before.held)
            if before is None:
                self._require_granted(state)
                _require_same_unit(state, ask.unit, ask.adjacency)
            else:
                if self.store.person not in (before.person, state.owner):
                    raise VaultError(f"run {ask.run} is {before.person}'s: they or {state.owner} may settle it")
                if before.status == WRITTEN_OFF:
                    raise VaultError(f"run {ask.run} was written off by {state.owner}: it stays counted whole")
                _require_same_ledger(before, ask)
            drawn = ask.need(before)
            said: dict[str, Any] = {"events": sorted(drawn.items()), "ledger": vars(ask.seen)}
            change = state.rule.cost(drawn) - state.rule.cost(held)
            if failing := state.rule.add_failures(drawn) - state.rule.add_failures(held):
                said["failing"] = failing
            return Draft.write(name, kinds.SETTLE, said, run=ask.run, cost=change)

        entry = self._append(name, decide)
        return self.state(name).runs[ask.run], entry

    # -- reading ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the datasets that this person may see."""

        def ask() -> list[str]:
            with self.store.reading() as transaction:
                return transaction.datasets()

        return _insist(ask)

    def state(self, name: str) -> DatasetState:
        """Return the present state of a dataset."""

        def ask() -> DatasetState:
            with self.store.reading() as transaction:
                return _require_state(self._read(transaction, name), name)

        return _insist(ask)

    def history(self, name: str) -> list[Entry]:
        """Everything that happened to a dataset's budget, in order."""
        self.state(name)  # refuses an unknown name

        def ask() -> list[Entry]:
            with self.store.reading() as transaction:
                return transaction.entries(name)

        return _insist(ask)

    def _read(self, transaction: Transaction, name: str) -> DatasetState | None:
        """Read the state from what is known and the entries since, and check every link."""
        known = self._known.pop(name, None)  # if anything fails, it is read again from the start
        if known is None:
            found = transaction.entries(name)
            if not found:
                return None
            check_links(found, root(name))
            known = start(found[0])
        else:
            found = transaction.entries(name, known.number)
            if not found or found[0].chain != known.chain:
                raise VaultForged(f"vault {self.store.place} lost entries of {name!r}, or went another way: restore it")
            check_links(found[1:], known.chain)
        self._known[name] = known.fold(found[1:])
        return self._known[name]

    def _append(self, name: str, decide: Callable[[DatasetState | None], Draft]) -> Entry:
        """Write one entry exactly once, by its nonce, however often the connection breaks."""
        nonce = uuid.uuid4().hex

        def write() -> Entry:
            with self.store.writing(name) as transaction:
                state = self._read(transaction, name)
                if state is not None and nonce in state.nonces:
                    return next(entry for entry in transaction.entries(name) if entry.nonce == nonce)
                return transaction.append(replace(decide(state), nonce=nonce))

        return _insist(write)

    # -- trust --------------------------------------------------------------------------------------------------

    def verify(self, name: str, receipts: Mapping[str, str] | None = None) -> str:
        """Check the whole history again; return what was checked, or raise `VaultForged`.

        It checks the chain, the signatures, that each reservation cost what it says and fitted when it was made, and
        that every receipt in `receipts`, by its keeper, belongs to this history.
        """
        entries = self.history(name)
        check_links(entries, root(name))
        signed = {self.store.check(entry.chain, entry.signature) for entry in entries}
        if False in signed:
            raise VaultForged(f"dataset {name!r} has entries without the right signature: restore the vault")
        if loss := self.store.find_loss():
            raise VaultForged(f"vault {self.store.place} lost entries: {loss}; restore it from a copy")
        state = start(entries[0])
        for entry in entries[1:]:
            check_entry(state, entry)
            state.fold([entry])
        for keeper, text in (receipts or {}).items():
            self.require_receipt(name, text, keeper)
        words = "every signature is right" if signed == {True} else "signatures not checked: there is no key here"
        kept = f", {len(receipts)} receipts are in it" if receipts else ""
        return f"{len(entries):,} entries; the chain is whole, {words}, every price was computed again{kept}"

    def require_receipt(self, name: str, text: str, keeper: str) -> None:
        """Refuse a receipt that does not belong to this dataset: forged, from another vault, or for lost entries."""
        dataset, number, chain, signature = parse_receipt(text)
        if dataset != name:
            raise InvalidInput(f"{keeper} holds a receipt of dataset {dataset!r}, not of {name!r}")
        found = [entry for entry in self.history(name) if entry.number == number]
        if not found or found[0].chain != chain:
            raise VaultForged(
                f"{keeper} holds receipt {number} of {name!r}, which {self.store.place} does not: it is of another "
                "vault, or this one was set back to an earlier state"
            )
        if found[0].signature != signature or self.store.check(chain, signature) is False:
            raise VaultForged(f"{keeper} holds a receipt of {name!r} that the vault did not sign")


def _insist(action: Callable[[], T]) -> T:
    """Do something, and again after a while if the store went away; it must be safe to do twice."""
    for pause in (*PAUSES, None):
        try:
            return action()
        except ConnectionLost as error:
            if pause is None:
                raise VaultError(
                    f"{error}: nothing was released; a reservation that was made stays counted until its run is settled"
                ) from error
            time.sleep(pause)
    raise AssertionError


def _require_state(state: DatasetState | None, name: str) -> DatasetState:
    if state is None:
        raise VaultError(f"there is no budget for dataset {name!r} that you may see: `sordino budget create` makes one")
    return state


def _find_run(state: DatasetState, run: str) -> Holding:
    """Find the run by its name, or by the beginning of it."""
    found = [holding for holding in state.runs.values() if holding.run.startswith(run)] if run else []
    if len(found) != 1:
        words = "is not a run" if not found else "could be several runs"
        raise VaultError(f"{run!r} {words} on dataset {state.name!r}: `sordino budget show {state.name}` lists them")
    return found[0]


def _require_same_unit(state: DatasetState, unit: str, adjacency: str) -> None:
    if (unit, adjacency) != (state.unit, state.rule.budget.adjacency):
        raise InvalidInput(
            f"the run protects every {unit} under {adjacency}, the budget of {state.name!r} every {state.unit} "
            f"under {state.rule.budget.adjacency}: they cannot be added up"
        )


def _require_same_ledger(before: Holding, ask: Ask) -> None:
    if before.seen.file not in ("-", ask.seen.file):
        raise LedgerForked(
            f"the ledger of run {ask.run} is a copy: what its original drew is unknown; start a new run, and have the "
            f"owner write this one off"
        )
    if not ask.passed(before.seen):
        raise LedgerForked(
            f"the ledger of run {ask.run} does not continue from where the vault last saw it: it was copied or set "
            "back, and another copy has continued; start a new run"
        )
