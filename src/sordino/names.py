"""Names on disk are not places in code: what recipes call their parts, and frozen parts to TOML and back.

A file may come from anyone. So it can only use a name from the tables below, or one that a mechanism declares for its
own part; nothing is imported because a file names it. A class that moves keeps its name; a name, once written, stays
readable forever. Version 0.1 wrote the dotted path of the class: those names are in `PARTS_OF_0_1`. What a ledger calls
its events is in `sordino.accounting.events`.

A part is a frozen dataclass. In TOML it is a table whose `part` is its name, such as ``part = "automatic"``. A document
can say nothing else: an unknown name is refused unread.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import tomli_w

from sordino.accounting.events import fits
from sordino.errors import InvalidInput

MOST_CHARACTERS = 1_000_000
"""A recipe has one thousand characters, the schema of a table with 1,000 columns a hundred thousand."""
UNWRITTEN = {"unwritten": True}
"""Metadata of a field that is not written at its default: some documents and fingerprints are older than the field."""
DEEPEST = 32
"""How deep tables may stand within tables; a recipe has four levels."""
_SHOWN = 60

_Slots = dict[str, dict[str, str]]
PLAIN: _Slots = {
    "Recipe": {"recipe": "sordino.recipe:Recipe"},
    "Budget": {"budget": "sordino.accounting.budget:Budget"},
    "Filter": {"rdp-filter": "sordino.accounting.filtered:Filter"},
    "Optimizer": {"optimizer": "sordino.recipe:Optimizer"},
    "Schedule": {"constant": "sordino.parts:Constant"},
    "Sampler": {"poisson": "sordino.parts:Poisson", "foreign": "sordino.parts:Foreign"},
    "Norms": {"exact": "sordino.parts:Exact"},
    "Weighing": {"flat": "sordino.parts:Flat", "automatic": "sordino.parts:Automatic"},
    "Selector": {"always": "sordino.parts:Always"},
    "Noise": {"independent": "sordino.noise:Independent"},
}
"""The plain parts that each slot may hold, by the slot's type; mechanisms declare their parts in their own files."""

UNNAMED = frozenset({"Optimizer"})
"""Slots whose table means the plain part if it names none: at first there was only this part, and files named none."""

PARTS_OF_0_1 = {
    "recipe.Recipe": "recipe",
    "accounting.budget.Budget": "budget",
    "accounting.filter.Filter": "rdp-filter",
    "propose.Optimizer": "optimizer",
    "schedules.Constant": "constant",
    "schedules.GrowingMu": "growing-mu",
    "schedules.SensitivityDecay": "sensitivity-decay",
    "schedules.ExponentialDecay": "exponential-decay",
    "schedules.TimeDecay": "time-decay",
    "schedules.StepDecay": "step-decay",
    "schedules.PolynomialDecay": "polynomial-decay",
    "schedules.VarianceDecay": "variance-decay",
    "schedules.PerEpoch": "per-epoch",
    "schedules.Levels": "levels",
    "sampling.poisson.Poisson": "poisson",
    "sampling.foreign.Foreign": "foreign",
    "sampling.importance.Importance": "importance",
    "norms.Exact": "exact",
    "projection.Projected": "jl",
    "weighing.Flat": "flat",
    "weighing.Automatic": "automatic",
    "weighing.Importance": "importance-weights",
    "selection.always.Always": "always",
    "selection.annealing.Annealing": "annealing",
    "selection.selective.Selective": "selective",
    "selection.step_length.StepLength": "step-length",
    "selection.noisy_test.NoisyTest": "noisy-test",
}


@dataclass(frozen=True)
class Names:
    """One table of names: `places` says where each class lives now, `old` what version 0.1 called it."""

    kind: str
    places: Callable[[], Mapping[str, str]]
    old: Mapping[str, str]

    def place(self, name: object) -> str | None:
        """Return where the class of this name lives, or None if no table has the name; nothing is imported."""
        return self.places().get(self.old.get(name, name)) if isinstance(name, str) else None

    def find(self, name: object) -> type:
        """Return the class of this name; refuse an unknown name."""
        place = self.place(name)
        if place is None:
            shown = repr(name[:60] if isinstance(name, str) else name)[:62]
            raise InvalidInput(f"{self.kind}={shown} is not known: it is not one of Sordino's, or from a later version")
        module, _, cls = place.partition(":")
        found = getattr(import_module(module), cls)
        assert isinstance(found, type)
        return found

    def name(self, cls: type) -> str:
        """Return what to write for a class; refuse a class that is not in the table, as it could not be read back."""
        found = {place: name for name, place in self.places().items()}.get(_place_of(cls))
        if found is None:
            raise InvalidInput(
                f"{cls.__module__}.{cls.__qualname__} has no name on disk, so it cannot be written as {self.kind}: "
                "only parts of Sordino have one; keep what uses your own in code"
            )
        return found

    def first(self, cls: type) -> str:
        """Return what version 0.1 wrote for a class: fingerprints hash that text, so they never change."""
        name = self.name(cls)
        return next((old for old, now in self.old.items() if now == name), name)

    def freeze(self) -> Names:
        """Return a copy of the table as it is now, so that looking up many names lists the mechanisms only once."""
        places = self.places()
        return dataclasses.replace(self, places=lambda: places)


