"""From cells to inputs, with public knowledge alone: a record's inputs depend on that record and on released values.

Every column becomes one block of inputs. A number falls into one of a few *bins*, whose edges were released with noise,
and also stands beside them as (x - center) / spread. A category is one of the named values. Values that were not named
share the last place of their block, and missing cells the place before it. All entries are centred by the released
share of records in their place, so a common value makes a short row. The length of its row bounds what a record can add
to a sum, and the noise is in proportion to that bound.

All of an `Encoder` is public: it may be published with the model, and is plain data (`to_plain`, `from_plain`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import InvalidInput
from sordino.tables.encoding import encode_texts, spell_label
from sordino.tables.table import Table, is_missing, parse_numbers

Floats = NDArray[np.float64]
Inputs = NDArray[np.float32]
Places = NDArray[np.int64]
FURTHEST = 3.0
"""A standardised number is clipped to this many spreads."""
SLOPE, ALONE = 0.4, 1.2
"""The weight of a standardised number: with bins beside it, and without."""
TEXT_LENGTH = 1.5
"""The length of a text's row."""


@dataclass(frozen=True)
class Binned:
    """A number: len(edges) + 1 bins, a place for missing cells, and `slope` times the standardised value."""

    edges: tuple[float, ...]
    center: float
    spread: float
    shares: tuple[float, ...]
    slope: float = SLOPE
    kind = "binned"

    @property
    def width(self) -> int:
        return len(self.edges) + 3

    @property
    def places(self) -> int:
        return len(self.edges) + 2

    def list_entries(self) -> list[str]:
        """Name every entry of its row: a bin by its lower edge."""
        return ["lowest", *map(repr, self.edges), "missing", "slope"]

    def find_places(self, cells: Sequence[str]) -> tuple[Places, Floats]:
        """Find the place of every cell, and its standardised value, zero if it has none."""
        values = parse_numbers(cells)
        known = ~np.isnan(values)
        found = np.where(known, np.searchsorted(np.array(self.edges), values, side="right"), len(self.edges) + 1)
        around = np.clip((np.nan_to_num(values, nan=self.center) - self.center) / self.spread, -FURTHEST, FURTHEST)
        return found.astype(np.int64), around

    def encode(self, cells: Sequence[str]) -> Inputs:
        places, around = self.find_places(cells)
        rows = np.empty((len(places), self.width), np.float32)
        rows[:, :-1] = _put(places, self.shares)
        rows[:, -1] = self.slope * around
        return rows


@dataclass(frozen=True)
class Named:
    """A category: one place for each of `values`, one for missing cells, one for everything else."""

    values: tuple[str, ...]
    shares: tuple[float, ...]
    kind = "named"

    @property
    def width(self) -> int:
        return len(self.values) + 2

    @property
    def places(self) -> int:
        return self.width

    def list_entries(self) -> list[str]:
        """Return a name for every entry of its row."""
        return [*(f"value {value}" for value in self.values), "missing", "others"]

    def find_places(self, cells: Sequence[str]) -> Places:
        """Find the place of every cell."""
        known = {value: place for place, value in enumerate(self.values)}
        return map_cells(cells, lambda cell: self._find(cell, known))

    def _find(self, cell: str, known: Mapping[str, int]) -> int:
        word = spell(cell)
        return len(known) if word is None else known.get(word, len(known) + 1)

    def encode(self, cells: Sequence[str]) -> Inputs:
        return _put(self.find_places(cells), self.shares)


@dataclass(frozen=True)
class Worded:
    """Free text: its words, hashed to `buckets`, as a row of at most length `TEXT_LENGTH`."""

    buckets: int
    kind = "worded"

    @property
    def width(self) -> int:
        return self.buckets

    def list_entries(self) -> list[str]:
        """Return a name for every entry of its row."""
        return [f"bucket {place}" for place in range(self.buckets)]

    def encode(self, cells: Sequence[str]) -> Inputs:
        rows = encode_texts(cells, self.buckets)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows * (TEXT_LENGTH / np.maximum(lengths, TEXT_LENGTH)), np.float32)


