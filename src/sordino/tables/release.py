"""Kinds, ranges and classes of a table, released with noise and charged to the ledger before the noise is drawn.

All releases together cost a declared share of ε. Each is a sum over records of something bounded:

1. **kinds**: of m columns, one histogram each and half the number of different values. A cell falls into one of `BINS`
   bins: missing, a word, a text, or a number by its sign and its order of magnitude. A record changes one count and at
   most one of the halves per column, so the sensitivity is √(m·(1 + 1/4)).
2. **scales**: mean and deviation of the k numbers within their released ranges, two Gaussian releases
   (`sordino.lab.features.private_normalisation`), sensitivity √k each.
3. **classes**: the labels whose noised count exceeds a threshold (`sordino.tables.labels`).

Everything after them is a function of released values, so it costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from sordino.accounting.budget import Budget
from sordino.accounting.calibration import noise_for
from sordino.accounting.events import DpEvent, GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.accounting.pricing import epsilon
from sordino.errors import InvalidInput, LostInNoise
from sordino.figures import round_up
from sordino.noise import Source, add_noise
from sordino.tables import labels
from sordino.tables.encoding import choose_buckets, scale
from sordino.tables.normalising import private_normalisation
from sordino.tables.schema import FEWEST_BUCKETS, MOST_BUCKETS, Category, Column, Number, Schema, Skip, Text
from sordino.tables.table import Cells, Table, find_missing_values, is_missing, parse_numbers, parse_values

SHARE = 0.3
"""The share of ε for all releases together, unless another is asked for."""
DISTINCT_WEIGHT = 0.5
UNLISTED_SHARE = 0.1
"""The share of δ for a class that only one record has."""
SHARED_UNLISTED = 0.01
"""The same share if many runs share the δ of a dataset: it hardly needs more noise."""
CERTAIN = 6.0
"""A histogram says nothing about fewer records than this many deviations of a count."""
RATIO = 4.0
SMALLEST, LARGEST = -10, 16
EDGES = RATIO ** np.arange(SMALLEST, LARGEST + 1)
LINE = np.concatenate([-EDGES[::-1], EDGES])
"""The edges of the bins of numbers: -4^16 .. -4^-10, 4^-10 .. 4^16. Numbers beyond are in the outermost bins."""
NO_VALUE, WORD, TEXT, FIRST_NUMBER = 0, 1, 2, 3
BINS = FIRST_NUMBER + len(LINE) - 1
WORDS_OF_A_TEXT = 4
CLEAR = 4.0
"""A count this many deviations above zero is not an accident, even among thousands of counts."""
IN_DOUBT = 2.0
"""A count below this many deviations is more likely noise than records."""

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class ReleasePlan:
    """What has to be released about a table, with how much noise: public, and known before anything is read."""

    columns: tuple[str, ...]
    classes: bool
    records: int
    noise_multiplier: float
    unlisted: float

    def events(self) -> list[tuple[DpEvent, int]]:
        """Return the most that it costs."""
        return _list_events(self.noise_multiplier, bool(self.columns), self.classes, self.unlisted)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on one count of a histogram."""
        return self.noise_multiplier * math.sqrt(len(self.columns) * (1 + DISTINCT_WEIGHT**2))


def plan_release(
    schema: Schema, records: int, budget: Budget | None, share: float, *, shared: bool = False
) -> ReleasePlan | None:
    """Plan the release of what `schema` leaves open, at `share` of the budget; None if nothing is open.

    A release that would be lost in the noise is refused before anything is spent. Other runs may have `shared` in δ.
    """
    if schema.complete:
        return None
    needed = "give --schema, or --bounds and --classes"
    if budget is None:
        raise InvalidInput(f"kinds, ranges or classes would be released within a budget: give --epsilon, or {needed}")
    if not 0 < share < 1:
        raise InvalidInput(f"prepare={share} must be in (0, 1): it is the share of epsilon for ranges and classes")
    columns, classes = tuple(schema.open), schema.classes is None
    unlisted = (SHARED_UNLISTED if shared else UNLISTED_SHARE) * budget.delta
    part = replace(budget, epsilon=share * budget.epsilon)
    noise = noise_for(part, lambda noise: _list_events(noise, bool(columns), classes, unlisted), start=10.0)
    chosen = ReleasePlan(columns, classes, records, noise.noise_multiplier, unlisted)
    _require_enough(chosen, needed)
    return chosen


