"""Rerun a paper's table: its figures beside ours at the same published and the same proven ε, or in seconds."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sordino.books import write_durably
from sordino.lab.experiments.cases import ACCOUNTINGS, Case, Settings
from sordino.lab.experiments.methods import build_recipe, is_priced_alike
from sordino.lab.experiments.papers import Cell, PaperTable
from sordino.lab.experiments.problem import model_of, problem_of
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.running import compute_losses
from sordino.lab.experiments.summaries import write_markdown
from sordino.private import Private

QUICK = 3.0
"""The ε of a quick look."""
STEPS = 2


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
    """Plan every cell with its runs. `quick` keeps one seed and `quick_cells`; `records` and `steps` shorten each run.

    If the paper prices as we do, the proven runs stand for both.
    """
    cells = table.cells(datasets)
    if quick:
        cells = quick_cells(table, cells)

    def case(cell: Cell, seed: int, accounting: str) -> Case:
        made = table.case(cell, seed, accounting, known)
        return made.shortened(records, steps) if records or steps else made

    def runs(cell: Cell, accounting: str) -> list[Case]:
        shared = is_priced_alike(case(cell, 0, "published"))
        return [case(cell, seed, "proven" if shared else accounting) for seed in range(1 if quick else seeds)]

    return [Planned(cell, {kind: runs(cell, kind) for kind in ACCOUNTINGS}) for cell in cells]


def quick_cells(table: PaperTable, cells: Sequence[Cell]) -> list[Cell]:
    """Return the column nearest to ε = 3 of every row; for seconds, the rows with at most one projection: fast ones.

    Columns that are accuracies are all kept, because one run reaches them all.
    """
    if table.kind == "epsilon":
        return list(cells)
    if table.kind == "seconds":
        return [cell for cell in cells if table.variants[cell.label].get("recipe", {}).get("projections", 1) == 1]
    return [cell for cell in cells if cell.column == _find_nearest(cells, cell)]


def cases_of(planned: Sequence[Planned]) -> list[Case]:
    """All runs, each once, seed by seed."""
    every = [case for each in planned for cases in each.cases.values() for case in cases]
    unique = {case.label: case for case in every}
    return sorted(unique.values(), key=lambda case: case.seed)


def compare_side_by_side(table: PaperTable, planned: Sequence[Planned], find: Callable[[str], Row | None]) -> str:
    """Return a line per figure: the paper's, ours (seeds) at the same published ε, ours at the same proven ε."""
    column = {"accuracy": "ε", "epsilon": "accuracy"}[table.kind]
    lines = []
    for each in planned:
        cell = each.cell
        ours = {kind: _write_figure(table, cell, _find_rows(cases, find)) for kind, cases in each.cases.items()}
        printed = "not reached" if math.isinf(cell.printed) else f"{cell.printed:g}"
        lines.append([cell.dataset, cell.label, f"{cell.column:g}", printed, ours["published"], ours["proven"]])
    header = ["dataset", "method", column, "paper", "ours, published ε", "ours, proven ε"]
    return f"{table.where}\n\n{write_markdown(header, lines)}"


def _find_rows(cases: Sequence[Case], find: Callable[[str], Row | None]) -> list[Row]:
    return [row for case in cases if (row := find(case.label)) is not None]


def _write_figure(table: PaperTable, cell: Cell, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    basis = "" if rows[0]["basis"] == "proven" else f" [{rows[0]['basis']}]"
    if table.kind == "accuracy":
        return f"{_write_spread([100 * row['accuracy'] for row in rows])}{basis}"
    spent = [_spent_at(row, cell.column) for row in rows]
    return f"{'not reached' if math.inf in spent else _write_spread(spent)}{basis}"


def _spent_at(row: Row, level: float) -> float:
    """Return the ε a run had spent when it first reached an accuracy."""
    reached = (point["epsilon"] for point in row["curve"] if point["accuracy"] >= level and "epsilon" in point)
    return float(next(reached, math.inf))


def _write_spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})"


def _find_nearest(cells: Sequence[Cell], like: Cell) -> float:
    columns = [cell.column for cell in cells if (cell.dataset, cell.label) == (like.dataset, like.label)]
    return min(columns, key=lambda column: abs(column - QUICK))


def time_epoch(case: Case, steps: int = STEPS) -> float:
    """Return the mean of `steps` steps after one to warm up, times the steps of an epoch. Nothing is priced."""
    problem = problem_of(case)
    records = len(problem.train[1])
    options = {key: value for key, value in case.recipe.items() if key != "epochs"}
    recipe = build_recipe(case, {**options, "steps": steps + 1}, records).for_records(records)
    model = model_of(case, tuple(problem.train[0].shape[1:]))
    trained = (p for p in model.parameters() if p.requires_grad)
    with Private(model, recipe.optimizer.build(trained), problem.train, compute_losses, recipe) as private:
        private.step()
        started = time.perf_counter()
        for _ in range(steps):
            private.step()
        each = (time.perf_counter() - started) / steps
    return each * math.ceil(records / recipe.batch_size)


def compare_times(
    table: PaperTable,
    cells: Sequence[Cell],
    known: Mapping[tuple[str, str], Settings],
    folder: Path,
    records: int | None = None,
    show: bool = False,
) -> str:
    """Return a line per method: the paper's seconds on its GPU beside ours on this machine's processor.

    Each cell is measured once and kept in ``<folder>/timings``; with `show` none is.
    """
    lines = []
    for cell in cells:
        case = table.case(cell, 0, "proven", known)
        case = case.shortened(records) if records else case
        path = folder / "timings" / f"{case.label}.json"
        if not path.exists() and not show:
            _measure_time(case, path)
        ours = f"{json.loads(path.read_text())['seconds']:.1f}" if path.exists() else ""
        lines.append([cell.dataset, cell.label, _write_seconds(cell.printed), ours])
    return f"{table.where}\n\n{write_markdown(['dataset', 'method', 'paper, GPU', 'ours, this processor'], lines)}"


def _measure_time(case: Case, path: Path) -> None:
    row = {"seconds": time_epoch(case), "steps": STEPS, "case": case.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(row, indent=1).encode())


def _write_seconds(seconds: float) -> str:
    if math.isinf(seconds):
        return "out of memory"
    return "not legible" if math.isnan(seconds) else f"{seconds:g}"