def list_slots() -> _Slots:
    """List where each part may stand, by the type of its slot and by its name, the plain ones first.

    A mechanism cannot take a name that is in use: old files would change their meaning.
    """
    found = {slot: dict(places) for slot, places in PLAIN.items()}
    for slot, parts in import_module("sordino.mechanisms").find_parts().items():  # by name: they stand above this file
        for name, cls in parts.items():
            if any(name in places for places in found.values()):
                raise InvalidInput(f"two parts are called {name!r} on disk: give {_place_of(cls)} another name")
            found.setdefault(slot, {})[name] = _place_of(cls)
    return found


def _place_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _list_parts() -> dict[str, str]:
    return {name: place for places in list_slots().values() for name, place in places.items()}


PARTS = Names("part", _list_parts, PARTS_OF_0_1)


# -- to TOML and back -------------------------------------------------------------------------------------------------


def to_toml(part: Any, first: bool = False) -> str:
    """A part as a TOML document, `first` with the names that version 0.1 wrote; fields that are None are left out."""
    known = PARTS.freeze()
    return tomli_w.dumps(_table(part, known.first if first else known.name))


def from_toml(text: str, default: type) -> Any:
    """Return the part that a TOML document describes; its class is `default` where the document names none."""
    return _part(parse_toml(text, "this"), default, list_slots())


def read_toml(path: Path, what: str = "configuration") -> dict[str, Any]:
    """Read the tables of a TOML file that a user wrote; an error names the mistake in one line."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise InvalidInput(f"cannot read {what} {path}: it is not a file")
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise InvalidInput(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} {path} is not a TOML document: {error}") from None
    return parse_toml(text, f"{what} {path}")


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Read the tables of a TOML document from anyone; its size, its depth and its numbers are bounded."""
    if len(text) > MOST_CHARACTERS:
        raise InvalidInput(f"{what} has more than {MOST_CHARACTERS:,} characters: it is not a document of Sordino")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits raises a plain ValueError
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
    raise InvalidInput(f"{what} has tables more than {DEEPEST} deep: it is not a document of Sordino")


def _table(part: Any, name: Callable[[type], str]) -> dict[str, Any]:
    table: dict[str, Any] = {"part": name(type(part))}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        plain = "unwritten" in f.metadata and value == _default(f)
        if value is not None and not plain:
            table[f.name] = _table(value, name) if dataclasses.is_dataclass(value) else _plain(value, f.name)
    return table


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, name) for v in value]
    raise InvalidInput(f"{name}={value!r} cannot be written to TOML: keep this recipe in code")


def _part(table: dict[str, Any], default: type | None, slots: _Slots) -> Any:
    named = table.get("part")
    cls = PARTS.find(named) if named is not None else default
    if cls is None:
        raise InvalidInput(f'table with {", ".join(map(repr, table))[:_SHOWN]} must name its part: part = "flat"')
    fields = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    given = {key: value for key, value in table.items() if key != "part"}
    if unknown := sorted(set(given) - set(fields)):
        raise InvalidInput(f"{cls.__name__} has no field {unknown[0][:_SHOWN]!r}: it has {', '.join(sorted(fields))}")
    values = {key: _value(value, fields[key], f"{cls.__name__}.{key}", slots) for key, value in given.items()}
    try:
        return cls(**values)
    except (TypeError, ArithmeticError) as error:
        raise InvalidInput(f"{cls.__name__}: {error}") from None


def _value(value: Any, kind: str, where: str, slots: _Slots) -> Any:
    """Return the value of a field annotated with `kind`: a part that its slot allows, or a plain value."""
    slot = kind.removesuffix(" | None")
    if (allowed := slots.get(slot)) is not None:
        if not isinstance(value, dict):
            raise InvalidInput(f'{where}={repr(value)[:_SHOWN]} must be a table with part = "{next(iter(allowed))}"')
        if "part" in value and PARTS.place(value["part"]) not in allowed.values():
            shown = repr(value["part"])[:_SHOWN]
            raise InvalidInput(f"{where} has part={shown}: it must be one of {', '.join(allowed)}")
        plain = len(allowed) == 1 or slot in UNNAMED
        return _part(value, PARTS.find(next(iter(allowed))) if plain else None, slots)
    if slot == "tuple[float, ...]" and isinstance(value, list):
        return tuple(_value(each, "float", where, slots) for each in value)
    infinite = isinstance(value, float) and math.isinf(value)
    if infinite or not fits(value, "str" if slot == "Basis" else kind):
        raise InvalidInput(f"{where}={repr(value)[:_SHOWN]} must be {'finite' if infinite else 'of type ' + kind}")
    return value


def spell(value: object) -> str:
    """Spell a value as the same text in every process: plain values as they are, anything else by class and fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(spell, value))}]"
    held = {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        part = getattr(value, field.name)
        if "unwritten" not in field.metadata or part != _default(field):
            held[field.name] = part
    return f"{_spell_class(type(value))}({', '.join(f'{name}={spell(part)}' for name, part in held.items())})"


def _spell_class(cls: type) -> str:
    """Spell a class as version 0.1 did: fingerprints of recipes with a user's own parts are made from this."""
    named = next((name for name, place in PARTS.places().items() if place == _place_of(cls)), None)
    old = next((old for old, name in PARTS.old.items() if name == named), "")
    return old.rpartition(".")[2] or cls.__qualname__
