"""What the shortened runs leave out (footing `short`): the papers' length, and how long that would take here."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from sordino.lab.experiments import catalogue, recipe_of
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import write_markdown

RECORDS = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}


def left_out(rows: Sequence[Row]) -> str:
    """A line per shortened method at its largest ε; hours are those of the stored runs, by the records they drew."""
    known = catalogue()
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if known[row["dataset"], row["method"]].footing == "short":
            groups[row["dataset"], row["method"]].append(row)
    header = ["dataset", "method", "ε", "taken", "with the paper's noise", "hours a run of that"]
    return write_markdown(header, [_line(*key, group) for key, group in sorted(groups.items())]) if groups else ""


def _line(dataset: str, method: str, group: Sequence[Row]) -> list[str]:
    epsilon = max(row["epsilon"] for row in group)
    recipe = group[0]["case"]["recipe"]
    whole = recipe_of(catalogue()[dataset, method.removeprefix("short-")].case(epsilon), RECORDS[dataset])
    per_record = statistics.mean(row["seconds"] / row["steps"] for row in group) / recipe["batch_size"]
    hours = per_record * (whole.steps or 0) * whole.batch_size / 3600
    taken, paper = ((recipe["steps"], recipe["batch_size"]), (whole.steps, whole.batch_size))
    words = [f"{steps:,} steps of {size:,}" for steps, size in (taken, paper)]
    return [dataset, method, f"{epsilon:g}", *words, f"{hours:.1f}"]
