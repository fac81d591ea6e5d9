"""Cases and configurations.

A case is everything that decides one run, as plain data, so that equal cases are the same run and may be skipped. A
configuration is a TOML file: a method on a dataset with the settings of every ε and where they come from.

::

    method = "dpsur"
    provenance = "DPSUR, table 2; noise by ε from its repository"     # one line; the story is in docs/provenance.md
    footing = "linear"                  # optional: what it shares with the methods that it is compared with
    epsilons = [1.0, 2.0, 3.0, 4.0]
    average = 0.4                       # optional
    delta = 1e-5                        # optional
    published = "rdp"                   # optional: who prices it in its paper

    [data]
    name = "fashion-mnist"              # the other keys are options of sordino.lab.data.load, and public = 500

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

Methods that share most of their settings may share a file. Instead of ``method`` it has a table for each method with
its differences: ``[methods.linear-dpsur]``, and ``[methods.linear-dpsur.epsilon.1]``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput
from sordino.names import read_toml

ACCOUNTINGS = ("proven", "published")
SHORT_TEST_NOISE = 5.0
SPARSE = 20
EVALUATIONS = 60
"""How often, at most, a run is evaluated on the test set and saved; it changes no result, so no case has it."""
Options = Mapping[str, Any]
Table = dict[str, Any]
_TABLES = ("data", "features", "model", "optimizer", "recipe")
_CASE = ("average", "delta", "published")
_OF_A_METHOD = ("provenance", "epsilons", *_CASE, "epsilon")
_VALUES = ("method", "methods", "footing", *_OF_A_METHOD)


@dataclass(frozen=True)
class Case:
    """One run. `method` is the name in the tables; the other fields say what it does, as in a configuration.

    `data` are options of `sordino.lab.data.load`, and ``public``: how many held-out records the mechanism may look at
    (they are then not evaluated on). `features` is empty for raw inputs (see `sordino.lab.experiments.problem`).
    `model`, `optimizer` and `recipe` have a ``name`` or ``kind`` and its options. `average` is the share of the last
    iterates whose mean is evaluated, which is post-processing and so is free. `records` keeps only the first so many
    training records. With accounting="published", `published` names the paper's accountant if the recipe has another.
    `seed` decides how the model starts; the noise is secure, and never repeats.
    """

    dataset: str
    method: str
    epsilon: float
    seed: int = 0
    delta: float = 1e-5
    accounting: str = "proven"
    published: str | None = None
    records: int | None = None
    average: float = 0.0
    data: Options = field(default_factory=dict)
    features: Options = field(default_factory=dict)
    model: Options = field(default_factory=dict)
    optimizer: Options = field(default_factory=dict)
    recipe: Options = field(default_factory=dict)
    short: bool = False
    """Whether the case was made smaller to try it out; such a run says nothing about its method."""

    def __post_init__(self) -> None:
        if self.accounting not in ACCOUNTINGS:
            raise InvalidInput(f"accounting={self.accounting!r} must be one of {', '.join(ACCOUNTINGS)}")
        if not 0 <= self.average < 1:
            raise InvalidInput(f"average={self.average} must be in [0, 1): the share of the last iterates to average")
        for table, key in (("model", "name"), ("recipe", "name")):
            if not isinstance(getattr(self, table).get(key), str):
                raise InvalidInput(f"[{table}] of method {self.method} needs a {key}: see docs/experiments.md")

    @cached_property
    def label(self) -> str:
        """A readable file name that differs whenever anything else differs."""
        told = {key: value for key, value in self.to_dict().items() if value not in (None, {}, 0.0)}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        basis = "" if self.accounting == "proven" else f"-{self.accounting}"
        return f"{self.dataset}-{self.method}{basis}-eps{self.epsilon:g}-seed{self.seed}-{digest}"

    def shortened(self, records: int | None = None, steps: int | None = None) -> Case:
        """Return a small case of the same kind, to try it out: fewer records, smaller draws, few steps, other noise."""
        recipe = dict(self.recipe)
        share = SPARSE if self.published == "tcdp" else 4  # its theorem about sampling is for rates below a tenth
        if records is not None:
            for key in ("batch_size", "validation_size"):
                if key in recipe:
                    recipe[key] = max(1, min(int(recipe[key]), records // share))
        if steps is not None:
            for key in ("noise_multiplier", "epochs"):
                recipe.pop(key, None)
            recipe["steps"] = steps
            if "validation_noise" in recipe:  # with few records a test is expensive: leave something for training
                recipe["validation_noise"] = max(float(recipe["validation_noise"]), SHORT_TEST_NOISE)
        return replace(self, records=records or self.records, recipe=recipe, short=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Case:
        """Read what `to_dict` wrote."""
        if unknown := sorted(set(plain) - {f.name for f in fields(cls)}):
            raise InvalidInput(f"case has no field {unknown[0]!r}: it was written by another version")
        return cls(**plain)


@dataclass(frozen=True)
class Settings:
    """A configured method: on a dataset, at every ε."""

    dataset: str
    method: str
    footing: str
    provenance: str
    epsilons: tuple[float, ...]
    base: Table
    by_epsilon: dict[float, Table]

    def case(self, epsilon: float, seed: int = 0, accounting: str = "proven") -> Case:
        """Return the run at one ε; with the general settings if the file says nothing about this ε."""
        merged = _merge(self.base, self.by_epsilon.get(float(epsilon), {}))
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
    """Read the configuration in a file of one method; an error names the mistake in one line."""
    found = read_methods(path)
    if len(found) != 1:
        raise InvalidInput(f"configuration {path} has {len(found)} methods, must have 1: keep one of its [methods]")
    return found[0]


def read_methods(path: Path) -> list[Settings]:
    """Every method that a file configures."""
    tables = read_toml(path)
    if unknown := sorted(set(tables) - {*_TABLES, *_VALUES}):
        raise InvalidInput(f"configuration {path} has no key {unknown[0]!r}: it has {', '.join((*_VALUES, *_TABLES))}")
    if "methods" not in tables:
        return [_read_method(path, tables)]
    if "method" in tables:
        raise InvalidInput(f"configuration {path} has both method and methods: leave one out")
    shared = {key: value for key, value in tables.items() if key != "methods"}
    return [_read_method(path, _vary(path, shared, name, changes)) for name, changes in tables["methods"].items()]


def _read_method(path: Path, tables: Table) -> Settings:
    if missing := [key for key in ("method", "provenance", "data", "model", "recipe") if key not in tables]:
        raise InvalidInput(f"configuration {path} lacks {missing[0]}: see docs/experiments.md")
    data = dict(tables["data"])
    if "name" not in data:
        raise InvalidInput(f'configuration {path} lacks the name of its data: [data] name = "mnist"')
    method, footing = str(tables["method"]), str(tables.get("footing", ""))
    if footing and not method.startswith(f"{footing}-"):  # so that a method has one name in every list
        raise InvalidInput(f"configuration {path}: method={method!r} must begin with its footing {footing!r}")
    base: Table = {key: tables[key] for key in (*_TABLES, *_CASE) if key in tables}
    return Settings(
        dataset=str(data.pop("name")),
        method=method,
        footing=footing,
        provenance=str(tables["provenance"]),
        epsilons=tuple(float(epsilon) for epsilon in tables.get("epsilons", (1, 2, 3, 4))),
        base={**base, "data": data},
        by_epsilon=_read_epsilons(path, tables.get("epsilon", {})),
    )


def _vary(path: Path, shared: Table, method: str, changes: Table) -> Table:
    """Make the tables of one of several methods: the shared tables with its own changes on top, ε by ε."""
    if unknown := sorted(set(changes) - {*_TABLES, *_OF_A_METHOD}):
        raise InvalidInput(f"configuration {path}: [methods.{method}] has no key {unknown[0]!r}")
    by_epsilon, own = dict(shared.get("epsilon", {})), changes.get("epsilon", {})
    for epsilon, table in own.items():
        by_epsilon[epsilon] = _merge(by_epsilon.get(epsilon, {}), table)
    return {**_merge(shared, changes), "method": method, "epsilon": by_epsilon}


def catalogue(folder: Path | None = None) -> dict[tuple[str, str], Settings]:
    """Every configuration in a folder (that of the installation unless given) by dataset and method."""
    found: dict[tuple[str, str], Settings] = {}
    where = folder or default_folder()
    for path in sorted(where.rglob("*.toml")):
        for settings in read_methods(path):
            key = (settings.dataset, settings.method)
            if key in found:
                raise InvalidInput(f"configuration {path}: method {key[1]} on {key[0]} is configured twice")
            found[key] = settings
    if not found:
        raise InvalidInput(f"no configurations in {where}: set SORDINO_CONFIGS to a folder of them")
    return found


def default_folder() -> Path:
    """Return the folder SORDINO_CONFIGS, else the configurations of the laboratory."""
    named = os.environ.get("SORDINO_CONFIGS")
    return Path(named) if named else Path(__file__).parents[1] / "configs"


def _read_epsilons(path: Path, tables: Table) -> dict[float, Table]:
    found = {}
    for epsilon, table in tables.items():
        if not isinstance(table, dict) or set(table) - {*_TABLES, *_CASE}:
            raise InvalidInput(f"configuration {path}: [epsilon.{epsilon}] must hold tables such as recipe = {{...}}")
        try:
            found[float(epsilon)] = table
        except ValueError:
            raise InvalidInput(f"configuration {path}: [epsilon.{epsilon}] must be a number in quotes") from None
    return found


def _merge(base: Table, more: Table) -> Table:
    """`more` on top of `base`, table by table."""
    both = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in more.items()}
    return {**base, **both}