def tell_spent(lost: LostInNoise, ledger: Ledger, budget: Budget) -> LostInNoise:
    """Return the same error, with what had been spent before it."""
    spent = round_up(epsilon(ledger.events(), budget.delta, budget.accountant, budget.adjacency))
    return LostInNoise(f"{lost}; ε = {spent} of {budget.epsilon:g} was spent on finding this out")


def _list_events(noise: float, ranges: bool, classes: bool, unlisted: float) -> list[tuple[DpEvent, int]]:
    """List the events: kinds, means and deviations are one Gaussian each."""
    events: list[tuple[DpEvent, int]] = [(GaussianDpEvent(noise), 3 * ranges)]
    return [*events, (labels.build_event(noise, unlisted), 1)] if classes else events


def _require_enough(chosen: ReleasePlan, needed: str) -> None:
    if chosen.columns and chosen.records < CERTAIN * chosen.deviation:
        wanted = math.ceil(CERTAIN * chosen.deviation)
        raise InvalidInput(
            f"records={chosen.records} are too few to release the ranges of {len(chosen.columns)} columns with noise: "
            f"it takes {wanted:,}: {needed}, or a larger epsilon"
        )
    if chosen.classes:
        wanted = math.ceil(2 * labels.find_threshold(chosen.noise_multiplier, chosen.unlisted))
        if chosen.records < wanted:
            raise InvalidInput(
                f"records={chosen.records} are too few to release the names of the classes with noise, it takes "
                f"{wanted:,}: give --classes, or a larger epsilon"
            )


def release(table: Table, target: str, schema: Schema, chosen: ReleasePlan, ledger: Ledger, source: Source) -> Schema:
    """Complete `schema` by releases about these records. Every event is in the ledger before its noise is drawn."""
    if chosen.columns:
        schema = schema.with_columns(_release_kinds(table, schema, chosen, ledger, source))
        schema = schema.with_columns(_release_scales(table, schema, chosen, ledger, source))
    if chosen.classes:
        receipt = ledger.charge(labels.build_event(chosen.noise_multiplier, chosen.unlisted), "names of the classes")
        noise = (chosen.noise_multiplier, chosen.unlisted)
        schema = replace(schema, classes=labels.release_classes(table.columns[target], *noise, receipt, source))
    return schema


def release_counts(table: Table, chosen: ReleasePlan, ledger: Ledger, source: Source) -> Counts:
    """Release one row per column: its histogram and half the number of its different values, all with noise."""
    receipt = ledger.charge(GaussianDpEvent(chosen.noise_multiplier), "kinds and ranges of the columns")
    rows = np.stack([count_cells(table.columns[name]) for name in chosen.columns])
    released: Counts = add_noise(source, receipt, torch.from_numpy(rows), chosen.deviation).numpy()
    return released


def count_cells(cells: Sequence[str]) -> Counts:
    """Count what is released about one column: a record changes it by at most √(1 + `DISTINCT_WEIGHT`²)."""
    return np.append(count_bins(cells), DISTINCT_WEIGHT * count_different(cells))


def _release_kinds(
    table: Table, schema: Schema, chosen: ReleasePlan, ledger: Ledger, source: Source
) -> dict[str, Column]:
    columns = {}
    for name, row in zip(chosen.columns, release_counts(table, chosen, ledger, source), strict=True):
        different = (float(row[-1]) - chosen.deviation) / DISTINCT_WEIGHT  # at least this many, more likely than not
        columns[name] = infer_column(row[:-1], different, chosen.deviation, chosen.records, schema.columns[name])
    return columns


