"""Two releases about a table before anything is learnt from it: where its numbers lie, and how its cells are spread.

1. **kinds and ranges** (`sordino.tables.release`): a coarse histogram of every column whose kind is open, of every
   number and of the target of a regression, with half the number of its different values.
2. **bins and names**: of every number a histogram over some dozen cells, laid where the first release found records;
   of every category, and of the classes of the target, the count of every value. A record has one cell in each of the m
   columns, and that of the target counts w-fold, w² = max(1, (m - 1)/6), because a class that is not found is not
   learnt: so the counts of all of them together move by at most √(m - 1 + w²) in length. A value that nobody gave as
   public is named only if its noised count exceeds 1 + σ√m·z, which the single record of a value of its own passes with
   probability δ'/m; a record may bring one such value to every column, so that δ' is what the event `Unlisted` charges
   (`sordino.accounting.unlisted`).

Bins, centres, deviations and shares are functions of these: they cost nothing more. Public bounds, kinds and values
spare a release or sharpen it; they never replace what the records themselves say with noise, because bounds are
mostly far wider than the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from sordino.accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.accounting.unlisted import Unlisted
from sordino.errors import InvalidInput, LostInNoise
from sordino.noise import Source
from sordino.tables import release
from sordino.tables.encoder import Binned, Block, Encoder, Named, Worded, map_cells, spell
from sordino.tables.labels import rank
from sordino.tables.matching import add_matched_noise
from sordino.tables.schema import Category, Column, Number, Skip, Text, settle_codes
from sordino.tables.table import Cells, Table, parse_numbers, parse_values

CELLS = 64
"""Cells of the second histogram of a number, if the noise allows for that many."""
FEWEST_BINS, BINS_IN_ALL = 8, 200
"""With many numbers each has fewer bins: all of them are learnt from the same records."""
MOST_CODES = 16
"""A public category of no more values, all of them numbers, is learnt as a number within them."""
MOST_VALUES = 200
"""The most names of a category that are kept, by their noised counts."""
CLEAR = 3.0
"""A coarse count this many deviations above zero is inside the range of a number."""
LEAST_SHARE = 0.005
"""The number of records in a bin."""
SMALLEST_SPREAD = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Survey:
    """What will be released about a table, with how much noise; public, and known before anything is read.

    `coarse` are the columns of the first release. `noise` are the multipliers of both. `unlisted` is δ' of the second.
    `rows` is how many records one unit has at most: all sums are that much more sensitive.
    """

    target: str
    task: str
    columns: Mapping[str, Column | None]
    classes: tuple[str, ...] | None
    bounds: tuple[float, float] | None
    records: int
    noise: tuple[float, float]
    unlisted: float
    bins: int = 16
    rows: int = 1

    @property
    def coarse(self) -> tuple[str, ...]:
        """The columns whose kind or range is found first."""
        return list_coarse(self.columns, self.target, self.task)

    @property
    def fine(self) -> int:
        """How many columns the second release may count the cells of."""
        return count_fine(self.columns)

    @property
    def coarse_deviation(self) -> float:
        """The standard deviation of a count of the first release."""
        return self.noise[0] * self.rows * math.sqrt(len(self.coarse) * (1 + release.DISTINCT_WEIGHT**2))

    @property
    def fine_deviation(self) -> float:
        """The standard deviation of a count of the second."""
        return self.noise[1] * self.rows * find_fine_reach(self.fine)

    @property
    def target_deviation(self) -> float:
        """The standard deviation of a count of the target, which is smaller."""
        return self.fine_deviation / find_weight(self.fine)

    def find_threshold(self, deviation: float) -> float:
        """The noised count above which a value is named, at that deviation of the noise."""
        return self.rows + deviation * float(norm.isf(self.unlisted / (self.fine * self.rows)))

    def events(self) -> list[tuple[DpEvent, int]]:
        """What it costs."""
        return list_events(self.noise, self.unlisted, first=bool(self.coarse))


def list_coarse(columns: Mapping[str, Column | None], target: str, task: str) -> tuple[str, ...]:
    """The columns of the first release: open kinds, all numbers, and the target of a regression."""
    found = [name for name, column in columns.items() if column is None or isinstance(column, Number)]
    return (*found, target) if task == "regression" else tuple(found)


def read_codes(columns: Mapping[str, Column | None]) -> dict[str, Column | None]:
    """`columns` with few public codes as numbers within their bounds, as they would be without a schema.

    Near codes are often alike, and bins keep apart what enough records have: to take them for words would make public
    knowledge worse than none.
    """
    found = dict(columns)
    for name, column in columns.items():
        if isinstance(column, Category) and column.values is not None and 2 <= len(column.values) <= MOST_CODES:
            numbers = parse_numbers(column.values)
            if not np.isnan(numbers).any() and numbers.min() < numbers.max():
                found[name] = Number(float(numbers.min()), float(numbers.max()))
    return found


def count_fine(columns: Mapping[str, Column | None]) -> int:
    """How many columns may have cells in the second release, the target among them."""
    return 1 + sum(not isinstance(column, Skip | Text) for column in columns.values())


def find_weight(fine: int) -> float:
    """How often the target of m = `fine` columns counts."""
    return math.sqrt(max(1.0, (fine - 1) / 6))


def find_fine_reach(fine: int) -> float:
    """How far one record moves the counts of m = `fine` columns."""
    return math.sqrt(fine - 1 + find_weight(fine) ** 2)


def list_events(noise: tuple[float, float], unlisted: float, *, first: bool) -> list[tuple[DpEvent, int]]:
    """What both releases cost, in their order."""
    second = ComposedDpEvent([GaussianDpEvent(noise[1]), Unlisted(unlisted)])
    return [*([(GaussianDpEvent(noise[0]), 1)] if first else []), (second, 1)]


@dataclass
class _Column:
    """A column in the second release: the cells that are counted, and what they become."""

    name: str
    counts: Floats
    edges: Floats | None = None
    bounds: tuple[float, float] | None = None
    values: list[str] = field(default_factory=list)
    public: bool = True


def survey(table: Table, plan: Survey, ledger: Ledger, source: Source) -> Encoder:
    """The encoder of `table`. Every event is in the ledger before its noise is drawn (law 5)."""
    columns, ranges = _find_kinds(table, plan, ledger, source)
    parts = [_count(table, name, column, plan, ranges) for name, column in columns.items()]
    counted = [part for part in parts if part is not None]
    target = _count_target(table, plan, ranges)
    noised = _release_counts([*counted, target], plan, ledger, source)
    blocks: dict[str, Block] = {
        name: Worded(column.buckets) for name, column in columns.items() if isinstance(column, Text)
    }
    left_out = {name: column.why for name, column in columns.items() if isinstance(column, Skip)}
    bins = choose_bins(plan.bins, sum(part.edges is not None for part in counted))
    for part, counts in zip(counted, noised, strict=False):
        block = _make_block(part, counts, plan, bins)
        if block is None:
            left_out[part.name] = "its values are lost in the noise"
        else:
            blocks[part.name] = block
    if not blocks:
        raise LostInNoise("no column could be told from the noise: give a larger epsilon, or more records")
    ordered = {name: blocks[name] for name in plan.columns if name in blocks}
    return _describe_target(target, noised[-1], plan, ordered, left_out)


def require_classes_in_sight(table: Table, plan: Survey) -> None:
    """Refuse, before anything is spent, a target of which two classes are hardly ever told from the noise.

    An error is for whoever holds the records: it says that they have too few of a class, and names none.
    """
    if plan.task != "classification" or plan.classes is not None:
        return
    part, least = _count_target(table, plan, {}), plan.find_threshold(plan.target_deviation)
    if np.sum(part.counts[: len(part.values)] > least - 2.0 * plan.target_deviation) < 2:
        raise InvalidInput(
            f"target {plan.target!r} has fewer than 2 classes of more than {least:.0f} records, which it takes to find "
            "them at this epsilon: give the classes if their names are public, or a larger epsilon"
        )


# -- the first release ------------------------------------------------------------------------------------------------


def _find_kinds(
    table: Table, plan: Survey, ledger: Ledger, source: Source
) -> tuple[dict[str, Column], dict[str, Floats]]:
    """The kind of every column, and the noised coarse histogram of those that are numbers."""
    columns = {name: column for name, column in plan.columns.items() if column is not None}
    if not plan.coarse:
        return columns, {}
    receipt = ledger.charge(GaussianDpEvent(plan.noise[0]), "kinds and ranges of the columns")
    exact = torch.from_numpy(np.stack([release.count_cells(table.columns[name]) for name in plan.coarse]))
    sizes = [(name, exact.shape[1]) for name in plan.coarse]
    rows = add_matched_noise(source, receipt, exact, plan.coarse_deviation, "kinds", sizes).numpy()
    ranges = {}
    for name, row in zip(plan.coarse, rows, strict=True):
        ranges[name] = row[release.FIRST_NUMBER : -1]
        if name == plan.target and plan.task == "regression":
            continue
        given, different = plan.columns[name], (float(row[-1]) - plan.coarse_deviation) / release.DISTINCT_WEIGHT
        found = release.infer_column(row[:-1], different, plan.coarse_deviation, plan.records, given)
        found = settle_codes(name, found, different, plan.records) if given is None else found
        columns[name] = found if given is None or isinstance(found, Skip) else given
    return {name: columns[name] for name in plan.columns if name in columns}, ranges


def lay_cells(counts: Floats, deviation: float, bounds: tuple[float, float] | None, cells: int) -> Floats:
    """Edges of about `cells` cells where the noised coarse `counts` say that numbers are.

    A coarse bin is cut into equal pieces, in proportion to the root of its count: a rare but wide range keeps some.
    Public bounds move no edge: cells beyond them are taken away once they were counted (`_drop_outside`), so that bins
    are as good as without bounds.
    """
    line = release.LINE
    start, stop = release.find_heaviest_stretch(counts - release.IN_DOUBT * deviation)
    clear = np.flatnonzero(counts > CLEAR * deviation).tolist()
    first, last = min([start, *clear]), max([stop - 1, *clear])
    inside = (np.arange(len(counts)) >= first) & (np.arange(len(counts)) <= last)
    mass = np.where(inside, np.sqrt(np.maximum(counts - deviation, 0.0)), 0.0)
    pieces = np.where(inside, np.maximum(1, np.round(cells * mass / max(mass.sum(), 1e-12))), 0).astype(int)
    pieces[len(counts) // 2] = min(1, pieces[len(counts) // 2])  # around zero
    high = line[last + 1]
    parts = [np.linspace(line[i], line[i + 1], pieces[i], endpoint=False) for i in np.flatnonzero(pieces)]
    edges = np.append(np.concatenate(parts), high)
    if bounds is not None and find_outside(edges, bounds).all():
        return np.array(bounds)  # by the noise, all numbers are outside the public bounds
    return edges


def find_outside(edges: Floats, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Which cells lie beyond public bounds, so that all they hold is noise."""
    return np.asarray((edges[1:] <= bounds[0]) | (edges[:-1] > bounds[1]))


