"""Frozen parts to TOML and back.

A part is a frozen dataclass; in TOML it is a table whose `part` names its class below `sordino.`, such as
``part = "weighing.Automatic"``. No registry is kept, and nothing outside the package can be named.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from sordino.errors import InvalidInput

_PACKAGE = "sordino."


def dumps(part: Any) -> str:
    """A part as a TOML document; fields that are None are left out."""
    return tomli_w.dumps(_table(part))


def loads(text: str, default: type) -> Any:
    """The part that a TOML document describes; its class is `default` where the document names none."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"not a TOML document: {error}") from None
    return _part(table, default)


def read(path: Path, what: str = "configuration") -> dict[str, Any]:
    """The tables of a TOML file that a user wrote; every mistake is named in one line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {what} {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{what} {path} is not a TOML document: {error}") from None


def _table(part: Any) -> dict[str, Any]:
    cls = type(part)
    if not cls.__module__.startswith(_PACKAGE):
        raise InvalidInput(
            f"{cls.__module__}.{cls.__qualname__} cannot be written to TOML: only parts of Sordino can; "
            "keep a recipe with parts of your own in code"
        )
    table: dict[str, Any] = {"part": f"{cls.__module__}.{cls.__qualname__}".removeprefix(_PACKAGE)}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value is not None:
            table[f.name] = _table(value) if dataclasses.is_dataclass(value) else _plain(value, f.name)
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
    cls = _class(str(named)) if named is not None else default
    if cls is None:
        raise InvalidInput(f'table with {", ".join(map(repr, table))} must name its class: part = "module.Class"')
    known = {f.name for f in dataclasses.fields(cls)}
    given = {key: value for key, value in table.items() if key != "part"}
    if unknown := sorted(set(given) - known):
        raise InvalidInput(f"{cls.__name__} has no field {unknown[0]!r}: it has {', '.join(sorted(known))}")
    values = {key: _value(value) for key, value in given.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise InvalidInput(f"{cls.__name__}: {error}") from None


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _part(value, None)
    return tuple(value) if isinstance(value, list) else value


def _class(name: str) -> type:
    module, _, cls = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(_PACKAGE + module), cls) if module else None
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__.startswith(_PACKAGE)):
        raise InvalidInput(f"part={name!r} is not a part of Sordino: parts look like 'weighing.Flat'")
    return found
