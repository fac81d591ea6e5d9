"""Two releases about a table before anything is learnt from it: where its numbers lie, and how its cells are spread.

1. **kinds and ranges** (`sordino.tables.release`): a coarse histogram of every column whose kind is open, of every
   number and of the target of a regression, with half the number of its different values.
2. **bins and names**: for every number, a histogram over some dozen cells, laid where the first release found records;
   for every category and for the classes of the target, the count of every value. A record has one cell in each of the
   m columns. The target's cell counts w-fold, w² = max(1, (m - 1)/6), because a class that is not found is not learnt.
   So the counts of all columns together move by at most √(m - 1 + w²) in length. A value that nobody gave as public is
   named only if its noised count exceeds 1 + σ√m·z. A value that only one record has passes this with probability
   δ'/m. A record may bring one such value to every column, so the event `Unlisted` charges δ'
   (`sordino.accounting.unlisted`).

Bins, centres, deviations and shares are functions of these: they cost nothing more. Public bounds, kinds and values
save a release or sharpen it. They never replace what the records themselves say with noise, because bounds are mostly
far wider than the records.
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
from sordino.tables.encoder import ALONE, SLOPE, Binned, Block, Encoder, Named, Worded, map_cells, spell
from sordino.tables.labels import rank
from sordino.tables.matching import add_matched_noise
from sordino.tables.schema import Category, Column, Number, Skip, Text, settle_codes
from sordino.tables.table import Cells, Table, parse_numbers, parse_values

CELLS = 64
"""Cells of the second histogram of a number, if the noise allows so many."""
FEWEST_BINS, BINS_IN_ALL = 8, 200
"""With many numbers, each has fewer bins, because all of them are learnt from the same records."""
LEAST_SIGNAL = 60.0
"""If the steps say less than this about each column, a number has only a slope: bins would only make rows longer."""
MOST_CODES = 16
"""A public category with at most this many values, all of them numbers, is learnt as a number within them."""
MOST_VALUES = 200
"""The most names of a category that are kept, by their noised counts."""
CLEAR = 3.0
"""A coarse count this many deviations above zero is inside the range of a number."""
LEAST_SHARE = 0.005
"""How many records are in a bin."""
SMALLEST_SPREAD = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Survey:
    """What will be released about a table, with how much noise; public, and known before anything is read.

    `coarse` are the columns of the first release. `noise` are the multipliers of both releases. `unlisted` is δ' of the
    second. `rows` is how many records one unit has at most: all sums are that much more sensitive. `reach` is the
    number of records over the noise that a count would have if nothing else were released.
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
    reach: float = math.inf

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
        """Find the noised count above which a value is named, at this deviation of the noise."""
        return self.rows + deviation * float(norm.isf(self.unlisted / (self.fine * self.rows)))

    def events(self) -> list[tuple[DpEvent, int]]:
        """Return what it costs."""
        return list_events(self.noise, self.unlisted, first=bool(self.coarse))


def list_coarse(columns: Mapping[str, Column | None], target: str, task: str) -> tuple[str, ...]:
    """List the columns of the first release: open kinds, all numbers, and the target of a regression."""
    found = [name for name, column in columns.items() if column is None or isinstance(column, Number)]
    return (*found, target) if task == "regression" else tuple(found)


def read_codes(columns: Mapping[str, Column | None]) -> dict[str, Column | None]:
    """Read columns of few public codes as numbers within their bounds, as they would be without a schema.

    Near codes are often alike, and bins separate codes that enough records have. If codes were taken for words, public
    knowledge would be worse than none.
    """
    found = dict(columns)
    for name, column in columns.items():
        if isinstance(column, Category) and column.values is not None and 2 <= len(column.values) <= MOST_CODES:
            numbers = parse_numbers(column.values)
            if not np.isnan(numbers).any() and numbers.min() < numbers.max():
                found[name] = Number(float(numbers.min()), float(numbers.max()))
    return found


def count_fine(columns: Mapping[str, Column | None]) -> int:
    """Count the columns that may have cells in the second release, including the target."""
    return 1 + sum(not isinstance(column, Skip | Text) for column in columns.values())


def find_weight(fine: int) -> float:
    """Find how often the target of m = `fine` columns counts."""
    return math.sqrt(max(1.0, (fine - 1) / 6))


def find_fine_reach(fine: int) -> float:
    """Find how far one record moves the counts of m = `fine` columns."""
    return math.sqrt(fine - 1 + find_weight(fine) ** 2)


