"""Reads a table from a file of delimited text (CSV), in any dialect: separator, encoding, decimal mark, compression.

Every cell is read as text. A reader that guesses types looks at all records first, so one record could change what the
others become. Here dialect and names come from the file's first bytes and its first line. Everything else depends on
each cell alone, even its decoding if it is not UTF-8.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from sordino.errors import InvalidInput
from sordino.tables.arrays import find_memory
from sordino.tables.table import Cells, Table, parse_values

SEPARATORS = ",;\t|"
_LONGEST = 1 << 20
"""The most bytes of a record, and the most that are parsed at a time: a file of zeros is one endless line."""
_LEAST, _PARTS = 1 << 16, 128
"""A small file is parsed in this many parts, of at least this many bytes each: buffers take several times as much."""
_PACKED: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\x00", lzma.open),
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|$)")
_END = "\x1e"
"""A record of these cells is put at the end: if it is not read as one, a quote was never closed."""
_DECIMAL_COMMA = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?\s*$"
_THOUSANDS = r"^\s*[+-]?\d{1,3}(,\d{3})+(\.\d+)?\s*$"
_LONGEST_NAME, _WORDS_OF_A_NAME = 80, 8

Told = Callable[[int, int], None]
"""A function that is told how much of a file was read: bytes or records, and how many there are."""


@dataclass(frozen=True)
class Dialect:
    """How a file spells a table, as far as the user says so; None means that its first line decides.

    `header` False: the first line is a record; True: it names the columns, whatever it looks like. `missing` are more
    marks of no value. `decimal` is the mark in numbers: a comma counts if it does not separate cells.
    """

    header: bool | None = None
    separator: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.separator is not None and (len(self.separator) != 1 or ord(self.separator) > 127):
            raise InvalidInput(f"separator={self.separator!r} must be one character, such as ';'")
        if self.decimal not in (None, ".", ","):
            raise InvalidInput(f"decimal={self.decimal!r} must be '.' or ','")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError:
                raise InvalidInput(
                    f"encoding={self.encoding!r} is not known: give utf-8, utf-16, latin-1, ..."
                ) from None


def read_delimited(path: Path, dialect: Dialect, told: Told = lambda done, size: None) -> Table:
    """Read the table in a file of delimited text.

    Guarantees: an error is one line that names no cell's content.
    Edge cases: empty lines are skipped; quoted cells may hold separators and line ends; a column without a name is
    called by its number, and a repeated name gets a number.
    """
    try:
        block = min(_LONGEST, max(_LEAST, path.stat().st_size // _PARTS))
        with path.open("rb") as file:
            try:
                return _read(path, file, dialect, told, block)
            except pa.ArrowInvalid:  # a record of more bytes than that
                file.seek(0)
                return _read(path, file, dialect, told, _LONGEST)
    except UnicodeError:
        named = dialect.encoding or "the encoding of its first bytes"
        raise InvalidInput(f"{path} cannot be read as {named}: give the one that it has, --encoding latin-1") from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        raise InvalidInput(f"{path} is compressed and damaged: compress it again") from None
    except (csv.Error, pa.ArrowInvalid):
        raise InvalidInput(f"{path} is not a table of delimited text, or has an endless line: save it again") from None
    except OSError as error:
        raise InvalidInput(f"cannot read data={path}: {error.strerror or 'it is damaged'}") from None


def _read(path: Path, file: IO[bytes], dialect: Dialect, told: Told, block: int) -> Table:
    source = _Source(_transcode(_open(path, file, block), dialect.encoding))
    separator, first = _read_first_line(path, source, dialect)
    if not first:
        raise InvalidInput(f"{path} has no header: its first line must name the columns")
    if dialect.header is False:
        names = [f"column_{place}" for place in range(1, len(first) + 1)]
        source.put_back(source.consumed)
    else:
        names = name_columns(path, first)
    size = path.stat().st_size
    columns = _read_columns(path, source, names, separator, block, lambda done: told(min(done, size), size))
    cleaned = {name: _clean(cells, separator, dialect) for name, cells in zip(names, columns, strict=True)}
    doubts = 0 if dialect.header is not None else _count_doubts(first, list(cleaned.values()))
    if doubts and 2 * doubts >= len(names):
        raise InvalidInput(
            f"the first line of {path} reads like a record, not like the names of its {len(names)} columns: give "
            "--no-header if it is one, or --header if it is not"
        )
    return Table(path.stem.partition(".")[0], cleaned, named=not doubts)


class _Source:
    """Bytes that arrive in pieces, for a reader that asks for a number of bytes."""

    closed = False

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left, self.consumed = pieces, b"", b""

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size and (piece := next(self._pieces, b"")):
            self._left += piece
        found, self._left = self._left[:size], self._left[size:]
        return found

    def put_back(self, taken: bytes) -> None:
        self._left = taken + self._left

    def end_with(self, last: bytes) -> None:
        self._pieces = chain(self._pieces, [last])

    def close(self) -> None:
        return


def _open(path: Path, file: IO[bytes], block: int) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed, but no more than the machine has memory for."""
    start = file.read(8)
    file.seek(0)
    unpack = next((unpack for magic, unpack in _PACKED if start.startswith(magic)), None)
    plain = unpack(file) if unpack is not None else file
    most, seen = find_memory(), 0
    while piece := plain.read(block):
        seen += len(piece)
        if seen > most:
            raise InvalidInput(f"{path} has more bytes than the memory: use fewer records")
        yield piece


