"""A table of records: the names of its columns, which are public, and its cells, which are not.

A cell is text, whatever file or object it came from. What it becomes (a number, no value, a class) depends on that cell
alone. A column holds each different text once and a number for every record, so a million cells are parsed as fast as
their different texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sordino.errors import InvalidInput

MISSING = frozenset({"", "?", "-", ".", "na", "n/a", "nan", "null", "none", "missing", "<na>", "nat", "#n/a"})
"""The texts that mean no value, in any case and with spaces around them: a public convention."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_MANY = 20
_LARGE = 10_000
"""More texts than this free enough memory to be worth giving back."""

Codes = NDArray[np.integer[Any]]


class Cells(Sequence[str]):
    """One column: `values`, its different texts in an arrow array, and for every record the place of its text there.

    Every value occurs: a text that only other records had is not kept. A place takes one, two or four bytes, as the
    number of values needs.
    """

    __slots__ = ("codes", "values")
    __hash__ = None  # type: ignore[assignment]  # compares like a list

    def __init__(self, values: Any, codes: Codes) -> None:
        kind = np.uint8 if len(values) <= 2**8 else np.uint16 if len(values) <= 2**16 else np.int32
        self.values = values
        self.codes: Codes = codes.astype(kind, copy=False)

    @classmethod
    def of(cls, cells: Sequence[str] | Any) -> Cells:
        """Make a column from texts, or from an arrow array of texts; none is null."""
        if isinstance(cells, Cells):
            return cells
        array = cells if isinstance(cells, pa.Array | pa.ChunkedArray) else pa.array(cells, pa.large_string())
        return cls._from_dictionary(array.dictionary_encode())

    @classmethod
    def _from_dictionary(cls, encoded: Any) -> Cells:
        whole = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        return cls(whole.dictionary, whole.indices.to_numpy(zero_copy_only=False))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Cells: ...
    def __getitem__(self, place: int | slice) -> str | Cells:
        if isinstance(place, slice):
            return self.take(self.codes[place])
        return str(self.values[int(self.codes[place])].as_py())

    def __iter__(self) -> Iterator[str]:
        return map(self.list_values().__getitem__, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def list_values(self) -> list[str]:
        """List the different texts."""
        found: list[str] = self.values.to_pylist()
        return found

    def take(self, codes: Codes) -> Cells:
        """Take some of the records, by their codes; values that none of them has are dropped."""
        used = np.zeros(len(self.values), np.bool_)
        used[codes] = True
        if used.all():
            return Cells(self.values, codes)
        places = (np.cumsum(used) - 1).astype(np.int32)
        return Cells(self.values.filter(pa.array(used)), places[codes])

    def change(self, values: Any) -> Cells:
        """Return the same with other texts in place of `values`; some may now be equal."""
        again = Cells.of(values)
        return Cells(again.values, again.codes[self.codes])

    def spread(self, of_values: NDArray[Any]) -> NDArray[Any]:
        """Spread a result for each value to each record."""
        found: NDArray[Any] = of_values[self.codes]
        return found

    def map(self, function: Callable[[str], Any], kind: Any) -> NDArray[Any]:
        """Apply `function` to every cell, once for each different text."""
        values = self.list_values()
        return self.spread(np.fromiter(map(function, values), kind, len(values)))

    def count_values(self) -> NDArray[np.int64]:
        """Count how many records have each value."""
        return np.bincount(self.codes, minlength=len(self.values))


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of cells as text, all of one length. The names are public, the cells are private.

    `numbers` are the numbers of its records in the file, from 1, if it is a part of one. `named` says that the names
    are known to be names; if they may be the cells of a record, no error lists them.
    """

    name: str
    columns: Mapping[str, Sequence[str]]
    numbers: Sequence[int] | None = None
    named: bool = True

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def select(self, mask: NDArray[np.bool_]) -> Table:
        """Select the records that `mask` marks."""
        if mask.all():
            return self
        columns = {name: (found := Cells.of(cells)).take(found.codes[mask]) for name, cells in self.columns.items()}
        numbers = np.array(self.numbers, np.int64)[mask] if self.numbers else np.flatnonzero(mask) + 1
        return Table(self.name, columns, array("q", numbers.tobytes()), self.named)

    def pick(self, names: Sequence[str]) -> Table:
        """Pick some of the columns."""
        return Table(self.name, {name: self.columns[name] for name in names}, self.numbers, self.named)

    def require_column(self, name: str, what: str = "column") -> str:
        """Return the name of an existing column, or raise an error that offers the nearest one."""
        if name in self.columns:
            return name
        raise InvalidInput(f"{self.name} has no {what} {name!r}: {self.suggest(name)}")

    def suggest(self, name: str) -> str:
        """Suggest the column that may have been meant, or the existing ones; none if names may be cells."""
        return suggest_name(name, list(self.columns)) if self.named else self.describe()

    def describe(self) -> str:
        """List the existing columns, as far as an error may name them."""
        if self.named:
            return suggest_name("", list(self.columns))
        return (
            f"it has {len(self.columns)} columns, whose names may be cells and are not shown; "
            "look at its first line, and give --no-header if that is a record"
        )


def suggest_name(wrong: str, names: Sequence[str]) -> str:
    """Return what a message says after a name that is not in `names`."""
    spelled = {name.casefold(): name for name in names}
    if near := get_close_matches(wrong.casefold(), list(spelled), n=1, cutoff=0.7):
        return f"did you mean {spelled[near[0]]!r}?"
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return f"it has {', '.join(names[:_MANY])}{more}"


def is_missing(cell: str) -> bool:
    """Whether a cell holds no value."""
    return cell.strip().casefold() in MISSING


def find_missing(cells: Sequence[str]) -> NDArray[np.bool_]:
    """Find the cells that hold no value."""
    known = Cells.of(cells)
    return known.spread(find_missing_values(known.values))


def find_missing_values(texts: Any) -> NDArray[np.bool_]:
    """Find the texts in an arrow array that mean no value. Numbers never do, so few texts are looked at."""
    missing = np.zeros(len(texts), np.bool_)
    words = np.flatnonzero(np.isnan(parse_values(texts)))
    missing[words] = [is_missing(text) for text in texts.take(pa.array(words)).to_pylist()]
    return missing


def parse_numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Parse each cell as a finite number, or NaN; what one cell becomes depends on no other."""
    known = Cells.of(cells)
    found: NDArray[np.float64] = known.spread(parse_values(known.values))
    return found


def parse_values(texts: Any) -> NDArray[np.float64]:
    """Parse an arrow array of texts as finite numbers, NaN for any other text."""
    trimmed = pc.utf8_trim_whitespace(texts)
    numeric = pc.match_substring_regex(trimmed, _NUMBER)
    unsigned = pc.utf8_ltrim(pc.if_else(numeric, trimmed, None), "+")
    values = np.array(pc.fill_null(unsigned.cast(pa.float64()), math.nan), np.float64)
    values[~np.isfinite(values)] = np.nan
    if len(values) > _LARGE:
        del trimmed, numeric, unsigned
        pa.default_memory_pool().release_unused()
    return values
