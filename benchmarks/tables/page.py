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
    """Of the processor; runs of old were timed by the clock on the wall of a busy machine, which says nothing."""
    found = [row["processor"] for row in rows if "processor" in row]
    return f"{statistics.median(found):.1f}" if found else ""


# -- tables of packages -----------------------------------------------------------------------------------------------

BEGIN_OTHERS = "<!-- written by benchmarks.tables.others -->"
MEASURES = {"binary": "AUC", "classes": "accuracy", "regression": "R²"}


def write_others(rows: Rows) -> None:
    """Put the table of other tables in place."""
    before, _, rest = PAGE.read_text().partition(BEGIN_OTHERS)
    PAGE.write_text(f"{before}{BEGIN_OTHERS}\n\n{render_others(rows)}\n{END}{rest.partition(END)[2]}")


def render_others(rows: Rows) -> str:
    """One line for a table: each private method at each ε, the best of them bold, and boosting without privacy."""
    epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})
    methods = [name for name in PRIVATE if any(row["method"] == name for row in rows)]
    titles = [f"{name}, ε = {epsilon:g}" for epsilon in epsilons for name in methods]
    lines = ["| table | records × columns | figure | " + " | ".join([*titles, "boosting, no privacy"]) + " |"]
    lines.append("|---" * (len(titles) + 4) + "|")
    for table in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == table]
        first = mine[0]
        cells = [table, f"{first['records']:,} × {first['columns']}", MEASURES[first["task"]]]
        for epsilon in epsilons:
            means = {name: _find_mean(mine, name, epsilon) for name in methods}
            best = max((mean for mean in means.values() if mean is not None), default=None)
            several = sum(mean is not None for mean in means.values()) > 1
            cells += [_spell(mean, bold=several and mean == best) for mean in means.values()]
        lines.append("| " + " | ".join([*cells, _spell(_find_mean(mine, "boosting", None), bold=False)]) + " |")
    return "\n".join(lines) + "\n"


def _find_mean(rows: Rows, name: str, epsilon: float | None) -> float | None:
    found = [row["score"] for row in rows if (row["method"], row["epsilon"]) == (name, epsilon) and "score" in row]
    return statistics.mean(found) if found else None


def _spell(mean: float | None, *, bold: bool) -> str:
    if mean is None:
        return "–"
    text = "< −1" if mean < -1 else f"{mean:.3f}".replace("-", "−")
    return f"**{text}**" if bold else text
