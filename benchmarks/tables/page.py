"""The tables of docs/tables.md, between marks; its words are written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables.cases import CASES, EPSILONS
from benchmarks.tables.methods import OPEN, PRIVATE

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
BEGIN, END = "<!-- written by benchmarks.tables -->", "<!-- end -->"
Rows = Sequence[dict[str, Any]]


def write(rows: Rows) -> None:
    """Put the tables in place."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{render(rows)}\n{END}{after}")


def render(rows: Rows) -> str:
    """AUC, accuracy and seconds of every table."""
    parts = []
    for case in CASES:
        mine = [row for row in rows if row["table"] == case.name]
        for what, spelled in (("auc", "AUC"), ("accuracy", "accuracy")):
            parts.append(f"\n**{case.name.capitalize()}, {spelled}**\n")
            parts.append("| method | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " | seconds |")
            parts.append("|---" * (len(EPSILONS) + 2) + "|")
            parts += [_render_line(mine, name, what) for name in PRIVATE if any(r["method"] == name for r in mine)]
            for name in OPEN:
                if found := [row for row in mine if row["method"] == name]:
                    value = _mean(found, what, 3 if what == "auc" else 1)
                    parts.append(f"| {name}, no privacy | " + f"{value} | " * len(EPSILONS) + f"{_time(found)} |")
    return "\n".join(parts) + "\n"


def _render_line(rows: Rows, name: str, what: str) -> str:
    cells, mine = [], [row for row in rows if row["method"] == name]
    for epsilon in EPSILONS:
        at = {e: [r for r in rows if r["epsilon"] == epsilon and r["method"] == e] for e in PRIVATE}
        means = {e: statistics.mean(r[what] for r in found) for e, found in at.items() if found}
        if name not in means:
            cells.append("")
            continue
        text = _mean(at[name], what, 3 if what == "auc" else 1)
        cells.append(f"**{text}**" if means[name] == max(means.values()) else text)
    return f"| {name} | " + " | ".join(cells) + f" | {_time(mine)} |"


def _mean(rows: Rows, what: str, digits: int) -> str:
    value = statistics.mean(row[what] for row in rows)
    return f"{value:.3f}"[1:] if what == "auc" else f"{value:.{digits}%}"


def _time(rows: Rows) -> str:
    return f"{statistics.median(row['seconds'] for row in rows):.1f}"
