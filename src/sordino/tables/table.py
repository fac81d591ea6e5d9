"""A table of records in a .csv file: its header, which is public, and its cells, which are not."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from sordino.errors import InvalidInput

MISSING = frozenset({"", "?", "-", ".", "na", "n/a", "nan", "null", "none", "missing"})
"""What stands for no value, in any case and with spaces around it: a public convention."""
_AT_ONCE = 16_384
_LONGEST = 16_000_000
"""Characters of a line: a file of zeros is one line, which would be read whole."""


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of cells as text, all of one length. The names are public, the cells are private.

    `numbers` are those of its records in the file, from 1, where it is a part of one.
    """

    name: str
    columns: Mapping[str, Sequence[str]]
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select(self, mask: NDArray[np.bool_]) -> Table:
        """The records that `mask` marks."""
        marks = mask.tolist()
        columns = {name: list(compress(cells, marks)) for name, cells in self.columns.items()}
        return Table(self.name, columns, list(compress(self.numbers or range(1, len(self) + 1), marks)))


def read_table(path: Path) -> Table:
    """The table in a UTF-8 file with a header; the separator is a comma, or what the header has instead.

    Guarantees: whatever is wrong with the file is one line that names no cell's content.
    Edge cases: empty lines are skipped; a byte order mark is; quoted cells may hold separators and line ends; a column
    without a name is called by its number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse(path, file)
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else error  # never the bytes of a record
        raise InvalidInput(f"{path} is not a UTF-8 CSV file: {reason}") from None
    except OSError as error:
        raise InvalidInput(f"cannot read data={path}: {error.strerror or error}") from None


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value."""
    return cell.strip().casefold() in MISSING


def parse_numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Each cell as a finite number, or NaN; what one cell becomes depends on no other."""
    try:
        values = np.fromiter(map(float, cells), np.float64, len(cells))  # all of them, or the slow way
    except ValueError:
        values = np.fromiter(map(_parse_number, cells), np.float64, len(cells))
    values[~np.isfinite(values)] = np.nan
    return values


def _parse_number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _parse(path: Path, file: TextIO) -> Table:
    first = file.readline(_LONGEST)
    file.seek(0)
    separator = max(",;\t", key=lambda mark: (first.count(mark), mark == ","))
    reader = csv.reader(_read_lines(path, file), delimiter=separator, strict=True)
    names = _require_names(path, next((row for row in reader if row), []))
    columns: list[list[str]] = [[] for _ in names]
    whole = _require_whole_rows(path, reader, len(names))
    while rows := list(islice(whole, _AT_ONCE)):
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
            column.extend(cells)
    return Table(path.stem, dict(zip(names, columns, strict=True)))


def _read_lines(path: Path, file: TextIO) -> Iterator[str]:
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise InvalidInput(f"{path} has a line of {_LONGEST:,} characters or more: it is no table")
        yield line


def _require_whole_rows(path: Path, reader: Iterator[list[str]], width: int) -> Iterator[list[str]]:
    for row in reader:
        if len(row) == width:
            yield row
        elif row:
            line: int = reader.line_num  # type: ignore[attr-defined]  # csv.reader has it, its type is not public
            raise InvalidInput(f"{path} line {line} does not have {width} cells: every row needs one per column")


def _require_names(path: Path, header: list[str]) -> list[str]:
    names = [name.strip() or f"column {place}" for place, name in enumerate(header, 1)]
    if not names:
        raise InvalidInput(f"{path} has no header: its first line must name the columns")
    if wild := next((name for name in names if not name.isprintable()), None):
        raise InvalidInput(f"{path} names a column {wild!r}: a name must be printable and on one line")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path} names a column twice, {twice!r}: every column needs its own name")
    return names