def _transcode(pieces: Iterator[bytes], encoding: str | None) -> Iterator[bytes]:
    """Convert to UTF-8 from the given encoding, or from the one that the first bytes show; else keep the bytes."""
    first = next(pieces, b"")
    encoding = encoding or next((name for mark, name in _MARKS if first.startswith(mark)), None)
    if encoding is None and len(first) > 1 and 0 in first[:2]:
        encoding = "utf-16-be" if first[0] == 0 else "utf-16-le"
    if encoding is None:
        yield first
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    yield decoder.decode(first).removeprefix("\ufeff").encode()
    for piece in pieces:
        yield decoder.decode(piece).encode()
    yield decoder.decode(b"", True).encode()


def _read_first_line(path: Path, source: _Source, dialect: Dialect) -> tuple[str, list[str]]:
    """Read the separator and the cells of the first line that is not empty; `source.consumed` are its bytes."""
    head = source.read(_LONGEST)
    lines = _split_lines(head)
    line = next((found for found in lines if found.strip()), b"")
    separator = dialect.separator
    used = head.index(line) if line else len(head)
    if excel := re.fullmatch(rb"sep=(.)\s*", line):
        separator = separator or excel[1].decode()
        used += len(line)
        line = next((found for found in lines if found.strip()), b"")
        used = head.index(line, used) if line else len(head)
    if len(line) >= _LONGEST:
        raise InvalidInput(f"{path} has a line of {_LONGEST:,} bytes or more: it is not a table")
    separator = separator or _guess_separator(_decode(line))
    taken: list[bytes] = []

    def feed() -> Iterator[str]:
        for part in chain([line], lines):
            taken.append(part)
            yield _decode(part)

    row = next(csv.reader(feed(), delimiter=separator, strict=True), []) if line else []
    source.consumed = b"".join(taken)
    source.put_back(head[used + len(source.consumed) :])
    return separator, row


def _split_lines(head: bytes) -> Iterator[bytes]:
    return (found[0] for found in _LINE.finditer(head))


def _guess_separator(line: str) -> str:
    """Guess the separator of the first line's cells: the commonest candidate outside quotes, or a comma if in doubt."""
    outside = re.sub(r'"[^"]*"', "", line)
    return max(SEPARATORS, key=lambda mark: (outside.count(mark), mark == ","))


def _decode(raw: bytes) -> str:
    """Decode UTF-8; other bytes are taken for Windows' or ISO's Latin, in which every byte is a letter."""
    for encoding in ("utf-8", "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    return raw.decode("latin-1")


def _read_columns(
    path: Path, source: _Source, names: list[str], separator: str, block: int, told: Callable[[int], None]
) -> Iterator[Cells]:
    source.end_with(f"\n{separator.join([_END] * len(names))}\n".encode())
    wrong: list[int] = []

    def refuse(row: Any) -> str:
        wrong.append(row.number)
        return "skip"

    places = [str(place) for place in range(len(names))]
    batches = pa.csv.open_csv(
        pa.PythonFile(source, "r"),
        pa.csv.ReadOptions(use_threads=False, block_size=block, column_names=places),
        pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=refuse),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(places, pa.binary()), strings_can_be_null=False),
    )
    kept: list[list[Cells]] = [[] for _ in names]
    for number, batch in enumerate(batches, 1):
        told(number * block)
        if wrong:
            break
        for column, cells in zip(kept, batch.columns, strict=True):
            column.append(_to_text(cells))
    _require_whole(path, kept, wrong, separator)
    while kept:
        pa.default_memory_pool().release_unused()
        yield _join(kept.pop(0))
    pa.default_memory_pool().release_unused()


def _to_text(cells: Any) -> Cells:
    """Make a part of a column, with each different text once."""
    encoded = cells.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    try:
        return Cells(encoded.dictionary.cast(pa.string()), codes)
    except pa.ArrowInvalid:
        texts = [_decode(cell) for cell in encoded.dictionary.to_pylist()]
        return Cells(encoded.dictionary, codes).change(pa.array(texts, pa.string()))


