"""Run: ledger, budget, noise source, folder and guarantee of one training, central or federated.

A run pays for every release of a training: `Run.charge` refuses what the budget cannot pay and records the event
durably, before the release exists (law 5). What is protected (a record or a user) and what the guarantee rests on are
data. Below the class comes what may be promised: the assumptions and conditions that follow from a recipe, and
`assemble`, which puts every guarantee together, also for readers of a ledger without its run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from dp_accounting import DpEvent

from sordino import books, checkpoint
from sordino.accounting import plans
from sordino.accounting.budget import Allowance, Prepaid, Unlimited
from sordino.accounting.events import Events
from sordino.accounting.guarantee import CONDITION, UNPROTECTED, Guarantee
from sordino.accounting.ledger import ASSUMPTION, Ledger, Receipt, refuse_files, refuse_in_trials
from sordino.accounting.pricing import Basis, require_accountant
from sordino.distributed.team import Team, mirror_ledger
from sordino.errors import CheckpointError, InvalidInput, LedgerError
from sordino.noise import Secure, Seeded, Source, require_source
from sordino.parts import Foreign
from sordino.recipe import Recipe
from sordino.vault.claims import DatasetBudget, RunClaim, require_untied

_log = logging.getLogger("sordino")

Stopped = Literal["after looking", "in advance"]
"""Why a run ended where it did: someone may have looked at what it released, or the end did not depend on it."""

SHARE = 16
"""One step is reserved for every so many taken, so a kill wastes at most a sixteenth."""
MOST_RESERVED = 64
"""Larger blocks would save little: with 64 steps in one write, the remaining cost is the rows themselves."""
UNKNOWN = (-1, -1)
"""A version that no ledger has: the rest of the budget must be priced first."""

FIXED_IN_ADVANCE = "hyperparameters were fixed in advance, not tuned on these records"
"""Choosing among runs on private data also costs privacy; a choice made by hand is not priced."""
SEARCHED = "settings were searched on these records, and epsilon includes the search"
"""For a search that was charged and says what it searched: the settings were then not fixed in advance."""
FLOATING_POINT = "Gaussian noise is sampled in floating point"
ROUNDING_IS_SMALL = "rounding in float32 moves a sum by less than 0.005 % of the clipping bound"
"""Three times what was measured; the worst case over all orders of summation is larger: docs/proofs/rounding.md."""
HELD_OUT = "the held-out records"
DUTIES = {
    "sampler": "draws records as its event says, whatever is in them",
    "norms": "never gives a norm that its event does not pay for",
    "weighing": "keeps weight x norm within the clipping bound for every record",
    "selection": "looks at records only as far as its event pays for",
    "noise": "adds noise that its event pays for to every entry of a sum, by sordino.noise",
    "clip_schedule": "reads no record",
    "noise_schedule": "reads no record",
    "source": "draws secret, independent noise of the size it is asked for",
}
"""What the proof assumes about each part of a recipe."""


class Run:
    """One training by `recipe`, as its ledger knows it; `begin` or `reopen` it before anything is charged.

    `unit` is what is protected, and `population` how many units there are if the recipe does not say. `assumptions` and
    `conditions` are written into the ledger, so that every later reader must state them; `setting` is noted at every
    opening. `ledger` is one that already holds releases about the same records; without it there is a new one in
    memory. `seed` makes the noise repeatable; `source` replaces the source of noise. Only the leader of `team` writes
    the ledger; the other processes keep a copy in memory, so that all give the same answers. `vault` is the budget of
    the dataset, shared with other runs: the whole plan is reserved there before its first event.

    Guarantees: the whole plan is in the ledger before its first event; nothing is charged that the budget cannot pay
    for, even if others charge the same ledger; every opening has fresh noise (law 10).
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        unit: str = "record",
        population: int = 1,
        assumptions: tuple[str, ...] = (),
        conditions: tuple[str, ...] = (),
        setting: str = "",
        ledger: Ledger | None = None,
        seed: int | None = None,
        source: Source | None = None,
        team: Team | None = None,
        vault: DatasetBudget | None = None,
    ) -> None:
        self.recipe, self.unit, self.team = recipe, unit, team or Team()
        self.assumptions, self.setting = assumptions, setting
        self.conditions = (*list_conditions(recipe, source), *conditions)
        self.position = 0
        self.folder: Path | None = None
        self.ledger = Ledger.in_memory(header=make_header(recipe, unit)) if ledger is None else ledger
        self.source: Source = source or Secure()
        require_source(self.source)
        self.allowance: Allowance = Unlimited()
        self._population, self._seed, self._given = population, seed, source
        self._recorded, self._announced, self._bound = UNKNOWN, False, False
        self._charged = 0
        self.claim: RunClaim | None = None
        if vault is not None:
            refuse_in_trials("vault=")
            repeatable = seed is not None or isinstance(source, Seeded)
            self.claim = vault.claim(unit=unit, basis=recipe.basis, rdp_filter=recipe.rdp_filter, repeatable=repeatable)

    # -- spending -----------------------------------------------------------------------------------------------

    def charge(self, event: DpEvent) -> Receipt:
        """Refuse what the budget cannot pay, then record the event durably; only then may noise be drawn (law 5)."""
        receipt = self.team.lead(lambda: self._charge(event))
        if not self.team.leads:
            self.ledger.charge(receipt.event)  # a copy in memory; the leader's ledger is on disk
        return receipt

    def _charge(self, event: DpEvent) -> Receipt:
        if self.recipe.rdp_filter is not None:
            event = self.recipe.rdp_filter.event(event)
        ledger = self.ledger
        if not ledger.holds(event):
            ledger.forfeit()  # the rest of another reservation counts as spent and must be priced before this event
        if ledger.version != self._recorded:  # somebody else charged the same ledger
            self._renew_allowance()
        if self.claim is not None:
            self.claim.require(ledger, event)
        self.allowance.require(event)
        receipt = ledger.charge(event, ahead=self._reserve)
        if self.claim is not None:
            self.claim.note(ledger, event)
        self._recorded, self._charged = ledger.version, self._charged + 1
        return receipt

    def _reserve(self) -> list[DpEvent]:
        """Return the next events that are worth writing together with this one, if they are known and can be paid for.

        Their number is a share of what was charged since the opening, so a kill costs at most that share more. There
        are none after a reservation was wasted, as when two runs take turns on one ledger.
        """
        if self.ledger.forfeits:
            return []
        events = self.recipe.foresee(self.position + 1, min(self._charged // SHARE, MOST_RESERVED))
        events = events[: self.allowance.covers(events)]
        return events if self.claim is None else events[: self.claim.covers(events)]

    def declare(self, kind: str, text: str) -> None:
        """Add a line to the ledger that every guarantee about it has to state."""
        self.team.lead(lambda: self.ledger.declare(kind, text))
        if not self.team.leads:
            self.ledger.declare(kind, text)

    def assume(self, lines: Iterable[str]) -> None:
        """Add an assumption that every guarantee must state: written when the ledger opens, or now if it is open."""
        new = tuple(line for line in lines if line not in self.assumptions)
        self.assumptions += new
        if self._bound:
            for line in new:
                self.declare(ASSUMPTION, line)

    def count_steps_left(self) -> int:
        """How many of the recipe's steps are still to come and can be paid for."""
        self._renew_allowance()
        return sum(count for _, count in self._plan_rest())

    def _plan_rest(self) -> Events:
        """Return the part of the recipe's plan that is still to come and can be paid for."""
        return self.allowance.left if isinstance(self.allowance, Prepaid) else self.recipe.plan(self.position)

    def _renew_allowance(self) -> None:
        """Price what is left of the budget again; until that is done, even if it is interrupted, nothing is known."""
        recipe, ledger = self.recipe, self.ledger
        recorded, self._recorded = ledger.version, UNKNOWN
        allowance: Allowance = Unlimited()
        if recipe.rdp_filter is not None:
            allowance = recipe.rdp_filter.allowance(ledger.events())
        elif recipe.budget is not None:
            room = plans.room(ledger, recipe.fingerprint(), recipe.budget, resumed=self._announced)
            allowance = Prepaid(*room, recipe.plan(self.position))
        self.allowance, self._recorded = allowance, recorded

    # -- what it costs ------------------------------------------------------------------------------------------

    def guarantee(
        self,
        delta: float | None = None,
        accountant: str | None = None,
        *,
        stopped: Stopped = "after looking",
        more: tuple[str, ...] = (),
    ) -> Guarantee:
        """Return what is promised: a pure function of the ledger; `more` are assumptions that only the caller knows.

        It is the price of the whole plan, both what is spent and what is left: if you look at a model and then stop,
        you have chosen among all the models of the plan. ``stopped="in advance"`` gives the smaller price of what was
        spent so far. It holds only if the moment of stopping did not depend on anything that the run released.
        """
        if stopped not in get_args(Stopped):
            raise InvalidInput(f"stopped={stopped!r} must be 'after looking' or 'in advance'")
        recipe, ledger, budget = self.recipe, self.ledger, self.recipe.budget
        bill = plans.bill_ledger(ledger, stopped_in_advance=stopped == "in advance")
        said = (*list_assumptions(recipe, self.source.assumption, self.unit), *self.assumptions, *more, *bill.notes)
        return assemble(
            bill,
            delta=delta or (budget.delta if budget else 0.1 / (recipe.records or self._population)),
            accountant=accountant or (budget.accountant if budget else "pld"),
            adjacency=budget.adjacency if budget else "add-or-remove-one",
            unit=self.unit,
            basis=recipe.basis,
            assumptions=(*said, *ledger.declared(ASSUMPTION)),
            unprotected=ledger.declared(UNPROTECTED),
            conditions=ledger.declared(CONDITION),
        )

    # -- opening ------------------------------------------------------------------------------------------------

    def begin(self, folder: Path | None = None) -> None:
        """Spend on the ledger from now on, durably if there is a `folder`, which must not hold a run yet."""
        if folder is not None:
            self.team.lead(self._ask_vault)
            self.keep_in(folder)
        self._bind()

    def keep_in(self, folder: Path) -> None:
        """Move the ledger from memory to `folder`, which must not hold a run yet; the run continues unchanged."""
        self.team.lead(lambda: self._move_to(folder))
        self.folder = folder

    def _move_to(self, folder: Path) -> None:
        refuse_files(folder)
        books.require_fresh(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"cannot create run directory {folder}: {error.strerror}") from error
        self._write_recipe(folder)  # first: if a kill left a ledger without it, nobody could price it
        self.ledger, self._recorded = self.ledger.copy_to(folder / books.LEDGER), UNKNOWN

    def _write_recipe(self, folder: Path) -> None:
        try:
            text = self.recipe.to_toml()
        except InvalidInput as error:  # it has a user's own parts
            _log.info("the recipe is not written to %s: %s", folder, error)
        else:
            books.write_durably(folder / books.RECIPE, text.encode())

    @contextmanager
    def reopen(self, folder: Path, checkpoints: Path | None = None) -> Iterator[dict[str, Any] | None]:
        """Continue the run in `folder`: yield its newest whole checkpoint, or None if there is none yet.

        `checkpoints` is where the checkpoints are, if that is another folder. The block restores the checkpoint's
        content; if it fails, the run is as it was. Work charged after the checkpoint is lost but stays paid for; the
        noise is fresh.
        """
        if spent := len(self.ledger):
            raise LedgerError(
                f"{spent} events were charged to another ledger before load: they would be forgotten; "
                "load right after building, without ledger= (the run's own ledger holds what came before it)"
            )
        present = self.ledger
        state = self.team.lead(lambda: self._open(folder, checkpoints or folder))
        abandoned = present
        try:
            yield state
        except BaseException:
            abandoned, self.ledger, self._recorded = self.ledger, present, UNKNOWN
            raise
        finally:
            if abandoned is not self.ledger:
                abandoned.close()
        self.folder, self.position = folder, 0 if state is None else state["position"]
        self._announced = True
        self._bind()

    def _open(self, folder: Path, checkpoints: Path) -> dict[str, Any] | None:
        ledger = books.reopen(folder)
        try:
            theirs, ours = ledger.header.get("recipe"), self.recipe.fingerprint()
            if (unit := ledger.header.get("unit", self.unit)) != self.unit:
                raise CheckpointError(
                    f"{folder} protects every {unit}, not every {self.unit}: it is another kind of run"
                )
            if theirs not in (None, ours):
                raise CheckpointError(
                    f"{folder} follows recipe {theirs}, not {ours}: load it with the recipe it was made with"
                )
            state = checkpoint.read_newest_of(checkpoints, ledger)
        except BaseException:
            ledger.close()
            raise
        self.ledger, self._recorded = ledger, UNKNOWN
        return state

    def _bind(self) -> None:
        """Open fresh noise, write what every guarantee must say, price the rest of the budget, and announce the plan.

        The plan is in the ledger before its first event, so no reader of the ledger can price less than the plan.
        """
        team, self._recorded = self.team, UNKNOWN
        self.ledger = mirror_ledger(team, self.ledger)
        self._charged = 0
        self.source = team.shared(self._make_source)
        if self.setting:
            self.declare("setting", f"opening {self.ledger.incarnation}: {team.size} processes, {self.setting}")
        for text in (self.source.assumption, *self.assumptions):
            self.declare(ASSUMPTION, text)
        team.lead(self._renew_allowance)
        for kind, text in team.lead(self._announce):
            if not team.leads:
                self.ledger.declare(kind, text)
        for text in self.conditions:
            self.declare(CONDITION, text)
        team.lead(self._reserve_in_vault)
        self._bound = True

    def _ask_vault(self) -> None:
        """Refuse a run that the dataset's budget has no room for before there is anything on disk."""
        if self.claim is not None:
            plan: Events = () if self.recipe.rdp_filter is not None else self.recipe.plan()
            self.claim.preview(plan, self.ledger.header.get("adjacency", "add-or-remove-one"))

    def _reserve_in_vault(self) -> None:
        """Reserve the plan of a run with a folder; one in memory may yet be loaded, and reserves at its first event."""
        if self.claim is None:
            require_untied(self.ledger)
        elif self.folder is not None:
            self.claim.cover(self.ledger, partly=True)

    def _make_source(self) -> Source:
        if self._given is not None:
            return self._given
        if self._seed is None:
            return Secure()
        return Seeded(self._seed, self.ledger.incarnation, len(self.ledger), self.ledger.next_stream())

    def _announce(self) -> list[tuple[str, str]]:
        """Declare the plan, unless it is in the ledger already; return what the other processes' copies need."""
        recipe, ledger = self.recipe, self.ledger
        left: Events = () if recipe.rdp_filter is not None else self._plan_rest()
        plans.announce(ledger, recipe.fingerprint(), left, budget=recipe.budget, resumed=self._announced)
        self._announced = True
        return [(kind, text) for kind in (plans.KIND, UNPROTECTED, CONDITION) for text in ledger.declared(kind)]

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any]) -> None:
        """Store `state` durably beside the ledger, as the checkpoint of the present position."""
        folder = self.folder
        assert folder is not None
        content = {**state, **checkpoint.describe_ledger(self.ledger), "position": self.position}
        self.team.lead(lambda: checkpoint.write(folder, self.position, content))

    def close(self) -> None:
        """Release the ledger; what was charged stays, and what was reserved in a vault but never drawn is returned."""
        try:
            if self.claim is not None and self.team.leads:
                self.claim.settle(self.ledger)
        finally:
            self.ledger.close()


