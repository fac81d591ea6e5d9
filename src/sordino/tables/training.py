"""From a table to a trained model: `sordino train` and the scikit-learn estimators both call `train_table`.

It describes what is public about the columns (`describe_header`), splits dates into parts, chooses whole units to train
on or to hold out, and refuses what contradicts public knowledge or makes no sense. Nothing is spent until then. The
last step is `learn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from sordino.accounting import Budget, Ledger
from sordino.books import reopen
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.tables.dates import expand
from sordino.tables.encoding import spell_label
from sordino.tables.learning import UNLISTED_SHARE, Learned, LearningPlan, follow, learn, plan_learning, require_task
from sordino.tables.predicting import Trained, save_model, use
from sordino.tables.preparing import Reserving
from sordino.tables.reading import HELD_OUT_SHARE, Sheet, choose_by_digest, split_table
from sordino.tables.release import SHARED_UNLISTED
from sordino.tables.schema import Schema, Skip, describe_header
from sordino.tables.surveying import require_classes_in_sight
from sordino.tables.table import Cells, Table, find_missing, parse_values
from sordino.vault.claims import DatasetBudget

PER_UNIT = 3
"""The most records of one unit that are used, unless the user gives another number."""

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Wishes:
    """What a user wants from training on a table; all of it is public.

    `epsilon` may be spent at `delta` (by default at most a tenth of one over the records). `held_out` is the share of
    records to measure on; `metrics_epsilon` of ε releases the figures with noise, so that they are protected too.
    `unit` names the column that says whom the guarantee protects; at most `per_unit` records of each are used.
    """

    target: str
    epsilon: float
    delta: float | None = None
    task: str | None = None
    schema: Schema = field(default_factory=Schema)
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    held_out: float = HELD_OUT_SHARE
    metrics_epsilon: float | None = None
    unit: str | None = None
    per_unit: int | None = None
    accountant: str = "pld"
    adjacency: str = "add-or-remove-one"
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Ready:
    """A table that can be learnt from: its parts, what is public about it, and the budget."""

    wishes: Wishes
    sheet: Sheet
    schema: Schema
    budget: Budget
    header: tuple[str, ...]
    rows_per_unit: int = 1

    @property
    def unit(self) -> str:
        """Whom the guarantee protects."""
        return "record" if self.wishes.unit is None else f"{self.wishes.unit} (at most {self.rows_per_unit} records)"


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained model, and how it was trained."""

    ready: Ready
    learned: Learned
    trained: Trained


def prepare_table(table: Table, wishes: Wishes) -> Ready:
    """Do everything before the first release: refuse what makes no sense, and spend nothing."""
    target = table.require_column(wishes.target)
    if not len(table):
        raise InvalidInput(f"{table.name} has 0 records: nothing can be learnt from it")
    schema = wishes.schema
    if unknown := next((name for name in schema.columns if name not in table.columns), None):
        raise InvalidInput(f"the schema has a column {unknown!r}, the data has not: {table.suggest(unknown)}")
    if wishes.task == "regression" and schema.classes is not None:
        raise InvalidInput("classes and task=regression contradict each other: give one of them")
    if wishes.metrics_epsilon is not None and not wishes.held_out:
        raise InvalidInput(
            f"metrics-epsilon={wishes.metrics_epsilon} has nothing to measure on: hold records out, or leave it out"
        )
    rows = 1
    if wishes.unit is not None:
        table.require_column(wishes.unit)
        if wishes.unit == target:
            raise InvalidInput(f"unit={wishes.unit!r} is the target: the unit is whose records these are")
        schema = schema.with_columns({wishes.unit: Skip("it says whose record it is")})
        rows = PER_UNIT if wishes.per_unit is None else wishes.per_unit
        if rows < 1:
            raise InvalidInput(f"per-unit={rows} must be >= 1: so many records of one {wishes.unit} are used at most")
    elif wishes.per_unit is not None:
        raise InvalidInput(f"per-unit={wishes.per_unit} needs --unit COLUMN: whose records are counted?")
    described = describe_header(schema, list(table.columns), target, wishes.bounds)
    expanded, described = expand(table, described)
    sheet = _split(expanded, wishes, rows)
    if not len(sheet.train):
        raise InvalidInput(f"{table.name} has 0 records to train on: hold out fewer")
    sheet.check(described, wishes.task)
    count = len(sheet.train)
    budget = Budget(wishes.epsilon, choose_delta(wishes.delta, count), wishes.accountant, wishes.adjacency)
    return Ready(wishes, sheet, described, budget, tuple(table.columns), rows)


