"""What a federated run has spent, where that is kept, and what may be promised to its users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dp_accounting import DpEvent

from sordino import books, checkpoint
from sordino.accounting import plans, pricing
from sordino.accounting.budget import Allowance, Prepaid, Unlimited, affordable
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger, Receipt
from sordino.books import LEDGER as LEDGER
from sordino.claims import CONDITION, FIXED_IN_ADVANCE, UNPROTECTED, conditions_of, weaker
from sordino.errors import CheckpointError, InvalidInput, LedgerError
from sordino.noise import Secure, Seeded, Source
from sordino.recipe import Recipe

ASSUMPTIONS = (
    FIXED_IN_ADVANCE,
    "Gaussian noise is sampled in floating point",
    "the server is trusted: it sees every update before noise is added",
    "one user is one node, and the SuperLink lets a node answer for itself alone",
    "who is connected, who is asked and how long a round takes stay with the server",
)


class Account:
    """The ledger of a run whose unit is a user, what is left of its budget, its source of noise, and its folder."""

    ledger: Ledger
    source: Source
    _allowance: Allowance | None

    def __init__(self, recipe: Recipe, seed: int | None = None, source: Source | None = None) -> None:
        self.recipe = recipe
        self.position = 0
        self.run: Path | None = None
        self._seed, self._given, self._resumed = seed, source, False
        self._accountant = recipe.budget.accountant if recipe.budget else "pld"
        self._adjacency = recipe.budget.adjacency if recipe.budget else "add-or-remove-one"
        header = {"recipe": recipe.fingerprint(), "unit": "user", "adjacency": self._adjacency}
        self._bind(Ledger.in_memory(header={**header, "basis": self._basis(self._accountant)}))

    def charge(self, event: DpEvent) -> Receipt:
        """Refuse what the budget cannot pay, then record the event durably; only then may noise be drawn (law 5)."""
        if self._allowance is None:
            self._allowance = self._left()
            left = self._allowance.left if isinstance(self._allowance, Prepaid) else self.recipe.plan(self.position)
            resumed, budget = self._resumed, self.recipe.budget
            plans.announce(self.ledger, self.recipe.fingerprint(), left, budget=budget, resumed=resumed)
            self._resumed = True  # from now on the ledger holds its plan, also when it moves to a folder
        self._allowance.require(event)
        return self.ledger.charge(event)

    def rounds_left(self) -> int:
        """How many of the recipe's rounds are still to come and can be paid."""
        plan, budget = self.recipe.plan(self.position), self.recipe.budget
        if budget is None:
            return sum(count for _, count in plan)
        return affordable(budget, self.ledger.events(), plan)

    def guarantee(self, delta: float | None = None, accountant: str | None = None) -> Guarantee:
        """What every user is promised, by the whole plan of the run: a pure function of the ledger."""
        budget, accountant = self.recipe.budget, accountant or self._accountant
        delta = delta or (budget.delta if budget else 0.1 / (self.recipe.records or 1))
        bill = plans.bill(self.ledger.events(), plans.declared(self.ledger))
        return Guarantee(
            epsilon=bill.epsilon(delta, accountant, self._adjacency),
            delta=delta,
            basis=self._basis(accountant),
            unit="user",
            adjacency=self._adjacency,
            accountant=accountant,
            assumptions=tuple(
                dict.fromkeys((self.source.assumption, *ASSUMPTIONS, *self.ledger.declared("assumption"), *bill.notes))
            ),
            unprotected=tuple(self.ledger.declared(UNPROTECTED)),
            conditions=tuple(self.ledger.declared(CONDITION)),
        )

    def _basis(self, accountant: str) -> pricing.Basis:
        return weaker(self.recipe.basis, pricing.require_accountant(accountant).basis)

    # -- keeping ------------------------------------------------------------------------------------------------

    def keep_in(self, run: Path) -> None:
        """Move the ledger to a folder of its own, where every event is on disk before it is paid out."""
        books.require_fresh(run)
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"cannot create run directory {run}: {error.strerror}") from error
        self.run = run
        self._bind(self.ledger.copy_to(run / LEDGER))

    def save(self, state: dict[str, Any]) -> None:
        """Store `state` durably beside the ledger, if the run has a folder."""
        if self.run is not None:
            own = {**checkpoint.standing(self.ledger), "position": self.position}
            checkpoint.write(self.run, self.position, {**state, **own})

    def load(self, run: Path) -> dict[str, Any] | None:
        """Go on with a run: its ledger in full and its newest whole checkpoint, None where there is none yet."""
        if spent := len(self.ledger):
            raise LedgerError(f"{spent} events were charged before load: they would be forgotten; load right away")
        ledger = books.reopen(run)
        try:
            state = self._checked(run, ledger)
        except CheckpointError:
            ledger.close()
            raise
        self.ledger.close()
        self.run, self.position = run, 0 if state is None else state["position"]
        self._bind(ledger)
        self._resumed = True
        return state

    def _checked(self, run: Path, ledger: Ledger) -> dict[str, Any] | None:
        theirs, ours = ledger.header.get("recipe"), self.recipe.fingerprint()
        if theirs != ours:
            raise CheckpointError(f"{run} follows recipe {theirs}, not {ours}: load it with the recipe it was made by")
        return checkpoint.read_newest_of(run, ledger)

    def _bind(self, ledger: Ledger) -> None:
        """Spend on this ledger from now on, with fresh noise (law 10) and what is left of the budget."""
        self.ledger = ledger
        self.source = self._given or (Secure() if self._seed is None else self._seeded(self._seed))
        for line in (self.source.assumption, *ASSUMPTIONS):
            ledger.declare("assumption", line)
        for line in conditions_of(self.recipe, self._given):
            ledger.declare(CONDITION, line)
        self._allowance = None  # priced when it is first needed

    def _seeded(self, seed: int) -> Source:
        return Seeded(seed, self.ledger.incarnation, len(self.ledger), self.ledger.next_stream())

    def _left(self) -> Allowance:
        budget = self.recipe.budget
        if budget is None:
            return Unlimited()
        return Prepaid(budget, self.ledger.events(), self.recipe.plan(self.position))

    def close(self) -> None:
        """Free the ledger; what was charged stays."""
        self.ledger.close()
