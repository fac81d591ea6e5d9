"""Reads a user's own texts from a file: the columns that fine-tuning needs, and which records are held out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from sordino.errors import InvalidInput
from sordino.finetuning.choice import TextChoice
from sordino.tables.files import PARQUET, is_table, read_table
from sordino.tables.reading import Sheet, choose_by_digest
from sordino.tables.schema import Column, Schema, Skip, Text
from sordino.tables.table import Table, is_missing

LINES = (".jsonl", ".ndjson")
_ACCEPTED = "a .csv, .tsv, .jsonl or .parquet file with a column of texts"
_LONGEST = 64_000_000
"""The most characters of a line."""


def read_texts(path: Path, wanted: Sequence[str], conversations: str | None = None) -> Table:
    """Read the `wanted` columns of a file, as text; every error is one line that names no cell's content.

    Every cell of the column `conversations` is a list of {role, content}; `spell_conversation` turns it into text.
    """
    _require_file(path)
    table = _read(path, wanted, conversations)
    for name in wanted:
        table.require_column(name)
    if not len(table):
        raise InvalidInput(f"{path} has 0 records: nothing can be learnt from it")
    return replace(table, columns={name: table.columns[name] for name in wanted})


def holds_conversations(path: Path, column: str) -> bool:
    """Whether the column holds lists: by its type in a .parquet, by the first record that has it in a .jsonl."""
    _require_file(path)
    if path.suffix.lower() in PARQUET:
        return _is_nested(path, column)
    if path.suffix.lower() not in LINES:
        return False
    found = (record[column] for _, record in _parse_lines(path) if record.get(column) is not None)
    return isinstance(next(found, None), list)


def spell_conversation(turns: Sequence[tuple[str, str]]) -> str:
    """Write a conversation, as roles and contents, into one cell."""
    return json.dumps([{"role": role, "content": content} for role, content in turns], ensure_ascii=False)


def _require_file(path: Path) -> None:
    if not path.exists():
        raise InvalidInput(f"data={path} does not exist: give {_ACCEPTED}")
    if not path.is_file() or not (path.suffix.lower() in LINES or is_table(str(path))):
        raise InvalidInput(f"data={path} must be {_ACCEPTED}")


def _is_nested(path: Path, column: str) -> bool:
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError):
        return False  # the reader says why it cannot be read
    return column in schema.names and pyarrow.types.is_nested(schema.field(column).type)


def _read(path: Path, wanted: Sequence[str], conversations: str | None) -> Table:
    if path.suffix.lower() in LINES:
        return _tabulate(path, _parse_lines(path), wanted, conversations)
    if conversations is not None and path.suffix.lower() in PARQUET:
        table = pyarrow.parquet.read_table(path)
        for name in wanted:
            Table(path.stem, {each: [] for each in table.column_names}).require_column(name)
        return _tabulate(path, enumerate(table.select(list(wanted)).to_pylist(), 1), wanted, conversations)
    return read_table(path)


def _tabulate(
    path: Path, records: Iterable[tuple[int, dict[str, Any]]], wanted: Sequence[str], conversations: str | None
) -> Table:
    """Make a table of records; the first one names the columns. A missing or null value is an empty cell."""
    columns: dict[str, list[str]] | None = None
    for number, record in records:
        if columns is None:
            columns = {str(name): [] for name in record}
        for name, cells in columns.items():
            if name == conversations:
                cells.append(_spell_turns(path, number, name, record.get(name)))
            else:
                cells.append(_spell(path, number, name, record.get(name)) if name in wanted else "")
    return Table(path.stem, columns or {name: [] for name in wanted})


def _spell_turns(path: Path, number: int, name: str, value: Any) -> str:
    turns = value if isinstance(value, list) else []
    spoken = [(turn.get("role"), turn.get("content")) for turn in turns if isinstance(turn, dict)]
    if not spoken or len(spoken) < len(turns) or not all(isinstance(part, str) for turn in spoken for part in turn):
        raise InvalidInput(
            f"{path} record {number}: column {name!r} must hold a conversation, a list of "
            '{"role": ..., "content": ...} with text in both'
        )
    return spell_conversation([(str(role), str(content)) for role, content in spoken])


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
        record = None  # the error's message would quote the line
    if not isinstance(record, dict):
        raise InvalidInput(f"{path} line {number} is not a JSON object: every line must be one record, {{...}}")
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
    """Split into training and held-out texts by each record's own bytes, or its owner's if a unit has several records.

    So one record or one owner, more or less, moves no other from one part to the other.
    """
    if choice.unit is not None:
        rows = (cell.encode() for cell in table.columns[choice.unit])
    else:
        rows = ("\0".join(cells).encode() for cells in zip(*table.columns.values(), strict=True))
    return Sheet.split(table, target or choice.text, choose_by_digest(share, len(table), rows))


def describe_columns(choice: TextChoice, classes: tuple[str, ...] | None) -> Schema:
    """Return what is public about the columns: one is text, and the names of its classes, if they were given."""
    columns: dict[str, Column | None] = {choice.text: Text()}
    if choice.unit is not None:
        columns[choice.unit] = Skip("it names the owner")
    return Schema(columns, classes)


def check_texts(sheet: Sheet, choice: TextChoice) -> None:
    """Refuse texts that leave nothing to learn, before anything is spent and without showing any content.

    A single empty text is a text. The person who runs the command holds the records: no one else sees what is refused
    here, and there is no run yet.
    """
    train, name = sheet.train, sheet.train.name
    if not len(train):
        raise InvalidInput(f"{name} has 0 records to train on: hold out fewer of them")
    if not any(cell.strip() for cell in train.columns[choice.text]):
        raise InvalidInput(f"column {choice.text!r} of {name} holds no text: every cell of it is empty")


def find_owners(table: Table, unit: str) -> list[str]:
    """Return each record's owner; refuse a record without one, because no unit would protect it."""
    owners = [cell.strip() for cell in table.columns[unit]]
    missing: NDArray[np.bool_] = np.array([is_missing(cell) for cell in owners], np.bool_)
    if missing.any():
        number = (table.numbers or range(1, len(table) + 1))[int(missing.argmax())]
        raise InvalidInput(f"record {number} has no {unit!r}: every record needs an owner, or leave it out of the file")
    return owners