def train_table(
    ready: Ready,
    folder: Path | None = None,
    tell: Callable[[int, int], None] = lambda done, steps: None,
    *,
    resumed: bool = False,
    vault: DatasetBudget | None = None,
) -> Fitted:
    """Learn within the budget; a `folder` keeps the ledger and the model. `vault` is the dataset's own budget.

    A run that was killed in its `folder` is `resumed`: it learns again with what the budget has left after what it
    spent, and is refused if that is too little.
    """
    wishes, sheet = ready.wishes, ready.sheet
    ledger = reopen(folder) if resumed and folder is not None else None
    budget = ready.budget if ledger is None else Reserving.beside(ready.budget, ledger.events())
    if ledger is not None and len(ledger) and not ready.budget.allows([(e, 2 * n) for e, n in ledger.events()]):
        spent = len(ledger)
        ledger.close()
        raise BudgetExhausted(
            f"{folder} spent {spent} releases, and epsilon={ready.budget.epsilon:g} leaves too little beside them to "
            "learn again: start a new run; what was spent adds to what it costs"
        )
    try:
        learned = learn(
            sheet.train,
            sheet.target,
            budget,
            task=wishes.task,
            schema=ready.schema,
            bounds=wishes.target_bounds,
            held_out=sheet.held_out if wishes.held_out else None,
            metrics_epsilon=wishes.metrics_epsilon,
            rows_per_unit=ready.rows_per_unit,
            unit=ready.unit,
            folder=folder if ledger is None else None,
            ledger=ledger,
            resumed=resumed,
            seed=wishes.seed,
            tell=tell,
            vault=vault,
        )
    finally:
        if ledger is not None:
            ledger.close()
    if folder is not None:
        save_model(folder, learned, ready.header)
    return Fitted(ready, learned, use(learned, ready.header))


def choose_delta(delta: float | None, records: int) -> float:
    """Return the δ asked for, which must be below 1 / records; or a power of ten, at most a tenth of 1 / records."""
    if delta is None:
        return min(1e-5, 10.0 ** math.floor(math.log10(0.1 / records) + 1e-9))
    if delta >= 1 / records:
        raise InvalidInput(
            f"delta={delta:g} must be < 1/records = {1 / records:g}: a larger one could publish whole records"
        )
    return delta


def _split(table: Table, wishes: Wishes, rows: int) -> Sheet:
    """Split into training and held-out records; with units, whole units, and no more than `rows` of each."""
    if wishes.unit is None:
        return split_table(table, wishes.target, wishes.held_out)
    owners = name_owners(table, wishes.unit)
    chosen = keep_few(owners, rows)
    kept, owners = table.select(chosen), owners.take(owners.codes[chosen])
    parts = choose_by_digest(wishes.held_out, len(owners.values), (value.encode() for value in owners.list_values()))
    return Sheet.split(kept, wishes.target, owners.spread(parts))


def name_owners(table: Table, unit: str) -> Cells:
    """Return each record's owner, each name in one spelling; refuse a record without one, as nothing would bound it."""
    owners = Cells.of(table.columns[unit])
    if find_missing(owners).any():
        raise InvalidInput(
            f"{table.name} has records without a {unit}: give every record an owner, or leave those out, for nobody "
            "can say how many of them one owner has"
        )
    return owners.change([spell_label(value) for value in owners.list_values()])


def keep_few(owners: Cells, rows: int) -> NDArray[np.bool_]:
    """Keep the first `rows` records of every owner.

    What is kept of one owner depends on that owner's records alone, so neighbours stay neighbours.
    """
    order = np.argsort(owners.codes, kind="stable")
    sorted_codes = owners.codes[order]
    starts = np.flatnonzero(np.r_[True, sorted_codes[1:] != sorted_codes[:-1]]) if len(order) else np.zeros(0, int)
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    kept = np.zeros(len(order), np.bool_)
    kept[order] = place < rows
    return kept


def plan_table(ready: Ready, *, shared: bool = False) -> LearningPlan:
    """Plan how the budget will be spent; refuse what would be lost in the noise. Others may have `shared` in δ."""
    wishes, sheet = ready.wishes, ready.sheet
    task = require_task(sheet.train, sheet.target, wishes.task, ready.schema)
    columns = {name: column for name, column in ready.schema.columns.items() if name != sheet.target}
    plan = plan_learning(
        columns,
        sheet.target,
        task,
        ready.budget,
        len(sheet.train),
        classes=ready.schema.classes if task == "classification" else None,
        bounds=wishes.target_bounds,
        metrics_epsilon=wishes.metrics_epsilon if wishes.held_out else None,
        rows_per_unit=ready.rows_per_unit,
        unlisted=SHARED_UNLISTED if shared else UNLISTED_SHARE,
    )
    require_classes_in_sight(sheet.train, plan.survey)
    return plan


def build_program(ready: Ready, plan: LearningPlan | None = None) -> Callable[[Table, Any], Any]:
    """Make the learning of `ready` a program for `sordino.audit.conformance.replay`: from records to releases."""
    plan = plan or plan_table(ready)

    def program(records: Table, tape: Any) -> Any:
        ledger = Ledger.in_memory()
        tape.watch(ledger)
        found = follow(records, plan, None, ledger, tape, ready.unit)
        assert isinstance(found.model, nn.Linear)
        return repr(found.encoder.to_plain()), found.model.weight.tolist(), found.model.bias.tolist()

    return program


def choose_records(table: Table, count: int = 4) -> list[int]:
    """Choose some records over the whole table whose values all occur elsewhere: replays can compare only those."""
    alone = np.zeros(len(table), np.bool_)
    for cells in map(Cells.of, table.columns.values()):
        if np.isnan(parse_values(cells.values)).any() and len(cells.values) <= len(table) // 2:
            alone |= cells.spread(cells.count_values() == 1)
    usual = np.flatnonzero(~alone)
    return (
        sorted({int(usual[place]) for place in np.linspace(0, len(usual) - 1, count).astype(int)}) if len(usual) else []
    )