def list_events(noise: tuple[float, float], unlisted: float, *, first: bool) -> list[tuple[DpEvent, int]]:
    """List the events of both releases, in order."""
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
    """Survey `table` and return its encoder. Every event is in the ledger before its noise is drawn (law 5)."""
    columns, ranges = _find_kinds(table, plan, ledger, source)
    parts = [_count(table, name, column, plan, ranges) for name, column in columns.items()]
    counted = [part for part in parts if part is not None]
    target = _count_target(table, plan, ranges)
    noised = _release_counts([*counted, target], plan, ledger, source)
    blocks: dict[str, Block] = {
        name: Worded(column.buckets) for name, column in columns.items() if isinstance(column, Text)
    }
    left_out = {name: column.why for name, column in columns.items() if isinstance(column, Skip)}
    named = None if target.edges is not None else _name_classes(target, noised[-1], plan)
    signal = find_signal(plan.reach, plan.fine, named[1] if named else ())
    bins = choose_bins(plan.bins, sum(part.edges is not None for part in counted), signal)
    for part, counts in zip(counted, noised, strict=False):
        block = _make_block(part, counts, plan, bins)
        if block is None:
            left_out[part.name] = "its values are lost in the noise"
        else:
            blocks[part.name] = block
    if not blocks:
        raise LostInNoise("no column could be told from the noise: give a larger epsilon, or more records")
    ordered = {name: blocks[name] for name in plan.columns if name in blocks}
    if named is None:
        return _describe_range(target, noised[-1], plan, ordered, left_out)
    classes, shares, unnamed = named
    return Encoder(plan.target, ordered, classes, left_out=left_out, class_shares=shares, unnamed=unnamed)


def require_classes_in_sight(table: Table, plan: Survey) -> None:
    """Refuse, before anything is spent, a target without two classes that clearly stand out of the noise.

    An error is for the holder of the records: it says that they have too few of a class, and names none.
    """
    if plan.task != "classification" or plan.classes is not None:
        return
    part, least = _count_target(table, plan, {}), plan.find_threshold(plan.target_deviation)
    if np.sum(part.counts[: len(part.values)] > least - 2.0 * plan.target_deviation) < 2:
        raise InvalidInput(
            f"target {plan.target!r} has fewer than 2 classes of more than {least:.0f} records, the fewest that can be "
            "found at this epsilon: give the classes if their names are public, or a larger epsilon"
        )


# -- the first release ------------------------------------------------------------------------------------------------


def _find_kinds(
    table: Table, plan: Survey, ledger: Ledger, source: Source
) -> tuple[dict[str, Column], dict[str, Floats]]:
    """Find the kind of every column, and the noised coarse histogram of every number."""
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
    """Lay the edges of about `cells` cells where the noised coarse `counts` say that numbers are.

    A coarse bin is cut into equal pieces, in proportion to the root of its count, so that a rare but wide range keeps
    some. Public bounds move no edge: cells beyond them are removed after they are counted (`_drop_outside`), so that
    bins are as good as without bounds.
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
        return np.array(bounds)  # the noise put all numbers outside the public bounds
    return edges


def find_outside(edges: Floats, bounds: tuple[float, float]) -> NDArray[np.bool_]:
    """Find the cells beyond public bounds, which hold only noise."""
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
    """Choose as many cells as can each hold more records than noise, within limits."""
    return max(plan.bins, min(CELLS, int(plan.records / max(plan.fine_deviation, 1e-9))))


def count_in_cells(cells: Sequence[str], edges: Floats, bounds: tuple[float, float] | None = None) -> Floats:
    """Count the numbers in each cell, with those beyond the ends in the outermost; last, count the missing ones.

    Numbers beyond public bounds count as the nearest bound.
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
    """Count the public values, or all values; then the missing ones and, with public values, the others."""
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
    """Release the counts of all parts with noise, at once; the last part is the target."""
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
    """Remove the cells beyond public bounds, which hold only noise; this is a function of released values.

    They are counted like the others, so that everything within the bounds is as it would be without bounds.
    """
    if part.edges is None or part.bounds is None:
        return counts
    inside = ~find_outside(part.edges, part.bounds)
    start, stop = int(np.argmax(inside)), len(inside) - int(np.argmax(inside[::-1]))
    part.edges = part.edges[start : stop + 1]
    return np.append(counts[start:stop], counts[-1])


# -- bins, names and scales--------------------------------------------------------------------------------------------


def find_signal(reach: float, columns: int, shares: Sequence[float]) -> float:
    """Find how much the steps can say about one of so many columns; less if many classes share the records."""
    flat = math.sqrt(8.0) * float(np.mean([share * (1.0 - share) for share in shares])) if len(shares) > 2 else 1.0
    return flat * reach / math.sqrt(columns)


