"""Dates as parts that a model can use: the year with its fraction, the month, the day of the week.

A part is a separate column, made from each cell alone: `admitted: year`, `admitted: month`, `admitted: weekday`. Month
and weekday have public values, so their names cost nothing.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence

from sordino.tables.schema import Category, Column, Date, Number, Schema
from sordino.tables.table import Cells, Table

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = tuple(str(month) for month in range(1, 13))
PARTS: Mapping[str, Column | None] = {"year": Number(), "month": Category(MONTHS), "weekday": Category(WEEKDAYS)}
_PART = re.compile(rf"(.+): ({'|'.join(PARTS)})")
_ISO = re.compile(r"(\d{4})[-/.]?(\d{2})[-/.]?(\d{2})([T ].*)?")
_OTHER = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2})([T ].*)?")
_CENTURY = 70
"""A two-digit year below this is in this century."""


def parse_date(cell: str) -> datetime.date | None:
    """Parse a date as people write it, or return None: 2024-03-01, 20240301, 1.3.2024, 3/1/2024, also with a time.

    With slashes the month comes first, if it can be one; with points or hyphens the day does.
    """
    text = cell.strip()
    if found := _ISO.fullmatch(text):
        year, month, day = (int(found[place]) for place in (1, 2, 3))
    elif found := _OTHER.fullmatch(text):
        first, second, year = int(found[1]), int(found[3]), int(found[4])
        american = found[2] == "/" and first <= 12
        month, day = (first, second) if american or second > 12 else (second, first)
        year += (2000 if year < _CENTURY else 1900) if len(found[4]) == 2 else 0
    else:
        return None
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None


def take_part(cells: Sequence[str], part: str) -> Cells:
    """Take one part of every date; empty if there is no date."""
    known = Cells.of(cells)
    return known.change([_spell(parse_date(value), part) for value in known.list_values()])


def _spell(date: datetime.date | None, part: str) -> str:
    if date is None:
        return ""
    if part == "month":
        return str(date.month)
    if part == "weekday":
        return WEEKDAYS[date.weekday()]
    return f"{date.year + (date.timetuple().tm_yday - 1) / 366:.4f}"


def expand(table: Table, schema: Schema) -> tuple[Table, Schema]:
    """Replace every date column of table and schema by its parts."""
    columns: dict[str, Column | None] = {}
    for name, column in schema.columns.items():
        if isinstance(column, Date):
            columns.update({f"{name}: {part}": kind for part, kind in PARTS.items()})
        else:
            columns[name] = column
    rest = [name for name in table.columns if name not in schema.columns or not isinstance(schema.columns[name], Date)]
    return derive(table, columns).pick([*rest, *(name for name in columns if name not in rest)]), Schema(
        columns, schema.classes
    )


def derive(table: Table, needed: Iterable[str]) -> Table:
    """Add the `needed` columns that `table` lacks, made from its dates."""
    parts = [found for name in needed if name not in table.columns and (found := _PART.fullmatch(name))]
    made = {found[0]: take_part(table.columns[found[1]], found[2]) for found in parts if found[1] in table.columns}
    return Table(table.name, {**table.columns, **made}, table.numbers, table.named) if made else table


def replace_dates(table: Table, needed: Iterable[str]) -> Table:
    """Replace the dates of `table` by the `needed` parts that are made from them."""
    wanted = list(needed)
    parted = {name_source(name) for name in wanted if name not in table.columns}
    made = derive(table, wanted)
    return made.pick([name for name in made.columns if name not in parted]) if parted & set(table.columns) else table


def name_source(column: str) -> str:
    """Return the column of a file that `column` is made from."""
    found = _PART.fullmatch(column)
    return found[1] if found else column