# -- the second release -----------------------------------------------------------------------------------------------


def _count(table: Table, name: str, column: Column, plan: Survey, ranges: Mapping[str, Floats]) -> _Column | None:
    if isinstance(column, Skip | Text):
        return None
    cells = table.columns[name]
    if isinstance(column, Number):
        bounds = None if column.low is None or column.high is None else (column.low, column.high)
        edges = lay_cells(ranges[name], plan.coarse_deviation, bounds, _choose_cells(plan))
        return _Column(name, count_in_cells(cells, edges, bounds), edges, bounds)
    public = column.values if isinstance(column, Category) else None
    return _count_values(name, cells, None if public is None else tuple(sorted(public)))


def _choose_cells(plan: Survey) -> int:
    """As many cells as can each hold more records than noise, within limits."""
    return max(plan.bins, min(CELLS, int(plan.records / max(plan.fine_deviation, 1e-9))))


def count_in_cells(cells: Sequence[str], edges: Floats, bounds: tuple[float, float] | None = None) -> Floats:
    """How many numbers fall into each cell, those beyond the ends into the outermost; last, how many there are not.

    Numbers beyond public bounds count as the nearest of them.
    """
    held = Cells.of(cells)
    values, counts = parse_values(held.values), held.count_values()
    if bounds is not None:
        values = np.clip(values, *bounds)
    known = ~np.isnan(values)
    places = np.clip(np.searchsorted(edges, values[known], side="right") - 1, 0, len(edges) - 2)
    inside = np.bincount(places, weights=counts[known], minlength=len(edges) - 1)
    return np.append(inside, counts[~known].sum()).astype(np.float64)


