"""What the user says about the columns of a table: a schema file, bounds, classes; and a draft of such a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from sordino.cli.config import DataChoice
from sordino.data import tabular_kinds, tabular_schema
from sordino.data.tabular import Table
from sordino.data.tabular_schema import Column, Number, Schema, Skip
from sordino.data.tabular_sheet import Sheet
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.cli.choosing import Flags

Bounds = tuple[float, float]
_DRAFT = """\
# What the columns mean. Everything in this file must be public: correct it, do not copy extremes from the records.
# The kinds were guessed from the records. A number without low and high has its range released with noise,
# at a share of epsilon; a category may list its values = ["a", "b"]; kind = "skip" leaves a column out.
# Add classes = ["no", "yes"] on top, or have the names released with noise too.

"""


def schema_for(flags: Flags, base: Schema | None, choice: DataChoice, sheet: Sheet) -> Schema:
    """Everything that is public about the columns; what is left open needs a release."""
    given = tabular_schema.read(flags.schema) if flags.schema is not None else base or Schema()
    numbers = {name: Number(*bounds) for name, bounds in column_bounds(flags.bounds or ()).items()}
    given = given.with_columns(numbers)
    if choice.classes is not None:
        given = replace(given, classes=choice.classes)
    return tabular_schema.for_header(given, list(sheet.train.columns), sheet.target, choice.bounds)


def common_bounds(texts: Iterable[str]) -> Bounds | None:
    """The bounds of every number, from ``LO,HI``; the last one counts."""
    common = [_bounds(text) for text in texts if "=" not in text]
    return common[-1] if common else None


def column_bounds(texts: Iterable[str]) -> dict[str, Bounds]:
    """The bounds of single columns, from ``NAME=LO:HI``."""
    pairs = (text.rpartition("=") for text in texts if "=" in text)
    return {name.strip(): _bounds(bounds) for name, _, bounds in pairs}


def _bounds(text: str) -> Bounds:
    try:
        low, high = (float(part) for part in text.replace(":", ",").split(","))
    except ValueError:
        raise InvalidInput(f"bounds={text!r} must be two numbers, such as 0,255, or a column's: age=0:120") from None
    if not (low < high and math.isfinite(high - low)):
        raise InvalidInput(f"bounds={low:g},{high:g} must be finite and increasing")
    return low, high


def draft(table: Table, target: str, path: Path) -> None:
    """Write a schema to start from: kinds alone, guessed for whoever holds the records, without a number of theirs."""
    header = tabular_schema.for_header(Schema(), list(table.columns), target, None)
    kinds = {name: column or _guess(table.columns[name]) for name, column in header.columns.items()}
    drafted = Schema(kinds).to_table()
    for column in drafted["columns"].values():
        column.pop("buckets", None)  # the default, which a reader would take for something that was counted
    text = _DRAFT + tomli_w.dumps(drafted)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{path} exists already: choose another file for the draft") from None
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


def _guess(cells: Sequence[str]) -> Column:
    counts, different = tabular_kinds.histogram(cells), tabular_kinds.distinct(cells)
    found = tabular_kinds.understood(counts, different, 1e-9, len(cells), None)
    # The kind alone: a range or a number of buckets would say something about the records, down to a single one.
    return found if isinstance(found, Skip) else type(found)()
