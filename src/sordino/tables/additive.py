"""The learner of tables: a sum of one effect per column, fitted by few noised sums over all records at once.

A record x is the row of its blocks (`sordino.tables.encoder`), y its target and f = w·x + b the score of a class, or of
the target in spreads. One step releases

    g = Σᵢ clip(rᵢ)·xᵢ + N(0, σ²c²C²)             r = y - p, the residual, kept within c·C/‖x‖

over all records, so one record moves it by at most c·C. A record far from the others may contribute as much as any, and
counts in full if its residual is small. C is a number that follows from the released shares. Between add-or-remove
neighbours a step is therefore one Gaussian event of multiplier σ, and T of them compose. Everything else is a function
of g:

    w ← w + η·(H + Λ)⁻¹·(g - Λw),        H = h·n·diag(shares),        Λ = (N + H)·H⁻¹·S⁻¹,       N = (cCσ)²/T.

H is the diagonal of the curvature by the released shares, and h the curvature of the loss at the start. Λ is the ridge
under which (H + Λ)⁻¹g is the posterior mean of w, for a prior of covariance S and a gradient whose noise is N from the
mechanism and H from the records. So an entry that is lost in the noise stays at zero, and nothing is tuned by hand. The
first steps show which columns have larger or smaller effects than expected, and S is scaled accordingly, column by
column: a function of released values. S is diagonal except for the bins of a number. Near bins have similar effects, so
there S falls off with their distance, and many bins cost little more than few. The model is the mean of the later
iterates, so that the noise of the steps averages out. An iterate forgets a gradient by 1 - η a step. The last iterate
stands for some of those that would have followed, so that the gradients of the last steps count about as much as the
others.

Such a bound turns cross-entropy into a loss with bounded slope, whose minimiser is, at any x, still monotone in the
probability of the class. It nearly halves the noise but distorts probabilities. A last release repairs these
(`calibrate`): the noised counts of scores by class, which a record moves by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.accounting.ledger import Receipt
from sordino.noise import Source
from sordino.tables.encoder import TEXT_LENGTH, Binned, Encoder, Worded
from sordino.tables.matching import add_matched_noise
from sordino.tables.table import Table

Floats = NDArray[np.float64]
RATE = 0.13
"""η is small because columns that say the same add up, which the diagonal ignores."""
LAST = 5.0
"""How often the last iterate counts in the mean: otherwise the gradients of the last steps would count for little."""
RESIDUAL = 0.575
"""c if the noise is loud."""
CONSTANT = 0.3
"""The entry of every row by which the offset is learnt, if it is learnt."""
OFFSET_REACH = 2_500.0
DOUBT = 6.0
"""If this many entries of a column say that its effects have another size than expected, they are half believed."""
SCALES = 0.1, 10.0
"""How much smaller or larger than expected the effects may be."""
_AT_ONCE = 1 << 16
"""How many records' residuals are held at a time."""
SCORE_EDGES = np.linspace(-6.0, 6.0, 25)
"""The edges of the cells in which scores are counted."""


@dataclass(frozen=True)
class FitSettings:
    """How long and how boldly to learn; public, from ε, δ and the number of records alone.

    `residual` is c, for a row of length C; `rate` is η; `constant` is the entry of every row by which the offset is
    learnt. `variance` is S of a category. `smooth` is for the bins of a number: the variance that they share, the
    variance that each has alone, and the distance at which the first falls to 1/e, as a share of the bins. The iterates
    after the `first` share of the steps are averaged. If there are more than so many `columns`, they share the variance
    of that many: together they say about as much. After the `adapted` share of the steps, each column gets its own
    variance (`find_scales`).
    """

    steps: int = 60
    residual: float = RESIDUAL
    constant: float = 0.0
    variance: float = 0.09
    smooth: tuple[float, float, float] = (0.1, 0.005, 0.5)
    rate: float = RATE
    first: float = 0.2
    columns: int = 10
    adapted: float = 0.35


def choose_settings(reach: float) -> FitSettings:
    """Choose settings by `reach`, the number of records over the noise on a count of them.

    Few records need a short residual and no offset; more can learn both. These rules were chosen on invented tables
    (docs/tables.md).
    """
    bolder = 0.125 * math.log2(max(reach, 1.0) / 3_000.0)
    return FitSettings(
        residual=min(1.0, RESIDUAL + max(0.0, bolder)), constant=CONSTANT if reach >= OFFSET_REACH else 0.0
    )


