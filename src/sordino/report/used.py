"""Which parts of the data went into a model, by name, and how the model did on held-out records.

All of it comes from a run's folder: its configuration, and what the training printed. Both may come from anybody, so
every name is cut short, and only the shape of the data is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sordino.accounting.events import fits

MOST_NAMES, MOST_LETTERS = 200, 200
"""The most columns, classes and figures, and the most letters of each: a folder can name any number."""
TITLES = {"auc": "AUC", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}


@dataclass(frozen=True)
class Figure:
    """One measure of the model on held-out records, with its interval and what guessing reaches."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    baseline: float | None = None

    @property
    def title(self) -> str:
        """The measure's name as people write it."""
        return TITLES.get(self.name, self.name.replace("_", " "))

    @property
    def has_interval(self) -> bool:
        """Whether its interval is known; without one, a run writes the value itself at both ends."""
        return self.low is not None and self.high is not None and self.low < self.high


@dataclass(frozen=True)
class Used:
    """The columns that went into the model, and what it cost to find out about them.

    `prepared` has the releases before training, as the ledger notes them, with the ε of each alone.
    """

    target: str | None = None
    columns: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    prepared: tuple[tuple[str, float], ...] = ()
    figures: tuple[Figure, ...] = ()
    measured_on: int | None = None
    measured_privately: bool = False


def read_used(
    tables: Mapping[str, Any], outcome: Mapping[str, Any] | None, prepared: tuple[tuple[str, float], ...] = ()
) -> Used:
    """Read what a folder says about the data: its configuration, and what the training printed."""
    told = outcome or {}
    data, schema = (tables.get(name) for name in ("data", "schema"))
    data, schema = (table if isinstance(table, dict) else {} for table in (data, schema))
    columns, left_out = _read_columns(told, schema)
    classes = told.get("classes") or schema.get("classes") or data.get("classes")
    figures = told.get("figures")
    figures = figures if isinstance(figures, dict) else {}
    target, measured = data.get("target"), figures.get("records")
    return Used(
        target=str(target)[:MOST_LETTERS] if isinstance(target, str) else None,
        columns=columns,
        left_out=left_out,
        classes=_list_names(classes),
        prepared=prepared,
        figures=_read_figures(figures),
        measured_on=measured if fits(measured, "int") else None,
        measured_privately=figures.get("released") is True,
    )


def _read_columns(told: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Read which columns were used, and why others were not: as the training said, or by its schema."""
    left, known = told.get("left_out"), schema.get("columns")
    if isinstance(left, dict) and isinstance(told.get("columns"), list):
        return _list_names(told["columns"]), _cut(left)
    tables = (
        {str(name): table for name, table in known.items() if isinstance(table, dict)}
        if isinstance(known, dict)
        else {}
    )
    skipped = {name: table.get("why") for name, table in tables.items() if table.get("kind") == "skip"}
    return _list_names([name for name in tables if name not in skipped]), _cut(skipped)


def _cut(words: Mapping[Any, Any]) -> Mapping[str, str]:
    some = list(words.items())[:MOST_NAMES]
    return {str(name)[:MOST_LETTERS]: str(why or "")[:MOST_LETTERS] for name, why in some}


def _list_names(value: Any) -> tuple[str, ...]:
    return tuple(str(name)[:MOST_LETTERS] for name in value[:MOST_NAMES]) if isinstance(value, list | tuple) else ()


def _read_figures(figures: Mapping[str, Any]) -> tuple[Figure, ...]:
    values, baseline = figures.get("values"), figures.get("baseline")
    if not isinstance(values, dict):
        return ()
    guessed = baseline if isinstance(baseline, dict) else {}
    found = []
    for name, entry in list(values.items())[:MOST_NAMES]:
        if isinstance(entry, dict) and fits(entry.get("value"), "float"):
            low, high = (float(entry[end]) if fits(entry.get(end), "float") else None for end in ("low", "high"))
            guess = float(guessed[name]) if fits(guessed.get(name), "float") else None
            found.append(Figure(str(name)[:MOST_LETTERS], float(entry["value"]), low, high, guess))
    return tuple(found)