# -- what may be promised ---------------------------------------------------------------------------------------------


def assemble(
    bill: plans.Bill,
    *,
    delta: float,
    accountant: str,
    adjacency: str,
    unit: str,
    basis: Basis,
    assumptions: Iterable[str],
    unprotected: Iterable[str],
    conditions: Iterable[str],
) -> Guarantee:
    """Return the guarantee of a `bill`: its price, a basis no better than the accountant's, and each line once."""
    said = tuple(dict.fromkeys(assumptions))
    if any(line.startswith(SEARCHED) for line in said):
        said = tuple(line for line in said if line != FIXED_IN_ADVANCE)
    return Guarantee(
        epsilon=bill.epsilon(delta, accountant, adjacency),
        delta=delta,
        basis=weaken(basis, require_accountant(accountant).basis),
        unit=unit,
        adjacency=adjacency,
        accountant=accountant,
        assumptions=said,
        unprotected=tuple(unprotected),
        conditions=tuple(conditions),
    )


def weaken(first: Basis, second: Basis) -> Basis:
    """Return the basis of a claim that rests on both: proven only if both are (law 9)."""
    return max(first, second, key=get_args(Basis).index)


def make_header(recipe: Recipe, unit: str = "record") -> dict[str, str]:
    """Return what the ledger of a run by `recipe` says about it from the start."""
    budget, basis = recipe.budget, recipe.basis
    return {
        "recipe": recipe.fingerprint(),
        "unit": unit,
        "adjacency": budget.adjacency if budget else "add-or-remove-one",
        "basis": weaken(basis, require_accountant(budget.accountant).basis) if budget else basis,
    }


