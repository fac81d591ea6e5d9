"""Kinds, ranges and classes of a table, released with noise and charged to the ledger before the noise is drawn.

All releases together cost a declared share of ε. Each is a sum over records of something bounded:

1. **kinds**: of m columns, one histogram each (`tabular_kinds`) and half the number of different values. A record
   changes one count and at most one of the halves per column, so the sensitivity is √(m·(1 + 1/4)).
2. **scales**: mean and deviation of the k numbers within their released ranges, two Gaussian releases
   (`sordino.lab.features.private_normalisation`), sensitivity √k each.
3. **classes**: the labels whose noised count exceeds a threshold (`tabular_labels`).

What comes after them is a function of what was released: it costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sordino.accounting.budget import Budget
from sordino.accounting.calibration import noise_for
from sordino.accounting.events import DpEvent, GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.data import tabular_kinds, tabular_labels
from sordino.data.tabular import Table, numbers
from sordino.data.tabular_encoding import scaled
from sordino.data.tabular_schema import Column, Number, Schema
from sordino.errors import InvalidInput
from sordino.noise import Source, noised
from sordino.tables.normalising import private_normalisation

SHARE = 0.3
"""Of ε, for all releases together, unless another share is asked for."""
DISTINCT_WEIGHT = 0.5
UNLISTED_SHARE = 0.1
"""Of δ, for a class that only one record has."""
CERTAIN = 6.0
"""Fewer records than this many deviations of a count, and a histogram says nothing."""


@dataclass(frozen=True)
class Plan:
    """What has to be released about a table, with how much noise: public, and known before anything is read."""

    columns: tuple[str, ...]
    scales: bool
    classes: bool
    records: int
    noise_multiplier: float
    unlisted: float

    def events(self) -> list[tuple[DpEvent, int]]:
        """What it costs at most."""
        return _events(self.noise_multiplier, bool(self.columns), self.scales, self.classes, self.unlisted)

    @property
    def deviation(self) -> float:
        """Of the noise on one count of a histogram."""
        return self.noise_multiplier * math.sqrt(len(self.columns) * (1 + DISTINCT_WEIGHT**2))


def plan(schema: Schema, records: int, budget: Budget | None, share: float) -> Plan | None:
    """What `schema` leaves open, at the noise that costs `share` of the budget; None if nothing is open.

    Refuses what would be lost in the noise, before anything is spent.
    """
    if schema.complete:
        return None
    needed = "give --schema, or --bounds and --classes"
    if budget is None:
        raise InvalidInput(f"kinds, ranges or classes would be released within a budget: give --epsilon, or {needed}")
    if not 0 < share < 1:
        raise InvalidInput(f"prepare={share} must be in (0, 1): it is the share of epsilon for ranges and classes")
    columns, classes = tuple(schema.open), schema.classes is None
    scales, unlisted = bool(columns), UNLISTED_SHARE * budget.delta
    part = replace(budget, epsilon=share * budget.epsilon)
    noise = noise_for(part, lambda noise: _events(noise, bool(columns), scales, classes, unlisted), start=10.0)
    chosen = Plan(columns, scales, classes, records, noise.noise_multiplier, unlisted)
    _require_enough(chosen, needed)
    return chosen


def _events(noise: float, kinds: bool, scales: bool, classes: bool, unlisted: float) -> list[tuple[DpEvent, int]]:
    gaussian = GaussianDpEvent(noise)
    events: list[tuple[DpEvent, int]] = [(gaussian, kinds + 2 * scales)]
    return [*events, (tabular_labels.event(noise, unlisted), 1)] if classes else events


def _require_enough(chosen: Plan, needed: str) -> None:
    if chosen.columns and chosen.records < CERTAIN * chosen.deviation:
        wanted = math.ceil(CERTAIN * chosen.deviation)
        raise InvalidInput(
            f"records={chosen.records} are too few to release the ranges of {len(chosen.columns)} columns with noise: "
            f"it takes {wanted:,}: {needed}, or a larger epsilon"
        )
    if chosen.classes:
        wanted = math.ceil(2 * tabular_labels.threshold(chosen.noise_multiplier, chosen.unlisted))
        if chosen.records < wanted:
            raise InvalidInput(
                f"records={chosen.records} are too few to release the names of the classes with noise, it takes "
                f"{wanted:,}: give --classes, or a larger epsilon"
            )


def release(table: Table, target: str, schema: Schema, chosen: Plan, ledger: Ledger, source: Source) -> Schema:
    """`schema` with what was open, released from these records. Every event is in the ledger before its noise."""
    if chosen.columns:
        schema = schema.with_columns(_kinds(table, schema, chosen, ledger, source))
        schema = schema.with_columns(_scales(table, schema, chosen, ledger, source))
    if chosen.classes:
        receipt = ledger.charge(tabular_labels.event(chosen.noise_multiplier, chosen.unlisted), "names of the classes")
        noise = (chosen.noise_multiplier, chosen.unlisted)
        schema = replace(schema, classes=tabular_labels.released(table.columns[target], *noise, receipt, source))
    return schema


def released_counts(table: Table, chosen: Plan, ledger: Ledger, source: Source) -> tabular_kinds.Counts:
    """One row per column: its histogram and half the number of its different values, all with noise."""
    receipt = ledger.charge(GaussianDpEvent(chosen.noise_multiplier), "kinds and ranges of the columns")
    rows = np.stack([counts(table.columns[name]) for name in chosen.columns])
    released: tabular_kinds.Counts = noised(source, receipt, torch.from_numpy(rows), chosen.deviation).numpy()
    return released


def counts(cells: Sequence[str]) -> tabular_kinds.Counts:
    """What is noised about one column: a record changes it by at most √(1 + `DISTINCT_WEIGHT`²)."""
    return np.append(tabular_kinds.histogram(cells), DISTINCT_WEIGHT * tabular_kinds.distinct(cells))


def _kinds(table: Table, schema: Schema, chosen: Plan, ledger: Ledger, source: Source) -> dict[str, Column]:
    columns = {}
    for name, row in zip(chosen.columns, released_counts(table, chosen, ledger, source), strict=True):
        different = (float(row[-1]) - chosen.deviation) / DISTINCT_WEIGHT  # at least so many, more likely than not
        columns[name] = tabular_kinds.understood(
            row[:-1], different, chosen.deviation, chosen.records, schema.columns[name]
        )
    return columns


def _scales(table: Table, schema: Schema, chosen: Plan, ledger: Ledger, source: Source) -> dict[str, Column]:
    """Centre and spread of the numbers whose ranges were released; what is missing counts as the middle."""
    found = {name: schema.columns[name] for name in chosen.columns}
    columns = {name: column for name, column in found.items() if isinstance(column, Number)}
    if not columns:
        return {}
    within = np.stack([scaled(column, numbers(table.columns[name])) for name, column in columns.items()], axis=1)
    bound = math.sqrt(len(columns))  # every number lies within -1..1
    norm = private_normalisation(
        torch.from_numpy(within),
        records=chosen.records,
        clip=bound,
        square_clip=bound,
        noise_multiplier=chosen.noise_multiplier,
        ledger=ledger,
        source=source,
    )
    scaling = zip(norm.mean.tolist(), norm.std.tolist(), strict=True)
    return {name: _scaled(columns[name], *by) for name, by in zip(columns, scaling, strict=True)}


def _scaled(column: Number, mean: float, deviation: float) -> Number:
    assert column.low is not None
    assert column.high is not None
    middle, half = (column.high + column.low) / 2, (column.high - column.low) / 2
    return replace(column, center=middle + half * min(1.0, max(-1.0, mean)), spread=half * min(1.0, deviation))
