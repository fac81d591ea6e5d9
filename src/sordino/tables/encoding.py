"""From cells to inputs, record by record: given a schema, what a record becomes depends on no other record."""

from __future__ import annotations

import string
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.tables.schema import Category, Column, Number, Schema, Skip, Text
from sordino.tables.table import Cells, Table, is_missing, parse_numbers

FURTHEST = 3.0
"""Encoded numbers are clipped to this many spreads."""
NO_CLASS = -100
"""The class of a record whose label is missing or not among the classes: torch's cross-entropy gives it loss zero."""
LENGTH = 8.0
"""The length of a text's row: about that of sixty numbers, so both are learnt at the same pace."""
_FEWEST_BUCKETS, _MOST_BUCKETS, _MOST_CELLS = 64, 1024, 2**28
_PUNCTUATION = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_LETTERS = str.maketrans(_PUNCTUATION + string.ascii_uppercase, " " * len(_PUNCTUATION) + string.ascii_lowercase)

Floats = NDArray[np.float32]


def encode(table: Table, schema: Schema, target: str) -> tuple[Tensor, Tensor]:
    """Encode inputs [N, width] and classes [N] of every record, from that record and the schema alone."""
    labels = encode_labels(table.columns[target], schema.classes or ())
    return torch.from_numpy(encode_columns(table, schema)), torch.from_numpy(labels)


def encode_columns(table: Table, schema: Schema) -> Floats:
    """Encode only the inputs, for records that need no class."""
    inputs = np.empty((len(table), schema.width), np.float32)
    place = 0
    for name, column in schema.columns.items():
        assert column is not None
        inputs[:, place : place + column.width] = encode_column(column, table.columns[name], name)
        place += column.width
    return inputs


def encode_column(column: Column, cells: Sequence[str], name: str) -> Floats:
    """Encode [N, column.width]: a missing or unknown value is zero everywhere, except the mark of a missing number."""
    if isinstance(column, Number):
        return _encode_numbers(column, cells)
    if isinstance(column, Category):
        return _encode_categories(column, cells, name)
    if isinstance(column, Text):
        return encode_texts(cells, column.buckets)
    assert isinstance(column, Skip)
    return np.zeros((len(cells), 0), np.float32)


def scale(column: Number, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Map `low`..`high` to -1..1; values outside are clipped, and a missing value is put in the middle."""
    assert column.low is not None
    assert column.high is not None
    middle, half = (column.high + column.low) / 2, (column.high - column.low) / 2
    return np.nan_to_num((np.clip(values, column.low, column.high) - middle) / half, nan=0.0)


def _encode_numbers(column: Number, cells: Sequence[str]) -> Floats:
    values = parse_numbers(cells)
    if column.center is None or column.spread is None:
        encoded = scale(column, values)
    else:
        around = (np.clip(values, column.low, column.high) - column.center) / column.spread
        encoded = np.nan_to_num(np.clip(around, -FURTHEST, FURTHEST), nan=0.0)
    parts = [encoded, np.isnan(values)] if column.missing else [encoded]
    return np.stack(parts, axis=1).astype(np.float32)


def _encode_categories(column: Category, cells: Sequence[str], name: str) -> Floats:
    rows = np.zeros((len(cells), column.width), np.float32)
    if column.values is None:
        salt = zlib.crc32(name.encode())  # so a word falls into different buckets in different columns
        bucket = {cell: zlib.crc32(cell.strip().encode(), salt) % column.buckets for cell in set(cells)}
        places = {cell: -1 if is_missing(cell) else place for cell, place in bucket.items()}
    else:
        known = {value.strip(): place for place, value in enumerate(column.values)}
        places = {cell: known.get(cell.strip(), -1) for cell in set(cells)}
    found = np.array([places[cell] for cell in cells], np.int64)
    rows[np.flatnonzero(found >= 0), found[found >= 0]] = 1.0
    return rows


def encode_texts(texts: Sequence[str], buckets: int) -> Floats:
    """Encode each text as a row: the square roots of its word counts by bucket, signed by the hash, of length `LENGTH`.

    Words are hashed, so no vocabulary is read. The sign makes words that share a bucket cancel on average instead of
    adding up (Weinberger et al. 2009). The root keeps a repeated word from drowning the others. An empty text is a row
    of zeros.
    """
    rows = np.zeros((len(texts), buckets), np.float32)
    for row, text in zip(rows, texts, strict=True):
        codes = np.array([zlib.crc32(word.encode()) for word in tokenise(text)], np.int64)
        np.add.at(row, codes // 2 % buckets, 1 - 2 * (codes % 2))
    rows = np.sign(rows) * np.sqrt(np.abs(rows))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(LENGTH * rows / np.maximum(lengths, 1.0), np.float32)


def tokenise(text: str) -> list[str]:
    """Split words as Keras does: lower case (ASCII only), with punctuation except the apostrophe as space."""
    return [word for word in text.translate(_LETTERS).split(" ") if word]


def choose_buckets(records: int) -> int:
    """Choose how many buckets of words so many records can fill: a power of two, from their public number alone."""
    fitting = min(_MOST_BUCKETS, max(_FEWEST_BUCKETS, records // 16))
    fitting = min(fitting, max(_FEWEST_BUCKETS, _MOST_CELLS // max(1, records)))
    return 1 << (fitting.bit_length() - 1)


def spell_label(cell: str) -> str | None:
    """Spell a class in one way: without spaces around it, whole numbers without a point; None if it is missing."""
    if is_missing(cell):
        return None
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else text


def encode_labels(cells: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each record's class, `NO_CLASS` if it has none."""
    known: dict[str | None, int] = {spell_label(name) or name: number for number, name in enumerate(classes)}
    return Cells.of(cells).map(lambda cell: known.get(spell_label(cell), NO_CLASS), np.int64)


def require_public(table: Table, schema: Schema, target: str) -> None:
    """Refuse records that contradict what the user gave as public; the error names the record, not its content."""
    for name, column in schema.columns.items():
        if isinstance(column, Number):
            wrong = np.isnan(parse_numbers(table.columns[name]))
            if number := _find_first(table, name, wrong):
                raise InvalidInput(f"column {name!r} is not a number in record {number}: leave it empty or correct it")
    if schema.classes is not None:
        unknown = encode_labels(table.columns[target], schema.classes) == NO_CLASS
        if number := _find_first(table, target, unknown):
            named = ", ".join(schema.classes)
            raise InvalidInput(f"target {target!r} of record {number} must be one of the classes {named}, or empty")


def _find_first(table: Table, name: str, marks: NDArray[np.bool_]) -> int | None:
    """Find the number in the file of the first marked record that has something in this column."""
    numbers = table.numbers or range(1, len(table) + 1)
    cells = table.columns[name]
    return next((numbers[i] for i in np.flatnonzero(marks).tolist() if not is_missing(cells[i])), None)
