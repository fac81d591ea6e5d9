"""From cells to inputs, record by record: given a schema, what a record becomes depends on no other record."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.data.tabular import Table, is_missing, numbers
from sordino.data.tabular_schema import Category, Column, Number, Schema, Skip, Text
from sordino.data.text import bag_of_words
from sordino.errors import InvalidInput

FURTHEST = 3.0
"""Encoded numbers are kept within this many spreads."""
NO_CLASS = -100
"""The class of a record whose label is missing or not among the classes: torch's cross-entropy gives it loss zero."""

Floats = NDArray[np.float32]


def encode(table: Table, schema: Schema, target: str) -> tuple[Tensor, Tensor]:
    """Inputs [N, width] and classes [N] of every record, each a function of that record and the schema alone."""
    inputs = np.empty((len(table), schema.width), np.float32)
    place = 0
    for name, column in schema.columns.items():
        assert column is not None
        inputs[:, place : place + column.width] = encode_column(column, table.columns[name], name)
        place += column.width
    return torch.from_numpy(inputs), torch.from_numpy(encode_labels(table.columns[target], schema.classes or ()))


def encode_column(column: Column, cells: Sequence[str], name: str) -> Floats:
    """[N, column.width]: a missing or unknown value is zero everywhere, but for the mark of a missing number."""
    if isinstance(column, Number):
        return _numbers(column, cells)
    if isinstance(column, Category):
        return _categories(column, cells, name)
    if isinstance(column, Text):
        return bag_of_words(cells, column.buckets)
    assert isinstance(column, Skip)
    return np.zeros((len(cells), 0), np.float32)


def scaled(column: Number, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`low`..`high` to -1..1, what is outside clipped, no value in the middle."""
    assert column.low is not None
    assert column.high is not None
    middle, half = (column.high + column.low) / 2, (column.high - column.low) / 2
    return np.nan_to_num((np.clip(values, column.low, column.high) - middle) / half, nan=0.0)


def _numbers(column: Number, cells: Sequence[str]) -> Floats:
    values = numbers(cells)
    if column.center is None or column.spread is None:
        encoded = scaled(column, values)
    else:
        around = (np.clip(values, column.low, column.high) - column.center) / column.spread
        encoded = np.nan_to_num(np.clip(around, -FURTHEST, FURTHEST), nan=0.0)
    parts = [encoded, np.isnan(values)] if column.missing else [encoded]
    return np.stack(parts, axis=1).astype(np.float32)


def _categories(column: Category, cells: Sequence[str], name: str) -> Floats:
    rows = np.zeros((len(cells), column.width), np.float32)
    if column.values is None:
        salt = zlib.crc32(name.encode())  # so that one word falls differently in every column
        bucket = {cell: zlib.crc32(cell.strip().encode(), salt) % column.buckets for cell in set(cells)}
        places = {cell: -1 if is_missing(cell) else place for cell, place in bucket.items()}
    else:
        known = {value.strip(): place for place, value in enumerate(column.values)}
        places = {cell: known.get(cell.strip(), -1) for cell in set(cells)}
    found = np.array([places[cell] for cell in cells], np.int64)
    rows[np.flatnonzero(found >= 0), found[found >= 0]] = 1.0
    return rows


def label(cell: str) -> str | None:
    """A class by its one spelling: without spaces around it, whole numbers as such; None where it is missing."""
    if is_missing(cell):
        return None
    text = cell.strip()
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else text


def encode_labels(cells: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """The number of each record's class, `NO_CLASS` where it has none."""
    known: dict[str | None, int] = {label(name) or name: number for number, name in enumerate(classes)}
    numbered = {cell: known.get(label(cell), NO_CLASS) for cell in set(cells)}
    return np.array([numbered[cell] for cell in cells], np.int64)


def require_public(table: Table, schema: Schema, target: str) -> None:
    """Refuse records that contradict what the user gave as public; the record is named, its content is not."""
    for name, column in schema.columns.items():
        if isinstance(column, Number):
            wrong = np.isnan(numbers(table.columns[name]))
            if number := _first(table, name, wrong):
                raise InvalidInput(f"column {name!r} is not a number in record {number}: leave it empty or correct it")
    if schema.classes is not None:
        unknown = encode_labels(table.columns[target], schema.classes) == NO_CLASS
        if number := _first(table, target, unknown):
            named = ", ".join(schema.classes)
            raise InvalidInput(f"target {target!r} of record {number} must be one of the classes {named}, or empty")


def _first(table: Table, name: str, marks: NDArray[np.bool_]) -> int | None:
    """The number in the file of the first marked record that has something in this column."""
    numbers = table.numbers or range(1, len(table) + 1)
    cells = table.columns[name]
    return next((numbers[i] for i in np.flatnonzero(marks).tolist() if not is_missing(cells[i])), None)