def _release_scales(
    table: Table, schema: Schema, chosen: ReleasePlan, ledger: Ledger, source: Source
) -> dict[str, Column]:
    """Release centre and spread of the numbers whose ranges were released; missing numbers count as the middle."""
    found = {name: schema.columns[name] for name in chosen.columns}
    columns = {name: column for name, column in found.items() if isinstance(column, Number)}
    if not columns:
        return {}
    within = np.stack([scale(column, parse_numbers(table.columns[name])) for name, column in columns.items()], axis=1)
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
    return {name: _with_scale(columns[name], *by) for name, by in zip(columns, scaling, strict=True)}


def _with_scale(column: Number, mean: float, deviation: float) -> Number:
    assert column.low is not None
    assert column.high is not None
    middle, half = (column.high + column.low) / 2, (column.high - column.low) / 2
    return replace(column, center=middle + half * min(1.0, max(-1.0, mean)), spread=half * min(1.0, deviation))


def count_bins(cells: Sequence[str]) -> Counts:
    """Count how many cells fall into each bin."""
    known = Cells.of(cells)
    values = parse_values(known.values)
    bins = FIRST_NUMBER + np.clip(np.searchsorted(LINE, values, side="right") - 1, 0, len(LINE) - 2)
    for place in np.flatnonzero(np.isnan(values)).tolist():
        bins[place] = _find_bin_of_words(known.values[place].as_py())
    return np.bincount(bins, weights=known.count_values(), minlength=BINS).astype(np.float64)


def _find_bin_of_words(cell: str) -> int:
    if is_missing(cell):
        return NO_VALUE
    return TEXT if len(cell.split()) >= WORDS_OF_A_TEXT else WORD


def count_different(cells: Sequence[str]) -> int:
    """Count the different values: adding or removing one record changes this by at most one."""
    values = Cells.of(cells).values
    return len(pc.utf8_trim_whitespace(values.filter(pa.array(~find_missing_values(values)))).unique())


def infer_column(counts: Counts, different: float, deviation: float, records: int, given: Column | None) -> Column:
    """Infer the kind that most cells have by the noised `counts`, and for numbers the range in which they lie.

    This is a pure function of released values, the public number of records and what was `given`: it costs nothing.
    """
    low, high, mass = find_range(counts[FIRST_NUMBER:], deviation)
    if max(mass, counts[WORD], counts[TEXT]) < CLEAR * deviation and counts[NO_VALUE] > records / 2:
        return Skip("hardly any cell of it has a value")
    if isinstance(given, Number) or mass >= max(counts[WORD], counts[TEXT]):
        if mass < CLEAR * deviation:
            return Skip("its range is lost in the noise")
        return Number(low, high, missing=bool(counts[NO_VALUE] > CLEAR * deviation))
    if max(counts[WORD], counts[TEXT]) < CLEAR * deviation:
        return Skip("its kind is lost in the noise")
    if counts[TEXT] > counts[WORD]:
        return Text(choose_buckets(records))
    if different > records / 2:
        return Skip("most records have a value of their own")
    wanted = int(2 * max(different, 2.0) - 1)
    return Category(buckets=min(MOST_BUCKETS, max(FEWEST_BUCKETS, 1 << wanted.bit_length())))


def find_range(counts: Counts, deviation: float) -> tuple[float, float, float]:
    """Find where the numbers are, and how many there are: (low, high, count).

    This is the stretch of bins with the largest sum of count - 2 deviations, widened to every bin that is clearly not
    empty. A tail of few records stays outside; the encoding clips it.
    """
    start, stop = find_heaviest_stretch(counts - IN_DOUBT * deviation)
    mass = float(counts[start:stop].sum())
    clear = np.flatnonzero(counts > CLEAR * deviation)
    first, last = min([start, *clear.tolist()]), max([stop - 1, *clear.tolist()])
    return float(LINE[first]), float(LINE[last + 1]), mass


def find_heaviest_stretch(scores: Counts) -> tuple[int, int]:
    """Find (start, stop) of the contiguous stretch with the largest sum (Kadane's algorithm); it is never empty."""
    best, start, stop = -np.inf, 0, 1
    total, begin = 0.0, 0
    for place, score in enumerate(scores.tolist()):
        if total <= 0:
            total, begin = 0.0, place
        total += score
        if total > best:
            best, start, stop = total, begin, place + 1
    return start, stop
