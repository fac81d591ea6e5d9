"""A dataset's budget in figures: what is spent, reserved and left, by run and by person; everything in it is public."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sordino.figures import to_plain
from sordino.vault import history as kinds
from sordino.vault.composing import LOOKED
from sordino.vault.history import Entry
from sordino.vault.state import OPEN, SETTLED, WRITTEN_OFF, DatasetState

SPENT = (SETTLED, WRITTEN_OFF)
ADAPTIVE = (
    "it holds however each run was chosen after looking at the others: one Renyi filter over the dataset, "
    "its order fixed when the budget was made"
)


@dataclass(frozen=True)
class Share:
    """What one run, or one person, holds; `epsilon` is its price alone, and such prices add up to no total."""

    name: str
    person: str
    status: str
    events: int
    epsilon: float
    part: float
    began: str = ""
    last: str = ""


@dataclass(frozen=True)
class BudgetSummary:
    """Where a dataset's budget stands.

    `total` is the ε of all events of all runs, reserved ones included, by the dataset's composition; `planned` is the
    same as one privacy loss distribution, which holds if no one looked; `part` and `part_spent` are the shares of the
    whole that are used, between 0 and 1.
    """

    name: str
    owner: str
    unit: str
    adjacency: str
    budget: float
    delta: float
    composition: str
    order: float | None
    closed: bool
    created: str
    total: float
    spent: float
    planned: float
    part: float
    part_spent: float
    events: int
    granted: dict[str, float | None]
    people: tuple[Share, ...]
    runs: tuple[Share, ...]

    @property
    def left(self) -> float:
        """The part of the whole that may still be reserved."""
        return 0.0 if self.closed else max(0.0, 1.0 - self.part)

    @property
    def basis(self) -> str:
        """The assumption of the total, as a sentence."""
        return ADAPTIVE if self.composition == "adaptive" else f"it holds if {LOOKED}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self)
        plain |= {"planned": to_plain(self.planned), "left": self.left, "basis": self.basis}
        for rows in ("people", "runs"):
            plain[rows] = [{**row, "epsilon": to_plain(row["epsilon"])} for row in plain[rows]]
        return plain


def sum_up(state: DatasetState, *, brief: bool = False) -> BudgetSummary:
    """Sum up a dataset in figures; a `brief` summary leaves out the prices of single runs and people."""
    rule, spent = state.rule, state.held_by(status=SPENT)
    runs, people = [], []
    for run in [] if brief else state.runs.values():
        price, part = rule.price_alone(run.held), rule.measure(run.held)
        runs.append(Share(run.run, run.person, run.status, run.events, price, part, run.began, run.last))
    for person in [] if brief else dict.fromkeys(run.person for run in state.runs.values()):
        held = state.held_by(person=person)
        open_runs = any(run.status == OPEN for run in state.runs.values() if run.person == person)
        price, part = rule.price_alone(held), rule.measure(held)
        people.append(Share(person, person, OPEN if open_runs else SETTLED, sum(held.values()), price, part))
    return BudgetSummary(
        name=state.name,
        owner=state.owner,
        unit=state.unit,
        adjacency=rule.budget.adjacency,
        budget=rule.budget.epsilon,
        delta=rule.budget.delta,
        composition=rule.composition,
        order=rule.order,
        closed=state.closed,
        created=state.created,
        total=state.total,
        spent=rule.price(spent),
        planned=math.nan if brief else rule.price_if_planned(state.held),
        part=rule.measure(state.held),
        part_spent=rule.measure(spent),
        events=sum(state.held.values()),
        granted=dict(state.granted),
        people=tuple(people),
        runs=tuple(runs),
    )


def describe_entry(entry: Entry) -> str:
    """Describe one line of the history in words."""
    said, run = entry.said, entry.run[:8]
    match entry.kind:
        case kinds.CREATE:
            return f"made the budget: epsilon={said['epsilon']:g} at delta={said['delta']:g}, {said['composition']}"
        case kinds.RAISE:
            return f"raised the budget to epsilon={said['epsilon']:g}"
        case kinds.GRANT:
            cap = "" if said["epsilon"] is None else f" at most epsilon={said['epsilon']:g}"
            return f"let {said['person']} reserve{cap}"
        case kinds.REVOKE:
            return f"let {said['person']} reserve no more"
        case kinds.RESERVE:
            count = sum(times for _, times in said["events"])
            return f"run {run} reserved {count:,} events" if count else f"run {run} went on with what it holds"
        case kinds.SETTLE:
            return f"run {run} settled: {sum(times for _, times in said['events']):,} events were drawn"
        case kinds.WRITE_OFF:
            return f"wrote run {run} off as spent"
    return "closed the budget"
