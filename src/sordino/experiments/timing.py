"""Seconds per epoch of a case, measured on a few steps: the papers' tables of speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sordino.books import write_durably
from sordino.experiments.case import Case
from sordino.experiments.methods import uncalibrated
from sordino.experiments.papers import Cell, PaperTable
from sordino.experiments.problem import model_of, problem_of
from sordino.experiments.running import losses
from sordino.experiments.settings import Settings
from sordino.experiments.tables import markdown
from sordino.private import Private

STEPS = 2


def seconds_per_epoch(case: Case, steps: int = STEPS) -> float:
    """The mean of `steps` steps after one to warm up, times the steps of an epoch. Nothing is priced."""
    problem = problem_of(case)
    records = len(problem.train[1])
    options = {key: value for key, value in case.recipe.items() if key != "epochs"}
    recipe = uncalibrated(case, {**options, "steps": steps + 1}, records).for_records(records)
    model = model_of(case, tuple(problem.train[0].shape[1:]))
    trained = (p for p in model.parameters() if p.requires_grad)
    with Private(model, recipe.optimizer.build(trained), problem.train, losses, recipe) as private:
        private.step()
        started = time.perf_counter()
        for _ in range(steps):
            private.step()
        each = (time.perf_counter() - started) / steps
    return each * math.ceil(records / recipe.batch_size)


def timed(
    table: PaperTable,
    cells: Sequence[Cell],
    known: Mapping[tuple[str, str], Settings],
    folder: Path,
    records: int | None = None,
    show: bool = False,
) -> str:
    """A line per method: the paper's seconds on its GPU beside ours on this machine's processor.

    Each cell is measured once and kept in ``<folder>/timings``; with `show` none is.
    """
    lines = []
    for cell in cells:
        case = table.case(cell, 0, "proven", known)
        case = case.shortened(records) if records else case
        path = folder / "timings" / f"{case.label}.json"
        if not path.exists() and not show:
            _measure(case, path)
        ours = f"{json.loads(path.read_text())['seconds']:.1f}" if path.exists() else ""
        lines.append([cell.dataset, cell.label, _printed(cell.printed), ours])
    return f"{table.where}\n\n{markdown(['dataset', 'method', 'paper, GPU', 'ours, this processor'], lines)}"


def _measure(case: Case, path: Path) -> None:
    row = {"seconds": seconds_per_epoch(case), "steps": STEPS, "case": case.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(row, indent=1).encode())


def _printed(seconds: float) -> str:
    if math.isinf(seconds):
        return "out of memory"
    return "not legible" if math.isnan(seconds) else f"{seconds:g}"
