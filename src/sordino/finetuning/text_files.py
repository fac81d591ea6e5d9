"""Texts of a user's own, from a file: the columns that a fine-tuning needs, and which records are held out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import InvalidInput
from sordino.finetuning.choice import TextChoice
from sordino.tables.files import is_table, read_table
from sordino.tables.reading import Sheet, choose_by_digest
from sordino.tables.schema import Column, Schema, Skip, Text
from sordino.tables.table import Table, is_missing

LINES = (".jsonl", ".ndjson")
_ACCEPTED = "a .csv, .tsv, .jsonl or .parquet file with a column of texts"
_LONGEST = 64_000_000
"""Characters of a line."""


def read_texts(path: Path, wanted: Sequence[str]) -> Table:
    """The `wanted` columns of a file, as text; whatever is wrong with it is one line that names no cell's content."""
    if not path.exists():
        raise InvalidInput(f"data={path} does not exist: give {_ACCEPTED}")
    if not path.is_file() or not (path.suffix.lower() in LINES or is_table(str(path))):
        raise InvalidInput(f"data={path} must be {_ACCEPTED}")
    table = _read(path, wanted)
    for name in wanted:
        table.require_column(name)
    if not len(table):
        raise InvalidInput(f"{path} has 0 records: nothing can be learnt from it")
    return replace(table, columns={name: table.columns[name] for name in wanted})


def _read(path: Path, wanted: Sequence[str]) -> Table:
    if path.suffix.lower() in LINES:
        return _read_lines(path, wanted)
    return read_table(path)


def _read_lines(path: Path, wanted: Sequence[str]) -> Table:
    """One JSON object per line; the first names the columns. What a record lacks, or is null, is an empty cell."""
    columns: dict[str, list[str]] | None = None
    for number, record in _parse_lines(path):
        if columns is None:
            columns = {str(name): [] for name in record}
        for name, cells in columns.items():
            cells.append(_spell(path, number, name, record.get(name)) if name in wanted else "")
    return Table(path.stem, columns or {name: [] for name in wanted})


def _parse_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            while line := file.readline(_LONGEST):
                number += 1
                if not line.strip():
                    continue
                record = _parse_line(path, number, line)
                yield number, record
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        raise InvalidInput(f"cannot read data={path}: {error.strerror or error}") from None


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None  # its words would quote the line
    if not isinstance(record, dict):
        raise InvalidInput(f"{path} line {number} is no JSON object: every line must be one record, {{...}}")
    return record


def _spell(path: Path, number: int, name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(value)
    kind = "a list" if isinstance(value, list) else "an object"
    raise InvalidInput(f"{path} line {number}: column {name!r} holds {kind}, must hold text: join it to one text first")


def split_texts(table: Table, choice: TextChoice, target: str | None, share: float | None) -> Sheet:
    """Training and held-out texts. Each record decides by its own bytes, or by its owner's where a unit has several.

    So one record, or one owner, more or less moves no other from one part to the other.
    """
    if choice.unit is not None:
        rows = (cell.encode() for cell in table.columns[choice.unit])
    else:
        rows = ("\0".join(cells).encode() for cells in zip(*table.columns.values(), strict=True))
    return Sheet.split(table, target or choice.text, choose_by_digest(share, len(table), rows))


def describe_columns(choice: TextChoice, classes: tuple[str, ...] | None) -> Schema:
    """What is public about the columns: one is text, and how its classes are called, if anybody said so."""
    columns: dict[str, Column | None] = {choice.text: Text()}
    if choice.unit is not None:
        columns[choice.unit] = Skip("it names the owner")
    return Schema(columns, classes)


def check_texts(sheet: Sheet, choice: TextChoice) -> None:
    """Refuse what leaves nothing to learn, before anything is spent; no content is told.

    A single empty text is a text. Whoever runs the command holds the records: what is refused here is told to nobody
    else, and there is no run yet.
    """
    train, name = sheet.train, sheet.train.name
    if not len(train):
        raise InvalidInput(f"{name} has 0 records to train on: hold out fewer of them")
    if not any(cell.strip() for cell in train.columns[choice.text]):
        raise InvalidInput(f"column {choice.text!r} of {name} holds no text: every cell of it is empty")


def find_owners(table: Table, unit: str) -> list[str]:
    """Whose each record is; a record without an owner is refused, because nobody would protect it."""
    owners = [cell.strip() for cell in table.columns[unit]]
    missing: NDArray[np.bool_] = np.array([is_missing(cell) for cell in owners], np.bool_)
    if missing.any():
        number = (table.numbers or range(1, len(table) + 1))[int(missing.argmax())]
        raise InvalidInput(f"record {number} has no {unit!r}: every record needs an owner, or leave it out of the file")
    return owners
