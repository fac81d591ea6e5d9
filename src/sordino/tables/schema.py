"""What the columns of a table mean, as public knowledge: given by the user, or released with noise.

::

    classes = ["no", "yes"]             # of the target

    [columns.age]
    kind = "number"
    low = 0.0                           # without low and high they are released with noise
    high = 120.0

    [columns.town]
    kind = "category"                   # hashed; or values = ["Bern", "Rome"]

    [columns.notes]
    kind = "text"                       # words, hashed

    [columns.admitted]
    kind = "date"                       # its year, month and day of the week

    [columns.patient]
    kind = "skip"
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput
from sordino.names import read_toml
from sordino.tables.table import suggest_name

FEWEST_BUCKETS, MOST_BUCKETS = 16, 64
MOST_CODES = 100
"""The most values of a column of codes; if there are more, their size may mean something."""
_PEOPLE = (
    "patient|person|people|user|customer|client|member|employee|student|subject|account|record|row|case|encounter|"
    "visit|order|transaction|invoice|session|participant|household|respondent|passenger|applicant|borrower|policy|"
    "admission|claim|ticket|unnamed"
)
_NUMBERS = "id|nbr|nr|no|num|number|key|uid|code"
_WHOSE = f"first|last|full|middle|given|family|maiden|nick|contact|owner|holder|doctor|physician|author|{_PEOPLE}"
"""Words before "name" that make it a person's. The name of a clinic or a product is a category like any other."""
_IDENTIFIES = re.compile(
    r"(^|[_\W])(uuid|guid|ssn|mrn|iban|e_?mail|phone|telephone|mobile|fax|surname|street|address|passport)$"
    rf"|^(id|uid|index|key|idx|row|names?|column \d+|unnamed: ?\d+)$|(^|[_\W])({_PEOPLE})[_\W]*({_NUMBERS})$"
    rf"|(^|[_\W])({_WHOSE})[_\W]*names?$"
)
_CODES = re.compile(r"(^|[_\W])(id|nbr|nr|no|key|uid|code)$")
"""Somebody's identifiers, or codes for kinds of things? The released number of different values decides."""
_DATES = re.compile(
    r"(^|[_\W])(date|datetime|timestamp|dob|birthday|birth_?date)($|[_\W](?!(num|number|numeric|count|days)$))|_at$"
)


@dataclass(frozen=True)
class Number:
    """A number, clipped to `low`..`high`, then (x - center) / spread; `missing` marks records without it."""

    low: float | None = None
    high: float | None = None
    center: float | None = None
    spread: float | None = None
    missing: bool = False

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise InvalidInput(f"low={self.low} and high={self.high} belong together: give both or neither")
        if self.low is None or self.high is None:
            return
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InvalidInput(f"bounds={self.low:g},{self.high:g} must be finite and increasing")
        if self.spread is not None and not (self.spread > 0 and math.isfinite(self.spread)):
            raise InvalidInput(f"spread={self.spread} must be > 0 and finite: numbers are divided by it")

    @property
    def complete(self) -> bool:
        return self.low is not None

    @property
    def width(self) -> int:
        return 1 + self.missing


@dataclass(frozen=True)
class Category:
    """One of a few words: one of the public `values`, or hashed to one of `buckets` so that no list is read."""

    values: tuple[str, ...] | None = None
    buckets: int = 32
    complete = True

    def __post_init__(self) -> None:
        if self.values is None and self.buckets < 2:
            raise InvalidInput(f"buckets={self.buckets} must be >= 2: categories are hashed to that many")

    @property
    def width(self) -> int:
        return self.buckets if self.values is None else len(self.values)


@dataclass(frozen=True)
class Text:
    """Free text: a bag of words, hashed to `buckets`."""

    buckets: int = 256
    complete = True

    def __post_init__(self) -> None:
        if self.buckets < 2:
            raise InvalidInput(f"buckets={self.buckets} must be >= 2: words are hashed to that many")

    @property
    def width(self) -> int:
        return self.buckets


@dataclass(frozen=True)
class Date:
    """A date; its year, month and day of the week are used (`sordino.tables.dates`)."""

    complete = True
    width = 0


@dataclass(frozen=True)
class Skip:
    """Left out; `why` is for people."""

    why: str = ""
    complete = True
    width = 0


Column = Number | Category | Text | Date | Skip
KINDS: dict[str, type[Column]] = {
    "number": Number,
    "category": Category,
    "text": Text,
    "date": Date,
    "skip": Skip,
}


