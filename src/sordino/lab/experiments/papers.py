"""The papers' tables: the printed figures (papers.toml), and the cases that rerun each cell."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from sordino.errors import InvalidInput
from sordino.lab.experiments.cases import Case, Settings

NON_PRIVATE = "non-private"


@dataclass(frozen=True)
class Cell:
    """One printed figure: its dataset, the label of its row, and its ε (or, in a table of ε, an accuracy)."""

    dataset: str
    label: str
    column: float
    printed: float


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper. `kind` says what its figures are: accuracy, epsilon, seconds or attack."""

    name: str
    where: str
    kind: str
    epsilons: tuple[float, ...]
    columns: dict[str, list[float]]
    levels: dict[str, list[float]]
    variants: dict[str, dict[str, Any]]
    printed: dict[str, dict[str, list[float]]]

    @property
    def has_non_private(self) -> bool:
        """Whether it prints figures of models that are not private."""
        return any(label.endswith(NON_PRIVATE) for figures in self.printed.values() for label in figures)

    def non_private(self, datasets: Iterable[str]) -> list[Cell]:
        """Return the figures of models that are not private: at ε = ∞."""
        return [
            Cell(dataset, label, math.inf, figure)
            for dataset in datasets
            for label, figures in self.printed[dataset].items()
            if label.endswith(NON_PRIVATE)
            for figure in figures
        ]

    def cells(self, datasets: Iterable[str]) -> list[Cell]:
        """Return the figures of `datasets`, without those of models that are not private."""
        return [
            Cell(dataset, label, column, figure)
            for dataset in datasets
            for label, figures in self.printed[dataset].items()
            if not label.endswith(NON_PRIVATE)
            for column, figure in zip(self._columns(dataset, figures), figures, strict=True)
        ]

    def epsilon_of(self, cell: Cell) -> float:
        """Return the ε of the runs behind a cell."""
        return self.epsilons[0] if self.kind == "epsilon" else cell.column

    def case(self, cell: Cell, seed: int, accounting: str, known: Mapping[tuple[str, str], Settings]) -> Case:
        """Return the run behind a cell: the configured method with the changes of the row.

        Its ``published``, the accountant of this paper, is only for published accounting: proven runs are the same in
        every table.
        """
        changes = dict(self.variants[cell.label])
        method = str(changes.pop("method"))
        if accounting == "proven":
            changes.pop("published", None)
        if (cell.dataset, method) not in known:
            raise InvalidInput(f"method={method!r} is not configured for {cell.dataset}: add it to configs/")
        base = known[cell.dataset, method].case(self.epsilon_of(cell), seed, accounting)
        tables = {key: value for key, value in changes.items() if isinstance(value, dict) and key != "model"}
        merged: dict[str, Any] = {key: {**getattr(base, key), **value} for key, value in tables.items()}
        return replace(base, **{**changes, **merged})  # another model has its own options, so they are not merged

    def require(self, dataset: str | None) -> list[str]:
        """Return the datasets to run: all, or the requested one."""
        if dataset is not None and dataset not in self.printed:
            raise InvalidInput(f"dataset={dataset!r} is not in {self.name}: it has {', '.join(self.printed)}")
        return list(self.printed) if dataset is None else [dataset]

    def _columns(self, dataset: str, figures: Sequence[float]) -> Sequence[float]:
        if self.kind == "epsilon":
            return self.levels[dataset]
        return self.columns.get(dataset) or self.epsilons or [0.0] * len(figures)


@cache
def paper_tables() -> dict[str, PaperTable]:
    """Every table by its name, such as ``"dpsur:table2"``."""
    text = resources.files("sordino.lab.experiments").joinpath("papers.toml").read_text("utf-8")
    return {
        name: PaperTable(
            name,
            table["where"],
            table["kind"],
            tuple(table.get("epsilons", ())),
            table.get("columns", {}),
            table.get("levels", {}),
            table.get("variants", {}),
            table["printed"],
        )
        for name, table in tomllib.loads(text).items()
    }


def paper_table(name: str) -> PaperTable:
    """Return the table called `name`."""
    tables = paper_tables()
    if name not in tables:
        raise InvalidInput(f"table={name!r} is not known: choose one of {', '.join(tables)}")
    return tables[name]


def best_printed(dataset: str, epsilon: float) -> tuple[float, str] | None:
    """Return the best accuracy that any paper prints for private training on a dataset at an ε, and in which table."""
    found = [
        (cell.printed, table.name)
        for table in paper_tables().values()
        if table.kind == "accuracy" and dataset in table.printed
        for cell in table.cells([dataset])
        if cell.column == epsilon
    ]
    return max(found, default=None)
