"""The list of runs: sorted, filtered, grouped by data with the total cost of each group, and two runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from sordino.figures import round_up, round_up_digits, write_count
from sordino.report.briefs import Brief
from sordino.report.charts import percent
from sordino.report.shelf import Listed, Shelved

_KEYS: Mapping[str, Callable[[Brief], Any]] = {
    "date": lambda brief: brief.began,
    "data": lambda brief: brief.data.casefold(),
    "target": lambda brief: brief.target.casefold(),
    "method": lambda brief: brief.method.casefold(),
    "epsilon": lambda brief: brief.epsilon,
    "accuracy": lambda brief: -1.0 if brief.accuracy is None else brief.accuracy,
}
SORTS = ("name", *_KEYS)
MOST_LETTERS = 100


@dataclass(frozen=True)
class View:
    """How a reader wants to see the list, from the query of an address; unknown parts are ignored."""

    sort: str = "name"
    down: bool = True
    words: str = ""
    grouped: bool = False
    chosen: tuple[str, ...] = ()


def read_view(query: str) -> View:
    """Read the view that a query asks for: ``sort=epsilon&order=up&q=mnist&group=data&run=...``."""
    try:
        given = parse_qs(query[:2000], max_num_fields=20)
    except ValueError:
        given = {}
    sort = given.get("sort", ["name"])[0]
    return View(
        sort=sort if sort in SORTS else "name",
        down=given.get("order", ["down"])[0] != "up",
        words=given.get("q", [""])[0][:MOST_LETTERS],
        grouped=given.get("group", [""])[0] == "data",
        chosen=tuple(given.get("run", ())[:20]),
    )


def arrange(rows: Sequence[Listed], view: View) -> list[dict[str, Any]]:
    """Arrange rows in groups, each with a title and the total cost of its runs; or in one group without a title."""
    kept = [row for row in rows if _matches(row, view.words)]
    ordered = sorted(kept, key=lambda row: _sort_key(row, view.sort), reverse=view.down)
    if not view.grouped:
        return [{"title": "", "rows": ordered, "total": ""}]
    groups: dict[str, list[Listed]] = {}
    for row in ordered:
        groups.setdefault(row.facts.data if row.facts else "not read", []).append(row)
    return [{"title": title, "rows": group, "total": add_up(group)} for title, group in sorted(groups.items())]


def add_up(rows: Sequence[Listed]) -> str:
    """Say what runs on the same data cost together: their sum, even if some were chosen after looking at others."""
    runs = {row.facts.run_id: row.facts for row in rows if row.facts is not None}
    if not runs:
        return ""
    epsilon = sum(brief.epsilon for brief in runs.values())
    delta = sum(brief.delta for brief in runs.values())
    proven = all(brief.basis == "proven" for brief in runs.values())
    words = "" if proven else "; not all of it is proven"
    total = f"ε ≤ {round_up(epsilon)} at δ = {round_up_digits(delta, 2)}"
    return f"{write_count(len(runs), 'run')}, together {total} by adding up{words}"


def _matches(row: Listed, words: str) -> bool:
    brief = row.facts
    told = [row.entry.name, *((brief.data, brief.target, brief.method, brief.model, brief.basis) if brief else ())]
    text = " ".join(told).casefold()
    return all(word in text for word in words.casefold().split())


def _sort_key(row: Listed, sort: str) -> tuple[bool, Any, str]:
    known = sort in _KEYS and row.facts is not None
    value: Any = _KEYS[sort](row.facts) if known and row.facts is not None else ""
    return (known, value if known else 0, row.entry.name)


def set_side_by_side(first: tuple[Shelved, Brief], second: tuple[Shelved, Brief]) -> list[tuple[str, str, str, bool]]:
    """Return (name, first run's value, second run's value, whether they differ) for every line of a comparison."""
    lines: list[tuple[str, Callable[[Brief], str]]] = [
        ("Data", lambda brief: brief.data),
        ("Target", lambda brief: brief.target or "–"),
        ("Method", lambda brief: brief.method),
        ("Model", lambda brief: brief.model),
        ("Began", lambda brief: brief.began),
        ("ε", lambda brief: round_up(brief.epsilon)),
        ("δ", lambda brief: round_up_digits(brief.delta, 3)),
        ("Budget", lambda brief: "–" if brief.budget is None else f"{brief.budget:g}"),
        ("Basis", lambda brief: brief.basis),
        ("Protects", lambda brief: f"one {brief.unit}"),
        ("Events", lambda brief: f"{brief.events:,}"),
        ("Steps", lambda brief: "–" if brief.total_steps is None else f"{brief.total_steps:,}"),
        ("Held-out accuracy", lambda brief: "–" if brief.accuracy is None else percent(brief.accuracy)),
        ("AUC", lambda brief: "–" if brief.auc is None else f"{brief.auc:.3f}"),
    ]
    pairs = ((what, tell(first[1]), tell(second[1])) for what, tell in lines)
    return [(what, ours, theirs, ours != theirs) for what, ours, theirs in pairs]
