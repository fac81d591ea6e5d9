"""Plans: the releases that a run announces, declared in the ledger before its first event; and what they cost.

**Stopping.** If a run follows a plan fixed in advance and someone stops it after looking at what it released, the
result is a function of the whole plan: the plan's ε holds. The ε of what was spent so far holds only if the moment of
stopping depended on nothing that was released (docs/proofs/stopping.md). So a ledger is priced as what was spent
together with what is left of its plans.

**Several runs.** Plans that were all declared before the first event are one plan, priced as one composition. A plan
declared after events were charged may have been chosen because of them: it opens a new *stage*. Each stage is priced
separately, the i-th at δ/2^i, and the ε add up: Σᵢ εᵢ(δ/2^i) holds however later stages were chosen
(docs/proofs/composition-over-runs.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sordino.accounting import pricing
from sordino.accounting.budget import Budget
from sordino.accounting.events import DpEvent, Events, add_up, count_alike, from_json, spell_out, to_json, unroll
from sordino.accounting.filtered import NAME as FILTER
from sordino.accounting.filtered import Filtered
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError

KIND = "plan"
NOTHING = 1e-12
"""The ε of a stage for which no budget is left: it pays for no release."""

STOPPED = (
    "epsilon is that of the whole plan, of which {done} of {planned} events are spent: "
    "it holds even if the run stops here because of what was seen"
)
IN_ADVANCE = "epsilon is that of the events spent so far: the moment of stopping depended on nothing that was released"
UNPLANNED = "nobody stopped or lengthened this run after looking at what it released: its ledger holds no plan"
BEYOND = (
    "{count} events were charged beyond the first plan, as for work repeated after an interruption: "
    "when that happened depended on nothing that had been released"
)
STAGES = "{stages} stages, each planned after the releases of the one before: epsilon adds up, delta is split"


@dataclass(frozen=True)
class Plan:
    """The events of a run in order of first appearance, and how many events the ledger held when it was declared.

    `recipe` is the fingerprint of the recipe. The first `before` events are releases that come before training. A plan
    that `replaces` an earlier one, by its number, holds `repeated` more events: a run that was interrupted went on.
    A run under a filter has no events here: its price is the filter's, at every moment.
    """

    events: tuple[tuple[DpEvent, int], ...]
    after: int = 0
    recipe: str = ""
    before: int = 0
    budget: Budget | None = None
    replaces: int = 0
    repeated: int = 0

    def to_json(self, number: int) -> str:
        """Return the text to declare; `number` tells equal plans apart."""
        budget = None if self.budget is None else vars(self.budget)
        plain = {
            "number": number,
            "after": self.after,
            "before": self.before,
            "recipe": self.recipe,
            "replaces": self.replaces,
            "repeated": self.repeated,
            "budget": budget,
            "events": [[to_json(event), count] for event, count in self.events],
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=64)
def parse_plan(text: str) -> Plan:
    """Read what `Plan.to_json` wrote."""
    try:
        plain: dict[str, Any] = json.loads(text)
        budget = None if plain["budget"] is None else Budget(**plain["budget"])
        events = tuple((from_json(event), _require_count(count)) for event, count in plain["events"])
        after, before, replaces, repeated = (
            _require_count(plain[name]) for name in ("after", "before", "replaces", "repeated")
        )
        return Plan(events, after, str(plain["recipe"]), before, budget, replaces, repeated)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"the ledger declares an unreadable plan {text[:60]!r} ({error}): other version?") from None


def _require_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def declared(ledger: Ledger) -> list[Plan]:
    """Return the plans of a ledger that no later plan replaces, in the order in which they were declared."""
    return list(_find_in_force(ledger).values())


def _find_in_force(ledger: Ledger) -> dict[int, Plan]:
    """Return the same plans by their numbers."""
    plans = {number: parse_plan(text) for number, text in enumerate(ledger.declared(KIND), 1)}
    replaced = {plan.replaces for plan in plans.values()}
    return {number: plan for number, plan in plans.items() if number not in replaced}


def declare(ledger: Ledger, plan: Plan) -> None:
    """Announce `plan` durably, before any of its events is charged."""
    ledger.declare(KIND, plan.to_json(len(ledger.declared(KIND)) + 1))


def announce(ledger: Ledger, recipe: str, left: Events, *, budget: Budget | None = None, resumed: bool = False) -> None:
    """Declare what the run of `recipe` will release from now on, unless one of its plans already does.

    A run that continues after an interruption may have to repeat work that was paid for. A new plan then replaces the
    old one: what is spent together with what is left. `resumed` says that the ledger is the run's own, with or without
    a plan.
    """
    number, plan = own(ledger, recipe, resumed)
    if plan is not None:
        total, planned = add_up(_count_spent(ledger, plan), count_alike(left)), count_alike(plan.events)
        more = sum(max(0, count - planned.get(text, 0)) for text, count in total.items())
        if more:
            plan = replace(plan, events=spell_out(total), budget=budget, repeated=plan.repeated + more)
        elif resumed:
            return
        declare(ledger, replace(plan, before=0, replaces=number))  # it no longer waits, and holds no second run
    elif resumed and _is_own(ledger, recipe):  # in version 0.1, which declared no plans
        everything = add_up(count_alike(ledger.events()), count_alike(left))
        declare(ledger, Plan(spell_out(everything), 0, recipe, budget=budget))
    else:
        declare(ledger, Plan(spell_out(count_alike(left)), len(ledger), recipe, budget=budget))


def _is_own(ledger: Ledger, recipe: str) -> bool:
    """Whether the ledger is the run's own from its first event on; a ledger handed to it holds other releases first."""
    return ledger.header.get("recipe") == recipe