def _join(parts: list[Cells]) -> Cells:
    """Join a column from its parts."""
    wide = sum(part.values.nbytes for part in parts) >= 2**30  # more than its offsets could count, in one array
    kind = pa.large_string() if wide else pa.string()
    texts = Cells.of(pa.chunked_array([part.values.cast(kind) for part in parts], kind))
    starts = np.cumsum([0, *(len(part.values) for part in parts)])
    codes = np.empty(sum(map(len, parts)), np.int32)
    place = 0
    for part, start in zip(parts, starts, strict=False):
        codes[place : place + len(part)] = texts.codes[start : start + len(part.values)][part.codes]
        place += len(part)
    return Cells(texts.values, codes)


def _require_whole(path: Path, kept: list[list[Cells]], wrong: list[int], separator: str) -> None:
    """Refuse records of another length and quotes that swallow records; then remove the last record, which we added."""
    if wrong:
        raise InvalidInput(
            f"{path} record {wrong[0]} does not have {len(kept)} cells, or a quote is not closed: "
            "every record needs a cell for each column"
        )
    last = [column[-1] for column in kept]
    if any(len(cells) == 0 or cells[-1] != _END for cells in last):
        raise InvalidInput(f"{path} ends within a quote that is not closed: correct it or save the file again")
    for column, cells in zip(kept, last, strict=True):
        column[-1] = cells[:-1]
    passed = 0
    for number, batch in enumerate(zip(*kept, strict=True)):
        for cells in batch:
            if (place := _find_swallowed(cells, separator, len(kept))) is not None:
                raise InvalidInput(
                    f"{path} record {passed + place + 1} holds other records within quotes: one of them is not closed; "
                    "keep texts of several lines in a .parquet file"
                )
        passed += len(kept[0][number])


def _find_swallowed(cells: Cells, separator: str, width: int) -> int | None:
    """Find the first cell that holds lines with as many cells as a record; with one column, any second line."""
    marked = np.asarray(pc.match_substring(cells.values, "\n"), np.bool_)
    for place in np.flatnonzero(marked).tolist():
        lines = cells.values[place].as_py().split("\n")[1:]
        marked[place] = any(line.count(separator) >= width - 1 for line in lines)
    return int(cells.spread(marked).argmax()) if marked.any() else None


def name_columns(path: Path | str, header: list[str]) -> list[str]:
    """Name the columns of a header: one without a name is called by its number, and a repeated name gets a number."""
    names = [name.strip() or f"column {place}" for place, name in enumerate(header, 1)]
    if wild := next((place for place, name in enumerate(names, 1) if not name.isprintable()), None):
        raise InvalidInput(f"{path}: the name of column {wild} must be printable and on one line")
    taken, unique = set(names), []
    for place, name in enumerate(names):
        number = 2
        while name in unique:
            again = f"{names[place]}_{number}"
            name, number = (again if again not in taken else name), number + 1
        unique.append(name)
    return unique


def _clean(cells: Cells, separator: str, dialect: Dialect) -> Cells:
    """Clean each value by itself: numbers get a point, and values that the user's marks call missing become empty."""
    values = cells.values
    decimal = dialect.decimal or ("." if separator == "," else ",")
    pattern = _DECIMAL_COMMA if decimal == "," else _THOUSANDS
    if bool(pc.any(foreign := pc.match_substring_regex(values, pattern)).as_py()):
        plain = pc.replace_substring(values, "." if decimal == "," else ",", "")
        plain = pc.replace_substring(plain, ",", ".") if decimal == "," else plain
        values = pc.if_else(foreign, plain, values)
    if dialect.missing:
        marks = pa.array([mark.strip() for mark in dialect.missing], values.type)
        values = pc.if_else(pc.is_in(pc.utf8_trim_whitespace(values), value_set=marks), "", values)
    return cells if values is cells.values else cells.change(values)


def _count_doubts(header: list[str], columns: list[Cells]) -> int:
    """Count the cells of the first line that read like those of the records below it.

    Such a cell is a number above numbers, a word that its column has again, or a text too long for a name. Names that
    count 0, 1, 2, ... come from a data frame without names.
    """
    plain = [name.strip() for name in header]
    if any(plain == [str(place + start) for place in range(len(plain))] for start in (0, 1)):
        return 0
    numeric = ~np.isnan(parse_values(pa.array(plain, pa.string())))
    return sum(_doubt(name, bool(number), cells) for name, number, cells in zip(plain, numeric, columns, strict=True))


def _doubt(name: str, numeric: bool, cells: Cells) -> bool:
    if not name or not len(cells):
        return False
    if len(name) > _LONGEST_NAME or len(name.split()) > _WORDS_OF_A_NAME:
        return True
    if numeric and 2 * np.isnan(parse_values(cells.values)).sum() < len(cells.values):
        return True
    return bool(pc.any(pc.equal(pc.utf8_trim_whitespace(cells.values), name)).as_py())