def _count_values(name: str, cells: Sequence[str], public: tuple[str, ...] | None) -> _Column:
    """Counts of the public values, or of all that there are; then missing ones, and with public values the others."""
    names: dict[str | None, int] = {None: -1}
    if public is None:  # in the order of their names, not of the records
        words = {spell(value) for value in Cells.of(cells).list_values()}
        names.update({word: place for place, word in enumerate(sorted(word for word in words if word is not None))})
    else:
        names.update({spell(value) or value: place for place, value in enumerate(public)})
    places = map_cells(cells, lambda cell: names.get(spell(cell), -2))
    count = len(names) - 1
    places = np.where(places == -1, count, np.where(places == -2, count + 1, places))
    counts = np.bincount(places, minlength=count + 2).astype(np.float64)
    return _Column(name, counts, values=[value for value in names if value is not None], public=public is not None)


def _count_target(table: Table, plan: Survey, ranges: Mapping[str, Floats]) -> _Column:
    cells = table.columns[plan.target]
    if plan.task == "regression":
        edges = lay_cells(ranges[plan.target], plan.coarse_deviation, plan.bounds, _choose_cells(plan))
        return _Column(plan.target, count_in_cells(cells, edges, plan.bounds), edges, plan.bounds)
    return _count_values(plan.target, cells, plan.classes)