Block = Binned | Named | Worded
_KINDS: dict[str, Callable[..., Block]] = {"binned": Binned, "named": Named, "worded": Worded}


@dataclass(frozen=True)
class Encoder:
    """What is public about a table and its target; `left_out` says why other columns are not used.

    A classifier has `classes` with their `class_shares` of the records; the share `unnamed` belongs to none of them. A
    regression has `center` and `spread` of its target, and `low` and `high`, the range of predictions.
    """

    target: str
    blocks: Mapping[str, Block]
    classes: tuple[str, ...] = ()
    center: float = 0.0
    spread: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    left_out: Mapping[str, str] | None = None
    class_shares: tuple[float, ...] = ()
    unnamed: float = 0.0

    @property
    def task(self) -> str:
        """ "classification" or "regression"."""
        return "classification" if self.classes else "regression"

    @property
    def width(self) -> int:
        """How many inputs a record has."""
        return sum(block.width for block in self.blocks.values())

    def encode(self, table: Table) -> Inputs:
        """Encode records as [N, width], each by itself. Columns may come in any order; others are not looked at."""
        if missing := [name for name in self.blocks if name not in table.columns]:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise InvalidInput(f"the data has no column {missing[0]!r}{more}: the model was trained with it")
        inputs = np.empty((len(table), self.width), np.float32)
        place = 0
        for name, block in self.blocks.items():
            inputs[:, place : place + block.width] = block.encode(table.columns[name])
            place += block.width
        return inputs

    def to_plain(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        blocks = {name: {"kind": block.kind, **asdict(block)} for name, block in self.blocks.items()}
        limits = {"low": _spell_limit(self.low), "high": _spell_limit(self.high)}
        return {**asdict(self), **limits, "blocks": blocks, "left_out": dict(self.left_out or {})}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoder:
        """Read what `to_plain` wrote; it may come from anybody."""
        try:
            fields = dict(plain)
            blocks = {str(name): _parse_block(block) for name, block in fields.pop("blocks").items()}
            limits = {"low": -math.inf, "high": math.inf}
            limits = {name: at if plain[name] is None else float(plain[name]) for name, at in limits.items()}
            classes = tuple(str(name) for name in fields.pop("classes"))
            left_out = {str(name): str(why) for name, why in fields.pop("left_out").items()}
            numbers = {name: float(fields.pop(name)) for name in ("center", "spread", "unnamed")}
            shares = tuple(float(share) for share in fields.pop("class_shares"))
            target = str(fields.pop("target"))
            return cls(target, blocks, classes, left_out=left_out, class_shares=shares, **numbers, **limits)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"this is not an encoder that to_plain wrote ({type(error).__name__})") from None


def map_cells(cells: Sequence[str], function: Any) -> Places:
    """Compute a whole number for every cell, once for each different text."""
    codes, values = getattr(cells, "codes", None), getattr(cells, "list_values", None)
    if codes is not None and values is not None:
        return np.asarray(np.fromiter(map(function, values()), np.int64)[codes], np.int64)
    found = {cell: function(cell) for cell in set(cells)}
    return np.fromiter((found[cell] for cell in cells), np.int64, len(cells))


def spell(cell: str) -> str | None:
    """Return a value in its one spelling; None if it is missing."""
    return None if is_missing(cell) else spell_label(cell)


def _put(places: Places, shares: Sequence[float]) -> Inputs:
    """Put a one in its place, centred by the shares."""
    middle = np.array(shares, np.float32)
    return np.asarray(np.eye(len(middle), dtype=np.float32)[places] - middle)


def _spell_limit(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _parse_block(plain: Mapping[str, Any]) -> Block:
    kind = _KINDS[plain["kind"]]
    fields = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in plain.items()}
    fields.pop("kind")
    block = kind(**fields)
    numbers = [*getattr(block, "edges", ()), *getattr(block, "shares", ())]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise InvalidInput("this is not an encoder: its edges and shares must be finite numbers")
    if not isinstance(block, Worded) and len(block.shares) != block.places:
        raise InvalidInput(f"this is not an encoder: a block of {block.places} places has {len(block.shares)} shares")
    return block