def announce_together(ledger: Ledger, recipe: Recipe, before: Events) -> None:
    """Declare releases that come `before` training, such as statistics of the data, and the training as one plan.

    Call it before the first of them. Which of them are made may then depend on the others: all are priced. If a kill
    interrupts them and they are made again, what was spent stays in the plan.
    """
    name = recipe.fingerprint()
    number, earlier = plans.own(ledger, name, resumed=True)
    start = len(ledger) if earlier is None else earlier.after
    if earlier is not None:
        before = [*ledger.events(), *before]
    training = Prepaid(recipe.budget, before, recipe.plan()).left if recipe.budget else recipe.plan()
    events = tuple(before) if recipe.rdp_filter else (*before, *training)
    count, again = sum(times for _, times in before), len(ledger) - start
    plans.declare(ledger, plans.Plan(events, start, name, count, recipe.budget, replaces=number, repeated=again))


def list_assumptions(recipe: Recipe, source: str, unit: str = "record") -> list[str]:
    """Return what a guarantee by `recipe` rests on; `source` is what the source of randomness says about itself."""
    said = [source, FIXED_IN_ADVANCE, FLOATING_POINT]
    if unit == "record":  # the updates of users are added up in double precision
        said.append(ROUNDING_IS_SMALL)
    if isinstance(recipe.sampler, Foreign):
        said.extend(recipe.sampler.assumptions)
    return [*said, *recipe.selection.assumptions]


def list_conditions(recipe: Recipe, source: object) -> list[str]:
    """Return what has to be true of the parts that Sordino did not write: it is unchecked."""
    parts = {**{slot: getattr(recipe, slot) for slot in DUTIES if slot != "source"}, "source": source}
    return [
        f"your {slot.replace('_', ' ')} {type(part).__name__} {DUTIES[slot]}"
        for slot, part in parts.items()
        if part is not None and type(part).__module__.split(".")[0] != "sordino"
    ]