@dataclass
class _Held:
    """One block of all records, in few bytes: each record's place, or its row."""

    start: int
    stop: int
    shares: Floats
    places: NDArray[np.integer[Any]] | None = None
    around: NDArray[np.float32] | None = None
    rows: NDArray[np.float32] | None = None


class _Ridge:
    """Λ and (H + Λ)⁻¹: some blocks are matrices, all other entries are a diagonal."""

    def __init__(
        self,
        steep: Floats,
        noise: float,
        ordered: Sequence[tuple[int, int]],
        columns: int,
        settings: FitSettings,
        scale: Floats,
    ) -> None:
        pull = (noise + steep) / steep
        share = min(1.0, settings.columns / max(columns, 1))
        self.variances = share * settings.variance * scale
        self._diagonal = np.minimum(pull / self.variances, 1e12)
        self._gain = 1.0 / (steep + self._diagonal)
        self._blocks = []
        shared, own, reach = share * settings.smooth[0], share * settings.smooth[1], settings.smooth[2]
        for start, size in ordered:
            apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
            prior = scale[start] * (shared * np.exp(-apart / (reach * size)) + own * np.eye(size))
            at = slice(start, start + size)
            self.variances[at] = np.diag(prior)
            ridge = np.minimum(pull[at], 1e9)[:, None] * np.linalg.inv(prior)
            self._blocks.append((at, ridge, np.linalg.inv(np.diag(steep[at]) + ridge)))

    def hold(self, weights: Floats) -> Floats:
        """Λw."""
        held = self._diagonal[:, None] * weights
        for at, ridge, _ in self._blocks:
            held[at] = ridge @ weights[at]
        return held

    def move(self, pull: Floats) -> Floats:
        """(H + Λ)⁻¹g."""
        moved = self._gain[:, None] * pull
        for at, _, gain in self._blocks:
            moved[at] = gain @ pull[at]
        return moved


class EncodedRows:
    """The encoded rows of a table, never written out: products with weights, and sums weighted by residuals.

    In addition to its blocks a row has the entry `constant`, which counts in its length.

    Guarantees: results equal those with `Encoder.encode`, up to rounding; a row times its `room` has length `bound`.
    """

    def __init__(self, encoder: Encoder, table: Table, constant: float = 0.0) -> None:
        self.width, self.count, self.constant = encoder.width, len(table), constant
        self._held: list[_Held] = []
        self.ordered: list[tuple[int, int]] = []
        self.columns = len(encoder.blocks)
        self.spans: list[tuple[int, int]] = []
        self.entries = [f"{name}/{entry}" for name, block in encoder.blocks.items() for entry in block.list_entries()]
        lengths = np.full(self.count, constant**2)
        bound, start = constant**2, 0
        self.masses = np.zeros(self.width)
        for name, block in encoder.blocks.items():
            cells = table.columns[name]
            held = _Held(start, start + block.width, np.zeros(0))
            if isinstance(block, Worded):
                held.rows = block.encode(cells)
                lengths += np.square(held.rows, dtype=np.float64).sum(1)
                bound += TEXT_LENGTH**2
                self.masses[start : held.stop] = TEXT_LENGTH**2 / block.width
            else:
                shares = held.shares = np.array(block.shares)
                if isinstance(block, Binned):
                    found, around = block.find_places(cells)
                    held.around = (block.slope * around).astype(np.float32)
                    self.ordered.append((start, len(block.edges) + 1))
                    lengths += np.square(held.around, dtype=np.float64)
                    bound += block.slope**2
                    self.masses[held.stop - 1] = block.slope**2
                else:
                    found = block.find_places(cells)
                held.places = found.astype(np.uint8 if len(shares) <= 2**8 else np.uint16)
                lengths += (1.0 - 2.0 * shares + np.square(shares).sum())[found]
                bound += 1.0 - float(np.square(shares).sum())
                self.masses[start : start + len(shares)] = shares * (1.0 - shares)
            self._held.append(held)
            self.spans.append((start, held.stop))
            start += block.width
        self.bound = math.sqrt(max(bound, 1e-6))
        """C, by the released shares: the root of the mean square length of a row."""
        self.room = self.bound / np.sqrt(np.maximum(lengths, 1e-12))

    def split(self) -> Iterator[slice]:
        """Yield all records, some thousand at a time."""
        return (slice(start, min(start + _AT_ONCE, self.count)) for start in range(0, self.count, _AT_ONCE))

    def multiply(self, weights: Floats, at: slice = slice(None)) -> Floats:
        """Return x·w of every record, or of those `at` some places, for weights [width] or [width, K]."""
        scores = np.zeros((len(range(*at.indices(self.count))), *weights.shape[1:]))
        for held in self._held:
            part = weights[held.start : held.stop]
            if held.rows is not None:
                scores += held.rows[at] @ part
                continue
            assert held.places is not None
            inner = part[: len(held.shares)]
            scores += (inner - held.shares @ inner)[held.places[at]]
            if held.around is not None:
                around = held.around[at]
                scores += np.multiply.outer(around, part[-1]) if part.ndim > 1 else around * part[-1]
        return scores

    def add_up(self, residuals: Floats, at: slice = slice(None)) -> Floats:
        """Return Σᵢ rᵢ·xᵢ for residuals [N] or [N, K], of all records or of those `at` some places."""
        columns = residuals if residuals.ndim > 1 else residuals[:, None]
        total = np.zeros((self.width, columns.shape[1]))
        whole = columns.sum(0)
        for held in self._held:
            if held.rows is not None:
                total[held.start : held.stop] = held.rows[at].T @ columns
                continue
            assert held.places is not None
            size = len(held.shares)
            sums = [np.bincount(held.places[at], weights=column, minlength=size) for column in columns.T]
            total[held.start : held.start + size] = np.stack(sums, 1) - np.multiply.outer(held.shares, whole)
            if held.around is not None:
                total[held.stop - 1] = held.around[at] @ columns
        return total if residuals.ndim > 1 else total[:, 0]