def _count_spent(ledger: Ledger, plan: Plan) -> dict[str, int]:
    """Count what was charged since `plan` was declared and belongs to no other plan.

    Earlier charges do not count: they would move into the plan's stage, which may have been chosen because of them.
    """
    unfiltered = [run for run in ledger.events() if not isinstance(run[0], Filtered)]  # a filter prices its own
    charged = count_alike(unfiltered)
    history = ledger.history() if plan.after else ()
    before = count_alike([(event, 1) for sequence, event in history if sequence <= plan.after])
    others = count_alike([run for other in declared(ledger) if other is not plan for run in other.events])
    spent = {}
    for text, count in charged.items():
        foreseen = max(0, others.get(text, 0) - before.get(text, 0))
        spent[text] = max(0, count - before.get(text, 0) - foreseen)
    return spent


def own(ledger: Ledger, recipe: str, resumed: bool) -> tuple[int, Plan | None]:
    """Return the plan of the run of `recipe` and its number: one that waits for training to begin, or a resumed one."""
    own = [(number, plan) for number, plan in _find_in_force(ledger).items() if plan.recipe == recipe]
    waiting = [(number, plan) for number, plan in own if 0 < plan.before >= len(ledger) - plan.after]
    found = own if resumed else waiting
    return found[-1] if found else (0, None)


def room(ledger: Ledger, recipe: str, budget: Budget, *, resumed: bool = False) -> tuple[Budget, Events]:
    """Return what `budget` leaves for the stage of the run of `recipe`, and what that stage has spent already.

    A single stage has the whole budget. Otherwise the ε of the other stages is subtracted, and δ is this stage's share.
    So a run never spends more than the budget, at the price that its guarantee states.
    """
    plan = own(ledger, recipe, resumed)[1]
    after = plan.after if plan is not None else 0 if resumed and _is_own(ledger, recipe) else len(ledger)
    others = [other for other in declared(ledger) if other is not plan]
    foreseen = count_alike([run for other in others for run in other.events])
    rest = {text: count - foreseen.get(text, 0) for text, count in count_alike(ledger.events()).items()}
    rest = {text: count for text, count in rest.items() if count > 0}
    mine = rest if after == 0 else {}
    if after > 0 and plan is not None:
        mine = _keep_spent(count_alike(plan.events), _count_spent(ledger, plan))
    stages: dict[int, dict[str, int]] = {after: mine}
    for other in others:
        stages[other.after] = add_up(stages.get(other.after, {}), count_alike(other.events))
    if min(stages) > 0:
        stages[0] = {text: count - mine.get(text, 0) for text, count in rest.items() if count > mine.get(text, 0)}
    order = [start for start in sorted(stages) if stages[start] or start == after]
    if len(order) == 1:
        return budget, spell_out(stages[after])
    taken = math.fsum(
        _price_stage(spell_out(stages[start]), budget.delta / 2**i, budget.accountant, budget.adjacency)
        for i, start in enumerate(order, 1)
        if start != after
    )
    share = budget.delta / 2 ** (order.index(after) + 1)
    return replace(budget, epsilon=max(budget.epsilon - taken, NOTHING), delta=share), spell_out(stages[after])


# -- what a ledger is worth -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bill:
    """What must be priced: the stages, and what must be said about them."""

    stages: tuple[tuple[tuple[DpEvent, int], ...], ...]
    beyond: int = 0
    budget: Budget | None = None
    notes: tuple[str, ...] = ()

    def epsilon(self, delta: float, accountant: str = "pld", adjacency: str = "add-or-remove-one") -> float:
        """Return Σᵢ εᵢ(δ/2^i) over the stages; for a single stage ε(δ).

        If more was charged than planned under a budget, how much more may have depended on releases. Then everything
        that the budget would have let pass is priced, which is the budget itself: whoever prices it, and at every δ.
        (At a δ below the budget's this is a floor, and the note of what was assumed remains.)
        """
        if len(self.stages) <= 1:
            price = pricing.epsilon(next(iter(self.stages), ()), delta, accountant, adjacency)
        else:
            parts = [_price_stage(stage, delta / 2**i, accountant, adjacency) for i, stage in enumerate(self.stages, 1)]
            price = math.fsum(parts)
        if self.beyond and self.budget is not None:
            price = max(price, self.budget.epsilon)
        return price

    @property
    def events(self) -> list[tuple[DpEvent, int]]:
        """All stages together."""
        return [run for stage in self.stages for run in stage]


