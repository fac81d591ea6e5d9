"""Seconds per epoch of a case, measured on a few steps: the papers' tables of speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sordino.experiments.case import Case
from sordino.experiments.methods import uncalibrated
from sordino.experiments.papers import Cell, PaperTable
from sordino.experiments.problem import model_of, problem_of
from sordino.experiments.running import losses
from sordino.experiments.settings import Settings
from sordino.experiments.tables import markdown
from sordino.private import Private


def seconds_per_epoch(case: Case, steps: int = 2) -> float:
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
    known: dict[tuple[str, str], Settings],
    records: int | None = None,
    steps: int = 2,
) -> str:
    """A line per method: the paper's seconds on its GPU beside ours on this machine's processor."""
    lines = []
    for cell in cells:
        case = table.case(cell, 0, "proven", known)
        ours = seconds_per_epoch(case.shortened(records) if records else case, steps)
        printed = (
            "out of memory"
            if math.isinf(cell.printed)
            else "not legible"
            if math.isnan(cell.printed)
            else f"{cell.printed:g}"
        )
        lines.append([cell.dataset, cell.label, printed, f"{ours:.1f}"])
    return f"{table.where}\n\n{markdown(['dataset', 'method', 'paper, GPU', 'ours, this processor'], lines)}"
