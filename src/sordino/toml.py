"""Frozen parts to TOML and back.

A part is a frozen dataclass; in TOML it is a table whose `part` is its name in `sordino.names`, such as
``part = "automatic"``. A document can say nothing else: a name that is not in that table is refused unread.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from sordino.accounting.events import fits
from sordino.errors import InvalidInput
from sordino.names import PARTS, SLOTS

MOST_CHARACTERS = 1_000_000
"""A recipe has one thousand, the schema of a table with 1,000 columns a hundred thousand."""
DEEPEST = 32
"""Tables within tables; a recipe has four."""
_SHOWN = 60


def dumps(part: Any, name: Callable[[type], str] = PARTS.name) -> str:
    """A part as a TOML document; fields that are None are left out."""
    return tomli_w.dumps(_table(part, name))


def loads(text: str, default: type) -> Any:
    """The part that a TOML document describes; its class is `default` where the document names none."""
    return _part(parse(text, "this"), default)


def read(path: Path, what: str = "configuration") -> dict[str, Any]:
    """The tables of a TOML file that a user wrote; every mistake is named in one line."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise InvalidInput(f"cannot read {what} {path}: it is no file")
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise InvalidInput(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} {path} is not a TOML document: {error}") from None
    return parse(text, f"{what} {path}")


def parse(text: str, what: str) -> dict[str, Any]:
    """The tables of a TOML document of whatever origin; its size, its depth and its numbers are bounded."""
    if len(text) > MOST_CHARACTERS:
        raise InvalidInput(f"{what} has more than {MOST_CHARACTERS:,} characters: it is no document of Sordino")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError of its own
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{what} is not a TOML document: {reason}") from None
    _require_shallow(tables, what)
    return tables


def _require_shallow(tables: dict[str, Any], what: str) -> None:
    level: list[Any] = [tables]
    for _ in range(DEEPEST):
        held = (list(value.values()) if isinstance(value, dict) else value for value in level)
        level = [item for items in held for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise InvalidInput(f"{what} has tables more than {DEEPEST} deep: it is no document of Sordino")


def _table(part: Any, name: Callable[[type], str]) -> dict[str, Any]:
    table: dict[str, Any] = {"part": name(type(part))}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value is not None:
            table[f.name] = _table(value, name) if dataclasses.is_dataclass(value) else _plain(value, f.name)
    return table


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, name) for v in value]
    raise InvalidInput(f"{name}={value!r} cannot be written to TOML: keep this recipe in code")


def _part(table: dict[str, Any], default: type | None) -> Any:
    named = table.get("part")
    cls = PARTS.find(named) if named is not None else default
    if cls is None:
        raise InvalidInput(f'table with {", ".join(map(repr, table))[:_SHOWN]} must name its part: part = "flat"')
    fields = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    given = {key: value for key, value in table.items() if key != "part"}
    if unknown := sorted(set(given) - set(fields)):
        raise InvalidInput(f"{cls.__name__} has no field {unknown[0][:_SHOWN]!r}: it has {', '.join(sorted(fields))}")
    values = {key: _value(value, fields[key], f"{cls.__name__}.{key}") for key, value in given.items()}
    try:
        return cls(**values)
    except (TypeError, ArithmeticError) as error:
        raise InvalidInput(f"{cls.__name__}: {error}") from None


def _value(value: Any, kind: str, where: str) -> Any:
    """What stands in a field annotated with `kind`: a part that its slot allows, or a plain value."""
    slot = kind.removesuffix(" | None")
    if slot in SLOTS:
        allowed = SLOTS[slot]
        if not isinstance(value, dict):
            raise InvalidInput(f'{where}={repr(value)[:_SHOWN]} must be a table with part = "{next(iter(allowed))}"')
        if "part" in value and PARTS.place(value["part"]) not in allowed.values():
            shown = repr(value["part"])[:_SHOWN]
            raise InvalidInput(f"{where} has part={shown}: it must be one of {', '.join(allowed)}")
        return _part(value, PARTS.find(next(iter(allowed))) if len(allowed) == 1 else None)
    infinite = isinstance(value, float) and math.isinf(value)
    if infinite or not fits(value, "str" if slot == "Basis" else kind):
        raise InvalidInput(f"{where}={repr(value)[:_SHOWN]} must be {'finite' if infinite else 'of type ' + kind}")
    return value