def _price_stage(events: Events, delta: float, accountant: str, adjacency: str) -> float:
    """Return the price of one of several stages."""
    filtered = any(isinstance(event, Filtered) for event, _ in events)
    if accountant == FILTER and not filtered:
        accountant = "pld"  # an earlier stage without a filter, beside one with a filter
    return pricing.epsilon(events, delta, accountant, adjacency)


def bill_ledger(ledger: Ledger, *, stopped_in_advance: bool = False) -> Bill:
    """Return the bill of a ledger under the plans that it declares."""
    planned = declared(ledger)
    unplanned = list_unplanned(ledger, planned)
    return bill(ledger.events(), planned, unplanned, stopped_in_advance=stopped_in_advance)


def list_unplanned(ledger: Ledger, plans: Sequence[Plan]) -> Events:
    """List what was charged before the first of these plans was declared."""
    first = min((plan.after for plan in plans), default=0)
    return [(event, 1) for sequence, event in ledger.history() if sequence <= first] if first else []


def bill(spent: Events, plans: Sequence[Plan], unplanned: Events, *, stopped_in_advance: bool = False) -> Bill:
    """Return the bill of `spent` under these plans; `stopped_in_advance` leaves out the rest of the last stage.

    The `unplanned` part of `spent` came before the first plan: it is a separate stage, whatever it looks like. An
    earlier stage is always priced in full: when it ended, and what came next, was decided after looking at it.
    """
    if not spent:
        return Bill(())
    if not plans:
        return Bill((tuple(spent),), notes=(UNPLANNED,))
    stages, planned = _sort_stages(plans), count_alike([run for plan in plans for run in plan.events])
    earlier = count_alike([run for run in unplanned if not isinstance(run[0], Filtered)])  # a filter prices its own
    done = {text: count - earlier.get(text, 0) for text, count in count_alike(spent).items()}
    beyond = {text: count - planned.get(text, 0) for text, count in done.items() if count > planned.get(text, 0)}
    beyond = {text: count for text, count in beyond.items() if any(unroll(from_json(text)))}  # what costs something
    filtered = any(isinstance(event, Filtered) for event, _ in spent)
    if stopped_in_advance:
        whole = count_alike([run for stage in stages[:-1] for run in spell_out(stage)])
        stages[-1] = _keep_spent(stages[-1], {text: count - whole.get(text, 0) for text, count in done.items()})
    prices_itself = {text for text in beyond if isinstance(from_json(text), Filtered)} if unplanned else set()
    stages[-1] = add_up(stages[-1], {text: beyond.pop(text) for text in prices_itself})
    stages = [earlier, *stages] if earlier else stages
    stages[0] = add_up(stages[0], beyond)
    extra = sum(beyond.values())
    extra = 0 if filtered else extra + sum(plan.repeated for plan in plans)
    notes = list(_write_notes(done, planned, filtered, stopped_in_advance))
    if extra:
        notes.append(BEYOND.format(count=f"{extra:,}"))
    # The last stage keeps its share of δ even if its events fit into places that an earlier one left.
    shared = stopped_in_advance and len(stages) > 1
    kept = tuple(spell_out(stage) for stage in stages if stage or (shared and stage is stages[-1]))
    if len(kept) > 1:
        notes.append(STAGES.format(stages=len(kept)))
    budgets = [plan.budget for plan in plans if plan.budget is not None]
    return Bill(kept, extra, max(budgets, key=lambda budget: budget.epsilon, default=None), tuple(notes))


def _write_notes(done: dict[str, int], planned: dict[str, int], filtered: bool, in_advance: bool) -> list[str]:
    """Say what must be said about a run that has not reached the end of its plan."""
    covered = sum(min(count, done.get(text, 0)) for text, count in planned.items())
    total = sum(planned.values())
    if filtered or covered == total:
        return []
    return [IN_ADVANCE] if in_advance else [STOPPED.format(done=f"{covered:,}", planned=f"{total:,}")]


def _sort_stages(plans: Sequence[Plan]) -> list[dict[str, int]]:
    """Group plans into stages: plans with no charge between their declarations are one stage."""
    stages: dict[int, dict[str, int]] = {}
    for plan in sorted(plans, key=lambda plan: plan.after):
        stages[plan.after] = add_up(stages.get(plan.after, {}), count_alike(plan.events))
    return list(stages.values())


def _keep_spent(stage: dict[str, int], done: dict[str, int]) -> dict[str, int]:
    """Return the part of a stage that may be spent already."""
    part = {text: min(count, done.get(text, 0)) for text, count in stage.items()}
    return {text: count for text, count in part.items() if count > 0}
