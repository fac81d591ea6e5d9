"""The mechanisms: one file per paper, found by looking into this folder.

A file lists its mechanisms in ``MECHANISMS``, a tuple of `Mechanism`; parts that any recipe may use are listed in
``PARTS``. The command line, completion, the report, the index of the documentation, the names on disk and the
conformance tests read them from here, so a new file needs no other change.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.recipe import Recipe


@dataclass(frozen=True)
class Mechanism:
    """A way to train privately: its names for people and files, where it is published, and how to make its recipe.

    `name` is used in ``recipes.NAME(...)`` and ``sordino train --recipe NAME``; `title` and `summary` together form one
    sentence. `parts` are the classes that the mechanism adds, by the type of their slot and by their name in files,
    which must never change: ``{"Weighing": {"automatic": Automatic}}``. `example` are the options, in addition to those
    that all recipes share, with which a small run can be audited.
    """

    name: str
    title: str
    summary: str
    paper: str
    recipe: Callable[..., Recipe]
    parts: Mapping[str, Mapping[str, type]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Describe the mechanism in one sentence, for a report."""
        return f"{self.title}: {self.summary}"


def find_all() -> dict[str, Mechanism]:
    """Find every mechanism by its name, in alphabetical order.

    >>> from sordino import mechanisms
    >>> mechanisms.find_all()["dpsgd"].title
    'DP-SGD'
    """
    found: dict[str, Mechanism] = {}
    for module in _modules():
        for mechanism in getattr(module, "MECHANISMS", ()):
            if mechanism.name in found:
                raise InvalidInput(f"two mechanisms are called {mechanism.name!r}: rename that of {module.__name__}")
            found[mechanism.name] = mechanism
    return dict(sorted(found.items()))


def find(name: str) -> Mechanism:
    """Find the mechanism of this name; ``growing-mu`` is ``growing_mu``."""
    known = find_all()
    mechanism = known.get(name.replace("-", "_"))
    if mechanism is None:
        raise InvalidInput(f"recipe={name!r} must be one of {', '.join(known)}")
    return mechanism


def find_parts() -> dict[str, dict[str, type]]:
    """Find every part that is not a plain one: by the type of its slot, and by its name on disk."""
    found: dict[str, dict[str, type]] = {}
    taken: dict[str, type] = {}
    for module in _modules():
        own = (mechanism.parts for mechanism in getattr(module, "MECHANISMS", ()))
        for slots in (getattr(module, "PARTS", {}), *own):
            for slot, parts in slots.items():
                for name, cls in parts.items():
                    if taken.setdefault(name, cls) is not cls:
                        raise InvalidInput(f"two parts are called {name!r} on disk: rename that of {module.__name__}")
                    found.setdefault(slot, {})[name] = cls
    return found


def list_names() -> list[str]:
    """Return the names of all mechanisms, read from the files' text: shell completion cannot wait for torch."""
    return sorted(name for file in _files() for name in _written_names(file))


def _modules() -> list[ModuleType]:
    return [import_module(f"{__name__}.{file.name}") for file in _files()]


def _files() -> list[pkgutil.ModuleInfo]:
    return [file for file in pkgutil.iter_modules(__path__) if not file.name.startswith("_")]


def _written_names(file: pkgutil.ModuleInfo) -> Iterator[str]:
    spec = file.module_finder.find_spec(file.name, None)
    text = spec.loader.get_source(file.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    for node in ast.walk(ast.parse(text or "")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == Mechanism.__name__:
            for given in (*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")):
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    yield given.value