@dataclass(frozen=True)
class Additive:
    """Weights [width, K] and offsets [K] of the scores; K is one for two classes and for a regression."""

    weights: Floats
    offsets: Floats


def fit(
    rows: EncodedRows,
    targets: NDArray[Any],
    known: NDArray[np.bool_],
    start: Floats,
    curvature: float,
    noise_multiplier: float,
    settings: FitSettings,
    records: int,
    charge: Callable[[], Receipt],
    source: Source,
    *,
    link: Callable[[Floats], Floats],
    per_unit: int = 1,
    tell: Callable[[int, int], None] = lambda done, steps: None,
) -> Additive:
    """Fit weights by `settings.steps` releases, each charged by `charge` before it exists.

    `targets` [N, K] are what `link` of the scores should be; records that are not `known` count for nothing. `start`
    are the offsets [K], `curvature` is h, `records` is the public number n. One unit has at most `per_unit` records.
    """
    width, outputs = rows.width + 1, targets.shape[1]
    limit = settings.residual * (math.sqrt(2.0) if outputs > 1 else 1.0)
    reach = limit * rows.bound * per_unit
    deviation = noise_multiplier * reach
    noise = deviation**2 / settings.steps
    masses = np.append(rows.masses, rows.constant**2)
    steep = np.maximum(curvature * records * masses, 1e-9)
    scale = np.ones(width)
    ridge = _Ridge(steep, noise, rows.ordered, rows.columns, settings, scale)
    adapted, answers = round(settings.adapted * settings.steps), np.zeros((width, outputs))
    parts = [(entry, outputs) for entry in (*rows.entries, "")]
    weights, total, counted = np.zeros((width, outputs)), np.zeros((width, outputs)), 0.0
    for step in range(settings.steps):
        pull = np.zeros((width, outputs))
        for at in rows.split():
            residuals = targets[at] - link(rows.multiply(weights[:-1], at) + rows.constant * weights[-1] + start)
            kept = shorten(residuals, limit * rows.room[at]) * known[at, None]
            pull[:-1] += rows.add_up(kept, at)
            pull[-1] += rows.constant * kept.sum(0)
        receipt = charge()
        noised = add_matched_noise(source, receipt, torch.from_numpy(pull), deviation, "step", parts).numpy()
        if step < adapted:
            answers += noised + steep[:, None] * weights
        if step == adapted - 1:
            scale = find_scales(rows.spans, answers / adapted, deviation**2 / adapted, steep, ridge.variances)
            ridge = _Ridge(steep, noise, rows.ordered, rows.columns, settings, scale)
        weights = weights + settings.rate * ridge.move(noised - ridge.hold(weights))
        if step >= settings.first * (settings.steps - 1):
            often = LAST if step == settings.steps - 1 else 1.0
            total, counted = total + often * weights, counted + often
        tell(step + 1, settings.steps)
    mean = total / counted
    return Additive(mean[:-1], start + rows.constant * mean[-1])


