"""Rerun a paper's table: its figures beside ours at the same published ε and at the same proven ε."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sordino.experiments.case import ACCOUNTINGS, Case
from sordino.experiments.methods import priced_alike
from sordino.experiments.papers import Cell, PaperTable
from sordino.experiments.settings import Settings
from sordino.experiments.store import Row
from sordino.experiments.tables import markdown

QUICK = 3.0
"""The ε of a quick look."""


@dataclass(frozen=True)
class Planned:
    """A figure of a table and the runs that stand for it, by accounting."""

    cell: Cell
    cases: Mapping[str, Sequence[Case]]


def plan(
    table: PaperTable,
    datasets: Sequence[str],
    known: dict[tuple[str, str], Settings],
    *,
    seeds: int = 3,
    quick: bool = False,
    records: int | None = None,
    steps: int | None = None,
) -> list[Planned]:
    """Every cell with its runs; `quick` keeps one seed and `quick_cells`, `records` and `steps` shorten each run.

    Where the paper prices as we do, the proven runs stand for both.
    """
    cells = table.cells(datasets)
    if quick:
        cells = quick_cells(table, cells)

    def case(cell: Cell, seed: int, accounting: str) -> Case:
        made = table.case(cell, seed, accounting, known)
        return made.shortened(records, steps) if records or steps else made

    def runs(cell: Cell, accounting: str) -> list[Case]:
        shared = priced_alike(case(cell, 0, "published"))
        return [case(cell, seed, "proven" if shared else accounting) for seed in range(1 if quick else seeds)]

    return [Planned(cell, {kind: runs(cell, kind) for kind in ACCOUNTINGS}) for cell in cells]


def quick_cells(table: PaperTable, cells: Sequence[Cell]) -> list[Cell]:
    """Of every row the column nearest to ε = 3; of seconds, the rows with at most one projection, which are soon known.

    Where columns are accuracies all are kept: one run reaches them all.
    """
    if table.kind == "epsilon":
        return list(cells)
    if table.kind == "seconds":
        return [cell for cell in cells if table.variants[cell.label].get("recipe", {}).get("projections", 1) == 1]
    return [cell for cell in cells if cell.column == _nearest(cells, cell)]


def cases_of(planned: Sequence[Planned]) -> list[Case]:
    """All runs, each once, seed by seed."""
    every = [case for each in planned for cases in each.cases.values() for case in cases]
    unique = {case.label: case for case in every}
    return sorted(unique.values(), key=lambda case: case.seed)


def side_by_side(table: PaperTable, planned: Sequence[Planned], find: Callable[[str], Row | None]) -> str:
    """A line per figure: the paper's, ours (seeds) at the same published ε, ours at the same proven ε."""
    column = {"accuracy": "ε", "epsilon": "accuracy"}[table.kind]
    lines = []
    for each in planned:
        cell = each.cell
        ours = {kind: _figure(table, cell, _found(cases, find)) for kind, cases in each.cases.items()}
        printed = "not reached" if math.isinf(cell.printed) else f"{cell.printed:g}"
        lines.append([cell.dataset, cell.label, f"{cell.column:g}", printed, ours["published"], ours["proven"]])
    header = ["dataset", "method", column, "paper", "ours, published ε", "ours, proven ε"]
    return f"{table.where}\n\n{markdown(header, lines)}"


def _found(cases: Sequence[Case], find: Callable[[str], Row | None]) -> list[Row]:
    return [row for case in cases if (row := find(case.label)) is not None]


def _figure(table: PaperTable, cell: Cell, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    basis = "" if rows[0]["basis"] == "proven" else f" [{rows[0]['basis']}]"
    if table.kind == "accuracy":
        return f"{_spread([100 * row['accuracy'] for row in rows])}{basis}"
    spent = [_spent_at(row, cell.column) for row in rows]
    return f"{'not reached' if math.inf in spent else _spread(spent)}{basis}"


def _spent_at(row: Row, level: float) -> float:
    """The ε a run had spent when it first reached an accuracy."""
    reached = (point["epsilon"] for point in row["curve"] if point["accuracy"] >= level and "epsilon" in point)
    return float(next(reached, math.inf))


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})"


def _nearest(cells: Sequence[Cell], like: Cell) -> float:
    columns = [cell.column for cell in cells if (cell.dataset, cell.label) == (like.dataset, like.label)]
    return min(columns, key=lambda column: abs(column - QUICK))
