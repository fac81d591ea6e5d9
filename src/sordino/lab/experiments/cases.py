"""Configurations: one TOML file per method and dataset, with the settings of every ε and where they come from.

::

    method = "dpsur"
    provenance = "DPSUR, table 2; noise by ε from its repository"     # one line; the story is in docs/provenance.md
    footing = "linear"                  # optional: what the methods that it is compared with share with it
    epsilons = [1.0, 2.0, 3.0, 4.0]
    average = 0.4                       # optional
    delta = 1e-5                        # optional
    published = "rdp"                   # optional: who prices it in its paper

    [data]
    name = "fashion-mnist"              # the other keys are options of sordino.data.load, and public = 500

    [features]                          # optional
    kind = "scatter"
    groups = 27

    [model]
    name = "scatter-cnn"

    [optimizer]
    kind = "sgd"
    lr = 4.0

    [recipe]
    name = "dpsur"
    batch_size = 2048

    [epsilon.1]                         # what is different at this ε; "0.5" needs quotes
    recipe = {noise_multiplier = 4.0, validation_noise = 1.3}
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino import toml
from sordino.errors import InvalidInput
from sordino.experiments.case import Case

_TABLES = ("data", "features", "model", "optimizer", "recipe")
_CASE = ("average", "delta", "published")
_VALUES = ("method", "footing", "provenance", "epsilons", *_CASE, "epsilon")
Table = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """One configuration: a method on a dataset at every ε."""

    dataset: str
    method: str
    footing: str
    provenance: str
    epsilons: tuple[float, ...]
    base: Table
    by_epsilon: dict[float, Table]

    def case(self, epsilon: float, seed: int = 0, accounting: str = "proven") -> Case:
        """The run at one ε; where the file says nothing about this ε, its general settings."""
        merged = _merged(self.base, self.by_epsilon.get(float(epsilon), {}))
        return Case(
            dataset=self.dataset, method=self.method, epsilon=float(epsilon), seed=seed, accounting=accounting, **merged
        )

    def cases(
        self, epsilons: Iterable[float] | None = None, seeds: Iterable[int] = (0,), accounting: str = "proven"
    ) -> list[Case]:
        """Every ε (the file's own unless given) with every seed."""
        chosen = list(epsilons or self.epsilons)
        return [self.case(epsilon, seed, accounting) for seed in seeds for epsilon in chosen]


def read(path: Path) -> Settings:
    """The configuration in a file; every mistake is named in one line."""
    tables = toml.read(path)
    if unknown := sorted(set(tables) - {*_TABLES, *_VALUES}):
        raise InvalidInput(f"configuration {path} has no key {unknown[0]!r}: it has {', '.join((*_VALUES, *_TABLES))}")
    if missing := [key for key in ("method", "provenance", "data", "model", "recipe") if key not in tables]:
        raise InvalidInput(f"configuration {path} lacks {missing[0]}: see docs/experiments.md")
    data = dict(tables["data"])
    if "name" not in data:
        raise InvalidInput(f'configuration {path} lacks the name of its data: [data] name = "mnist"')
    base: Table = {key: tables[key] for key in (*_TABLES, *_CASE) if key in tables}
    return Settings(
        dataset=str(data.pop("name")),
        method=str(tables["method"]),
        footing=_footing(path, tables),
        provenance=str(tables["provenance"]),
        epsilons=tuple(float(epsilon) for epsilon in tables.get("epsilons", (1, 2, 3, 4))),
        base={**base, "data": data},
        by_epsilon=_by_epsilon(path, tables.get("epsilon", {})),
    )


def _footing(path: Path, tables: Table) -> str:
    """Named in the method too, so that a method has one name in every list."""
    footing = str(tables.get("footing", ""))
    if footing and not str(tables["method"]).startswith(f"{footing}-"):
        raise InvalidInput(f"configuration {path}: method={tables['method']!r} must begin with its footing {footing!r}")
    return footing


def catalogue(folder: Path | None = None) -> dict[tuple[str, str], Settings]:
    """Every configuration in a folder (that of the installation unless given) by dataset and method."""
    found: dict[tuple[str, str], Settings] = {}
    where = folder or default_folder()
    for path in sorted(where.rglob("*.toml")):
        settings = read(path)
        key = (settings.dataset, settings.method)
        if key in found:
            raise InvalidInput(f"configuration {path}: method {key[1]} on {key[0]} is configured twice")
        found[key] = settings
    if not found:
        raise InvalidInput(f"no configurations in {where}: set SORDINO_CONFIGS to a folder of them")
    return found


def default_folder() -> Path:
    """The folder SORDINO_CONFIGS, else the configurations that were installed, else those of the checkout."""
    if named := os.environ.get("SORDINO_CONFIGS"):
        return Path(named)
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "configs"


def _by_epsilon(path: Path, tables: Table) -> dict[float, Table]:
    found = {}
    for epsilon, table in tables.items():
        if not isinstance(table, dict) or set(table) - {*_TABLES, *_CASE}:
            raise InvalidInput(f"configuration {path}: [epsilon.{epsilon}] must hold tables such as recipe = {{...}}")
        try:
            found[float(epsilon)] = table
        except ValueError:
            raise InvalidInput(f"configuration {path}: [epsilon.{epsilon}] must be a number in quotes") from None
    return found


def _merged(base: Table, more: Table) -> Table:
    """`more` on top of `base`, table by table."""
    both = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in more.items()}
    return {**base, **both}