def _release_counts(parts: Sequence[_Column], plan: Survey, ledger: Ledger, source: Source) -> list[Floats]:
    """The counts of all parts with noise, in one release; the last is the target's."""
    assert len(parts) <= plan.fine
    receipt = ledger.charge(list_events(plan.noise, plan.unlisted, first=False)[0][0], "bins and names")
    weight = find_weight(plan.fine)
    weighed = [*(part.counts for part in parts[:-1]), weight * parts[-1].counts]
    exact, sizes = torch.from_numpy(np.concatenate(weighed)), [(part.name, len(part.counts)) for part in parts]
    noised = add_matched_noise(source, receipt, exact, plan.fine_deviation, "names", sizes).numpy()
    split = np.split(noised, np.cumsum([len(part.counts) for part in parts])[:-1])
    split[-1] = split[-1] / weight
    return [_drop_outside(part, counts) for part, counts in zip(parts, split, strict=True)]


def _drop_outside(part: _Column, counts: Floats) -> Floats:
    """Remove the cells beyond public bounds, which hold nothing but noise: a function of what was released.

    They are counted like the others, so that within the bounds everything is as it is without them.
    """
    if part.edges is None or part.bounds is None:
        return counts
    inside = ~find_outside(part.edges, part.bounds)
    start, stop = int(np.argmax(inside)), len(inside) - int(np.argmax(inside[::-1]))
    part.edges = part.edges[start : stop + 1]
    return np.append(counts[start:stop], counts[-1])


# -- what they make ---------------------------------------------------------------------------------------------------