@dataclass(frozen=True)
class Schema:
    """Every column by its name, None if its kind is not known yet; and the classes of the target, if known."""

    columns: Mapping[str, Column | None] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and (len(self.classes) < 2 or len(set(self.classes)) != len(self.classes)):
            raise InvalidInput(f"classes={','.join(self.classes)} must be two or more different names")

    @property
    def open(self) -> list[str]:
        """Return the columns that need a release."""
        return [name for name, column in self.columns.items() if column is None or not column.complete]

    @property
    def complete(self) -> bool:
        return self.classes is not None and not self.open

    @property
    def width(self) -> int:
        """Return how many inputs the encoded columns make."""
        return sum(column.width for column in self.columns.values() if column is not None)

    def with_columns(self, known: Mapping[str, Column]) -> Schema:
        """Return the same with more columns known."""
        return replace(self, columns={**self.columns, **known})

    def to_table(self) -> dict[str, Any]:
        """Plain data that `parse_schema` reads back."""
        classes = {} if self.classes is None else {"classes": list(self.classes)}
        known = {name: _to_plain(column) for name, column in self.columns.items() if column is not None}
        return {**classes, "columns": known}


def describe_header(
    given: Schema, header: Sequence[str], target: str | None, bounds: tuple[float, float] | None
) -> Schema:
    """Describe the columns of a table besides its target: as `given`, or by public conventions.

    A column whose name says that it identifies somebody is left out. The others are numbers within `bounds`, if there
    are any. Only the header is read.
    """
    named = ", ".join(header)
    if target is None:
        raise InvalidInput(f"target is missing: use --target COLUMN, one of {named}")
    if target not in header:
        raise InvalidInput(f"the data has no column {target!r}: {suggest_name(target, header)}")
    if unknown := next((name for name in given.columns if name not in header), None):
        raise InvalidInput(f"the schema has a column {unknown!r}, the data has not: {suggest_name(unknown, header)}")
    columns = {name: given.columns.get(name) or _guess_by_name(name, bounds) for name in header if name != target}
    if all(isinstance(column, Skip) for column in columns.values()):
        raise InvalidInput(f"the data has no column besides {target!r} to learn from")
    return replace(given, columns=columns)


def _guess_by_name(name: str, bounds: tuple[float, float] | None) -> Column | None:
    words = _split_words(name)
    if _IDENTIFIES.search(words):
        return Skip("its name says that it identifies a record")
    if _DATES.search(words):
        return Date()
    return Number(*bounds) if bounds is not None else None


def _split_words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def settle_codes(name: str, found: Column, different: float, records: int) -> Column:
    """Decide by its noised number of values whether a column holds identifiers or codes, if its name may mean either.

    This is a pure function of released values. If most records have a value of their own, it identifies them. Few
    values are codes, and their size means nothing.
    """
    if not isinstance(found, Number) or not _CODES.search(_split_words(name)):
        return found
    if different > records / 2:
        return Skip("its name and its many values say that it identifies a record")
    return Category() if different <= max(2.0, MOST_CODES) else found


def read_schema(path: Path) -> Schema:
    """Read the schema in a TOML file."""
    return parse_schema(read_toml(path, "schema"))


def parse_schema(table: Mapping[str, Any]) -> Schema:
    """Read what `Schema.to_table` or a user wrote; an error is one line."""
    if unknown := sorted(set(table) - {"classes", "columns"}):
        raise InvalidInput(f"a schema has no key {unknown[0]!r}: it has classes and columns")
    columns, classes = table.get("columns", {}), table.get("classes")
    if not isinstance(columns, dict) or not all(isinstance(column, dict) for column in columns.values()):
        raise InvalidInput("columns of a schema must be tables such as [columns.age]")
    if not (classes is None or isinstance(classes, list)):
        raise InvalidInput(f'classes={classes!r} must be a list such as ["no", "yes"]')
    named = None if classes is None else tuple(str(name) for name in classes)
    return Schema({name: _parse_column(name, column) for name, column in columns.items()}, named)


def _parse_column(name: str, table: dict[str, Any]) -> Column:
    kind = KINDS.get(str(table.get("kind")))
    if kind is None:
        raise InvalidInput(f"column {name!r}: kind={table.get('kind')!r} must be one of {', '.join(KINDS)}")
    types = {f.name: str(f.type) for f in fields(kind)}
    values = {key: value for key, value in table.items() if key != "kind"}
    for key, value in values.items():
        if key not in types:
            raise InvalidInput(
                f"column {name!r} has no key {key!r}: a {table['kind']} has {', '.join(types) or 'none'}"
            )
        values[key] = _parse_value(f"column {name!r}: {key}", value, types[key])
    try:
        return kind(**values)
    except InvalidInput as error:
        raise InvalidInput(f"column {name!r}: {error}") from None


def _parse_value(what: str, value: Any, kind: str) -> Any:
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(str(part) for part in value)
    wanted: dict[str, tuple[type, ...]] = {"float | None": (int, float), "bool": (bool,), "int": (int,), "str": (str,)}
    if not isinstance(value, wanted.get(kind, ())) or (isinstance(value, bool) and kind != "bool"):
        raise InvalidInput(f"{what}={value!r} must be of type {kind.removesuffix(' | None')}")
    return value


def _to_plain(column: Column) -> dict[str, Any]:
    kind = next(name for name, cls in KINDS.items() if type(column) is cls)
    given = {f.name: getattr(column, f.name) for f in fields(column)}
    kept = {
        key: list(value) if isinstance(value, tuple) else value for key, value in given.items() if value is not None
    }
    return {"kind": kind, **kept}