def find_scales(
    spans: Sequence[tuple[int, int]], answers: Floats, noise: float, steep: Floats, variances: Floats
) -> Floats:
    """Find how much larger than expected the effects of each column are, by what the first steps released.

    `answers` are the mean of g + Hw, which is H times the effects, with noise of variance `noise` from the mechanism
    and H from the records. The factor of S that explains a column best is drawn towards one, as if `DOUBT` more entries
    said one.
    """
    expected = steep**2 * variances
    spread = noise + steep
    told = expected / (expected + spread)
    excess = (np.square(answers).mean(1) - spread) / np.maximum(expected, 1e-300)
    scales = np.ones(len(steep))
    for start, stop in spans:
        weight = np.square(told[start:stop])
        found = (DOUBT + float(weight @ excess[start:stop])) / (DOUBT + float(weight.sum()))
        scales[start:stop] = min(SCALES[1], max(SCALES[0], found))
    return scales


def shorten(residuals: Floats, limits: Floats) -> Floats:
    """Shorten rows [N, K] to lengths of at most `limits` [N]; values that are not finite become zero."""
    lengths = np.linalg.norm(residuals, axis=1, keepdims=True)
    kept = residuals * np.minimum(1.0, limits[:, None] / np.maximum(lengths, 1e-12))
    return np.asarray(np.where(np.isfinite(lengths), kept, 0.0))


def to_probability(scores: Floats) -> Floats:
    """Return the probability of the second of two classes."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(scores, -30.0, 30.0))))


def to_probabilities(scores: Floats) -> Floats:
    """Return the probabilities of K classes."""
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(raised / raised.sum(1, keepdims=True))


# -- probabilities ----------------------------------------------------------------------------------------------------


def count_scores(scores: Floats, positive: Floats, known: NDArray[np.bool_]) -> Floats:
    """Count [cells, 2] how many records of each of two classes have a score in each cell. A record moves it by one."""
    places = np.clip(np.searchsorted(SCORE_EDGES, scores, side="right"), 0, len(SCORE_EDGES))
    sides = (positive > 0.5).astype(np.int64)
    cells = len(SCORE_EDGES) + 1
    return np.bincount((2 * places + sides)[known], minlength=2 * cells).reshape(cells, 2).astype(np.float64)


def calibrate(counts: Floats, deviation: float) -> tuple[float, float]:
    """Find (a, b) such that a·score + b are log-odds, from noised `counts`: logistic regression towards a = 1, b = 0.

    It is a pure function of released values: Newton's method with a prior that is stronger with more noise.
    """
    inner = (SCORE_EDGES[1:] + SCORE_EDGES[:-1]) / 2
    middles = np.concatenate([[SCORE_EDGES[0]], inner, [SCORE_EDGES[-1]]])
    held = np.maximum(counts, 0.0)
    held = np.where(counts.sum(1, keepdims=True) > 2.0 * deviation, held, 0.0)
    design = np.stack([middles, np.ones_like(middles)], 1)
    prior = (1.0 + deviation) * np.eye(2) * 4.0
    found = np.array([1.0, 0.0])
    for _ in range(25):
        chance = to_probability(design @ found)
        size = held.sum(1)
        slope = design.T @ (held[:, 1] - size * chance) - prior @ (found - np.array([1.0, 0.0]))
        steep = design.T @ (design * (size * chance * (1 - chance))[:, None]) + prior
        found = found + np.clip(np.linalg.solve(steep, slope), -1.0, 1.0)
    return float(np.clip(found[0], 0.2, 5.0)), float(np.clip(found[1], -6.0, 6.0))


def balance(sums: Floats, deviation: float) -> Floats:
    """Find what to add to the offsets of K classes so that each is predicted about as often as it happens.

    `sums` [2, K] are released: how often each class happens, and the sum of its predicted probabilities. Classes that
    are lost in the noise stay as they are.
    """
    clear = (sums > 3.0 * deviation).all(0)
    ratio = np.where(clear, sums[0] / np.where(clear, sums[1], 1.0), 1.0)
    return np.asarray(np.log(np.clip(ratio, 0.2, 5.0)))


def choose_start(shares: Sequence[float]) -> tuple[Floats, float]:
    """Choose offsets [K] by the released shares of the classes, and the curvature h of cross-entropy there."""
    if len(shares) == 2:
        chance = min(max(shares[1], 1e-3), 1 - 1e-3)
        return np.array([math.log(chance / (1 - chance))]), chance * (1 - chance)
    kept = np.array(shares)
    return np.log(kept), float((kept * (1 - kept)).mean())