def choose_bins(most: int, numbers: int) -> int:
    """Bins of each of so many numbers: `most` of them, or their share of `BINS_IN_ALL`, and `FEWEST_BINS` at least."""
    return min(most, max(FEWEST_BINS, BINS_IN_ALL // max(1, numbers)))


def _make_block(part: _Column, counts: Floats, plan: Survey, bins: int) -> Block | None:
    if part.edges is not None:
        return make_bins(part.edges, counts, plan.fine_deviation, bins)
    least = plan.find_threshold(plan.fine_deviation)
    values, shares = name_values(part.values, counts, plan.records, least, public=part.public)
    return Named(values, shares) if values else None


def name_values(
    values: Sequence[str], counts: Floats, records: int, least: float, *, public: bool
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The values that may be named, in order, and the shares of their places: each, missing, all others."""
    known = np.arange(len(values)) if public else np.flatnonzero(counts[: len(values)] > least)
    if not public and len(known) > MOST_VALUES:
        known = known[np.argsort(-counts[known])[:MOST_VALUES]]
    chosen = sorted(known.tolist(), key=lambda place: rank(values[place])) if not public else known.tolist()
    kept = np.append(counts[chosen], counts[len(values)])  # never the sum over values that were not named
    shares = np.maximum(kept, 0.0) / max(records, 1)
    shares = np.append(shares, max(0.0, 1.0 - shares.sum()))
    return tuple(values[place] for place in chosen), tuple((shares / max(shares.sum(), 1.0)).tolist())


def make_bins(edges: Floats, counts: Floats, deviation: float, bins: int) -> Binned:
    """At most `bins` bins, a cell with more than its share of the records by itself; and the centre and spread.

    A bin is closed when it holds its part of what the heavy cells leave, and at least what stands out of the noise.
    """
    inside, missing = np.maximum(counts[:-1], 0.0), max(0.0, float(counts[-1]))
    total = max(float(inside.sum()), 1.0)
    heavy = inside >= total / bins
    doubtful = max(4.0 * deviation, LEAST_SHARE * total, 1.0)
    least = max(float(inside[~heavy].sum()) / max(1, bins - int(heavy.sum())), doubtful)
    cuts, shares, held = [], [], 0.0
    for place, count in enumerate(inside):
        held += count
        last = place == len(inside) - 1
        before_heavy = not last and heavy[place + 1] and held >= doubtful
        if not last and (held >= least or heavy[place] or before_heavy):
            cuts.append(float(edges[place + 1]))
            shares.append(held)
            held = 0.0
    shares.append(held)
    center, spread = find_scale(edges, inside)
    parts = np.array([*shares, missing])
    return Binned(
        tuple(cuts),
        center,
        max(spread, SMALLEST_SPREAD * max(1.0, abs(center))),
        tuple((parts / max(parts.sum(), 1.0)).tolist()),
    )


def find_scale(edges: Floats, counts: Floats) -> tuple[float, float]:
    """Median and deviation of a histogram, by its quantiles: the noise on the counts of a long tail moves these little.

    The deviation is that of a normal law with the same quartiles, or the same 5 and 95 % where that is more.
    """
    reached = np.concatenate([[0.0], np.cumsum(counts)])
    at = np.interp(np.array([0.05, 0.25, 0.5, 0.75, 0.95]) * max(reached[-1], 1e-12), reached, edges)
    return float(at[2]), float(max((at[3] - at[1]) / 1.349, (at[4] - at[0]) / 3.29))


def _describe_target(
    part: _Column, counts: Floats, plan: Survey, blocks: Mapping[str, Block], left_out: Mapping[str, str]
) -> Encoder:
    if part.edges is not None:
        found = make_bins(part.edges, counts, plan.target_deviation, plan.bins)
        low, high = np.clip(part.edges[[0, -1]], *(plan.bounds or (-math.inf, math.inf))).tolist()
        return Encoder(plan.target, blocks, (), found.center, found.spread, low, high, left_out)
    least = plan.find_threshold(plan.target_deviation)
    classes, shares = name_values(part.values, counts, plan.records, least, public=part.public)
    if len(classes) < 2:
        raise LostInNoise(
            f"the target has {len(classes)} classes with clearly more than {least:.0f} records, it takes 2: "
            "give the classes if you know their names"
        )
    return Encoder(
        plan.target,
        blocks,
        classes,
        left_out=left_out,
        class_shares=_balance(shares[: len(classes)]),
        unnamed=shares[-1],
    )


def _balance(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares of the classes; they add up to one, and none is zero."""
    kept = np.maximum(np.array(shares), 1e-3)
    return tuple((kept / kept.sum()).tolist())