def choose_bins(most: int, numbers: int, signal: float) -> int:
    """Choose the bins of each of so many numbers: `most`, or a share of `BINS_IN_ALL`, but at least `FEWEST_BINS`.

    It is one, which means none, if the steps say too little about each.
    """
    if signal < LEAST_SIGNAL:
        return 1
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
    """Name the values that may be named, in order, and the shares of their places: each, missing, all others."""
    known = np.arange(len(values)) if public else np.flatnonzero(counts[: len(values)] > least)
    if not public and len(known) > MOST_VALUES:
        known = known[np.argsort(-counts[known])[:MOST_VALUES]]
    chosen = sorted(known.tolist(), key=lambda place: rank(values[place])) if not public else known.tolist()
    kept = np.append(counts[chosen], counts[len(values)])  # never the sum over unnamed values
    shares = np.maximum(kept, 0.0) / max(records, 1)
    shares = np.append(shares, max(0.0, 1.0 - shares.sum()))
    return tuple(values[place] for place in chosen), tuple((shares / max(shares.sum(), 1.0)).tolist())


def make_bins(edges: Floats, counts: Floats, deviation: float, bins: int) -> Binned:
    """Make at most `bins` bins, and find centre and spread; a cell with more than its share of records is a bin alone.

    A bin is closed when it holds its part of what the heavy cells leave, and stands out of the noise. With one bin
    there is only the slope, and missing cells have a place if they stand out of the noise.
    """
    inside, missing = np.maximum(counts[:-1], 0.0), max(0.0, float(counts[-1]))
    total = max(float(inside.sum()), 1.0)
    heavy = inside >= total / bins
    doubtful = max(4.0 * deviation, LEAST_SHARE * total, 1.0)
    least = max(float(inside[~heavy].sum()) / max(1, bins - int(heavy.sum())), doubtful)
    cuts, shares, held = [], [], 0.0
    for place, count in enumerate(inside):
        held += count
        last = place == len(inside) - 1 or bins == 1
        before_heavy = not last and heavy[place + 1] and held >= doubtful
        if not last and (held >= least or heavy[place] or before_heavy):
            cuts.append(float(edges[place + 1]))
            shares.append(held)
            held = 0.0
    shares.append(held)
    center, spread = find_scale(edges, inside)
    if bins == 1 and missing < 4.0 * deviation:
        missing = 0.0
    parts = np.array([*shares, missing])
    return Binned(
        tuple(cuts),
        center,
        max(spread, SMALLEST_SPREAD * max(1.0, abs(center))),
        tuple((parts / max(parts.sum(), 1.0)).tolist()),
        ALONE if bins == 1 else SLOPE,
    )


def find_scale(edges: Floats, counts: Floats) -> tuple[float, float]:
    """Find median and deviation of a histogram by its quantiles, which the noise in a long tail hardly moves.

    The deviation is that of a normal law with the same quartiles, or with the same 5 and 95 % if that is more.
    """
    reached = np.concatenate([[0.0], np.cumsum(counts)])
    at = np.interp(np.array([0.05, 0.25, 0.5, 0.75, 0.95]) * max(reached[-1], 1e-12), reached, edges)
    return float(at[2]), float(max((at[3] - at[1]) / 1.349, (at[4] - at[0]) / 3.29))


def _describe_range(
    part: _Column, counts: Floats, plan: Survey, blocks: Mapping[str, Block], left_out: Mapping[str, str]
) -> Encoder:
    """Make the encoder of a regression, whose target has a center, a spread and a range."""
    assert part.edges is not None
    found = make_bins(part.edges, counts, plan.target_deviation, plan.bins)
    low, high = np.clip(part.edges[[0, -1]], *(plan.bounds or (-math.inf, math.inf))).tolist()
    return Encoder(plan.target, blocks, (), found.center, found.spread, low, high, left_out)


def _name_classes(part: _Column, counts: Floats, plan: Survey) -> tuple[tuple[str, ...], tuple[float, ...], float]:
    """Name the classes, with their shares of the records that have one, and the share of records that have none."""
    least = plan.find_threshold(plan.target_deviation)
    classes, shares = name_values(part.values, counts, plan.records, least, public=part.public)
    if len(classes) < 2:
        said = "only one of the target's classes has" if classes else "none of the target's classes has"
        raise LostInNoise(
            f"{said} clearly more than {least:.0f} records, it takes 2: give the classes if you know their names"
        )
    return classes, _balance(shares[: len(classes)]), shares[-1]


def _balance(shares: Sequence[float]) -> tuple[float, ...]:
    """Balance the shares of the classes: they add up to one, and none is zero."""
    kept = np.maximum(np.array(shares), 1e-3)
    return tuple((kept / kept.sum()).tolist())
