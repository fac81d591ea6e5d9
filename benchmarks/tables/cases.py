"""The tables, with their fixed split; and what may be taken for public of them in a schema."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sordino.tables.schema import Category, Column, Number, Schema

Frame = Any
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = 3
_FEW = 8
"""A number with no more different values is a code: its values are public in the schema."""


@dataclass(frozen=True)
class Case:
    """A table: its target, the class that counts as positive, and columns that identify a record."""

    name: str
    target: str
    positive: str
    identifies: tuple[str, ...] = ()


CASES = (
    Case("adult", "income", ">50K"),
    Case("telco", "Churn", "Yes", ("customerID",)),
    Case("default", "default_next_month", "1", ("ID",)),
)


@dataclass(frozen=True, eq=False)
class Parts:
    """Training and held-out records as text, without what identifies them."""

    train: Frame
    test: Frame
    case: Case

    @property
    def delta(self) -> float:
        """Sordino's default: a power of ten at most a tenth of 1 / records."""
        return min(1e-5, 10.0 ** math.floor(math.log10(0.1 / len(self.train)) + 1e-9))

    def labels(self, frame: Frame) -> NDArray[np.int64]:
        """1 for the positive class."""
        return np.asarray((frame[self.case.target] == self.case.positive).to_numpy(), np.int64)


def find_folder() -> Path:
    """Where the tables are: SORDINO_DATA/tables."""
    return Path(os.environ.get("SORDINO_DATA", "data")) / "tables"


@cache
def read(case: Case) -> Parts:
    """Both parts of a table."""
    parts = []
    for part in ("train", "test"):
        frame = pd.read_csv(find_folder() / f"{case.name}_{part}.csv.xz", dtype=str, keep_default_na=False)
        parts.append(frame.drop(columns=list(case.identifies)))
    return Parts(parts[0], parts[1], case)


def write_schema(parts: Parts) -> Schema:
    """What a data dictionary would say: the values of categories and codes, and round bounds of numbers."""
    columns: dict[str, Column] = {}
    for name in parts.train.columns:
        if name == parts.case.target:
            continue
        cells = pd.concat([parts.train[name], parts.test[name]])
        numbers = pd.to_numeric(cells, errors="coerce")
        if numbers.notna().mean() > 0.5 and numbers.nunique() > _FEW:
            columns[name] = Number(_round(float(numbers.min()), math.floor), _round(float(numbers.max()), math.ceil))
        else:
            columns[name] = Category(tuple(sorted(set(cells) - {"?", "", " "})))
    names = tuple(sorted(set(parts.train[parts.case.target])))
    return Schema(columns, names)


def _round(value: float, towards: Any) -> float:
    """To one digit, outwards."""
    if value == 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return float(towards(value / unit) * unit)


@cache
def encode(parts: Parts) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs for the peers that take none but numbers: one-hot categories and standardised numbers.

    Values, means and deviations are read from the training records without noise, which nobody pays for: the peers
    are better off by that than they could be.
    """
    columns = [[], []]  # type: list[list[NDArray[np.float64]]]
    for name in parts.train.columns:
        if name == parts.case.target:
            continue
        numbers = [pd.to_numeric(frame[name], errors="coerce") for frame in (parts.train, parts.test)]
        if numbers[0].notna().mean() > 0.5:
            center, spread = float(numbers[0].mean()), float(numbers[0].std()) or 1.0
            for made, column in zip(columns, numbers, strict=True):
                made.append(((column.fillna(center) - center) / spread).clip(-3, 3).to_numpy()[:, None])
        else:
            places = {value: place for place, value in enumerate(sorted(set(parts.train[name])))}
            hot = np.eye(len(places) + 1, len(places))  # the last row is for a value that training has not seen
            for made, frame in zip(columns, (parts.train, parts.test), strict=True):
                made.append(hot[frame[name].map(places).fillna(len(places)).to_numpy(np.int64)])
    train, test = (np.concatenate(made, 1).astype(np.float32) for made in columns)
    return train, test
