"""How good a model of a table is on records that it has not seen, with 95 % intervals and what guessing would reach.

For two classes: AUC, average precision, accuracy, recall, precision and the confusion at a threshold, log loss and the
calibration error. For more classes: accuracy, and the means of each class's recall and of its AUC against the rest. For
numbers: RMSE, MAE and R². `measure` uses the held-out records as they are. `release` says the same by noised counts,
which one record moves by one, so that held-out records are protected too.

Intervals: Wilson's for shares, Hanley and McNeil's (1982) for AUC, that of a logit for average precision (Boyd, Eng and
Page 2013), the normal one for errors. Intervals of released counts are widened by the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.accounting.ledger import Receipt
from sordino.errors import InvalidInput
from sordino.figures import Estimate
from sordino.noise import Source, add_noise
from sordino.tables.additive import to_probabilities, to_probability
from sordino.tables.encoder import Encoder

Floats = NDArray[np.float64]
Z = 1.96
CELLS = np.linspace(-4.0, 4.0, 17)
"""Edges of the log-odds by which records are counted for released figures."""
HIDDEN = 0.3
"""A wider interval of the AUC says nothing about the model."""
HIDES = "the noise on the held-out figures hides how good the model is: give more metrics-epsilon, or hold out more"
AGAIN = 50
FURTHEST = 4.0
"""Released errors are clipped to this many spreads of the target."""
TENTHS = 10


@dataclass(frozen=True)
class Figures:
    """What was measured on `records` held-out records; `baseline` is what guessing reaches.

    `confusion[i][j]` counts records of class i that were taken for class j, at `threshold` for two classes.
    `released` says that noise protects the records.
    """

    task: str
    records: int
    values: Mapping[str, Estimate]
    baseline: Mapping[str, float]
    confusion: tuple[tuple[float, ...], ...] = ()
    threshold: float | None = None
    released: bool = False
    cautions: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> float:
        """Return the value of one figure, such as ``figures["auc"]``."""
        if name not in self.values:
            raise InvalidInput(f"there is no figure {name!r}: there are {', '.join(self.values)}")
        return self.values[name].value

    def to_plain(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        values = {name: {"value": f.value, "low": f.low, "high": f.high} for name, f in self.values.items()}
        return {**vars(self), "values": values, "baseline": dict(self.baseline), "cautions": list(self.cautions)}


def measure(scores: Floats, targets: Floats, encoder: Encoder, threshold: float = 0.5) -> Figures | None:
    """Measure the figures of scores [N, K] and targets [N, K] of records with a known target; None without any."""
    if not len(scores):
        return None
    if not encoder.classes:
        errors = encoder.spread * (scores - targets)[:, 0]
        around = encoder.spread * (targets[:, 0] - targets[:, 0].mean())
        return _describe_errors(errors, around)
    if len(encoder.classes) == 2:
        values, places = np.unique(scores[:, 0], return_inverse=True)
        positive = np.bincount(places, weights=targets[:, 0], minlength=len(values))
        everyone = np.bincount(places, minlength=len(values)).astype(np.float64)
        return describe_counts(values, everyone - positive, positive.astype(np.float64), threshold)
    chances, classes = to_probabilities(scores), targets.argmax(1)
    size = len(encoder.classes)
    confusion = np.bincount(size * classes + chances.argmax(1), minlength=size * size).reshape(size, size)
    areas = [find_area(chances[:, i], targets[:, i]) for i in range(size) if 0 < targets[:, i].sum() < len(targets)]
    more = {}
    if areas:
        kept = np.array(areas)
        more["auc"] = _bound(float(kept[:, 0].mean()), float(np.sqrt((kept[:, 1] ** 2).sum()) / len(kept)))
    loss = -np.log(np.maximum(chances[np.arange(len(classes)), classes], 1e-12))
    more["log_loss"] = _widen(float(loss.mean()), float(loss.std()) / math.sqrt(len(loss)))
    return describe_confusion(confusion.astype(np.float64), more)


def release(
    scores: Floats,
    targets: Floats,
    encoder: Encoder,
    noise_multiplier: float,
    per_unit: int,
    receipt: Receipt,
    source: Source,
) -> Figures | None:
    """Release the figures by noised sums that a record moves by one in length; their event must have been charged.

    None if the noise leaves nothing to say.
    """
    deviation = noise_multiplier * per_unit
    if not encoder.classes:
        sums = add_noise(source, receipt, torch.from_numpy(sum_errors(scores, targets)), deviation).numpy()
        return _describe_sums(sums, encoder)
    size = len(encoder.classes)
    if size == 2:
        cells = len(CELLS) + 1
        places = np.searchsorted(CELLS, scores[:, 0], side="right")
        counts = np.bincount(2 * places + (targets[:, 0] > 0.5), minlength=2 * cells)
        exact = torch.from_numpy(counts.reshape(cells, 2).astype(np.float64))
        noised = add_noise(source, receipt, exact, deviation).numpy()
        middles = np.concatenate([[CELLS[0]], (CELLS[1:] + CELLS[:-1]) / 2, [CELLS[-1]]])
        found = _widen_all(noised, deviation, lambda counts: describe_counts(middles, counts[:, 0], counts[:, 1], 0.5))
    else:
        places = size * targets.argmax(1) + scores.argmax(1)
        exact = torch.from_numpy(np.bincount(places, minlength=size * size).reshape(size, size).astype(np.float64))
        noised = add_noise(source, receipt, exact, deviation).numpy()
        found = _widen_all(noised, deviation, lambda counts: describe_confusion(counts, {}))
    return None if found is None else Figures(**{**vars(found), "released": True})


def _widen_all(noised: Floats, deviation: float, describe: Callable[[Floats], Figures | None]) -> Figures | None:
    """Compute figures of noised counts, with intervals widened by the effect of the same noise once more.

    Counts below zero stay, so that sums and products are right on average.
    """
    found = describe(noised)
    if found is None:
        return None
    source = np.random.default_rng(0)  # from values that are public by now
    more = [describe(noised + deviation * source.normal(size=noised.shape)) for _ in range(AGAIN)]
    values = {}
    for name, figure in found.values.items():
        others = [other.values[name].value for other in more if other is not None and name in other.values]
        wide = Z * float(np.std(others)) if others else 0.0
        low, high = (math.hypot(end - figure.value, wide) for end in (figure.low, figure.high))
        most = math.inf if name == "log_loss" else max(1.0, figure.value)
        values[name] = Estimate(figure.value, max(0.0, figure.value - low), min(most, figure.value + high))
    auc = values.get("auc")
    if auc is not None and auc.high - auc.low > HIDDEN:
        found = Figures(**{**vars(found), "cautions": (*found.cautions, HIDES)})
    return Figures(**{**vars(found), "values": values})


def sum_errors(scores: Floats, targets: Floats) -> Floats:
    """Sum over records 1, |e|, e², y and y², each within 0..1 or -1..1 and together of length 1 at most."""
    errors = np.clip((scores - targets)[:, 0], -FURTHEST, FURTHEST) / FURTHEST
    values = np.clip(targets[:, 0], -FURTHEST, FURTHEST) / FURTHEST
    parts = np.stack([np.ones_like(errors), np.abs(errors), errors**2, values, values**2])
    return np.asarray(parts.sum(1) / math.sqrt(5.0))


def _describe_sums(sums: Floats, encoder: Encoder) -> Figures | None:
    count, absolute, squares, values, value_squares = math.sqrt(5.0) * sums
    if count < 10:
        return None
    unit = FURTHEST * encoder.spread
    square = max(squares / count, 1e-9)
    variance = max(value_squares / count - (values / count) ** 2, 1e-9)
    mae, rmse = unit * max(absolute / count, 0.0), unit * math.sqrt(square)
    r2 = 1 - square / variance
    exact = {name: Estimate(value, value, value) for name, value in (("rmse", rmse), ("mae", mae), ("r2", r2))}
    baseline = {"rmse": unit * math.sqrt(variance), "r2": 0.0}
    return Figures("regression", round(count), exact, baseline, released=True, cautions=_judge_errors(r2))


def _describe_errors(errors: Floats, around: Floats) -> Figures:
    count = len(errors)
    squares, variance = errors**2, float((around**2).mean())
    mean = float(squares.mean())
    rmse, root = math.sqrt(mean), math.sqrt(count)
    r2 = 1 - mean / variance if variance > 0 else 0.0
    slope = float((squares - (1 - r2) * around**2).std()) / (variance * root) if variance > 0 else 0.0
    absolute = np.abs(errors)
    values = {
        "rmse": _widen(rmse, float(squares.std()) / (2 * max(rmse, 1e-12) * root)),
        "mae": _widen(float(absolute.mean()), float(absolute.std()) / root),
        "r2": Estimate(r2, r2 - Z * slope, min(1.0, r2 + Z * slope)),
    }
    baseline = {"rmse": math.sqrt(variance), "mae": float(np.abs(around - np.median(around)).mean()), "r2": 0.0}
    return Figures("regression", count, values, baseline, cautions=_judge_errors(r2))


def _judge_errors(r2: float) -> tuple[str, ...]:
    if r2 > 0.01:
        return ()
    return (f"the model is no better than the mean of the target (R² {r2:.3f}): do not use it",)


def describe_counts(values: Floats, negative: Floats, positive: Floats, threshold: float) -> Figures | None:
    """Compute figures of two classes, from the number of records of each at every log-odds, in increasing order."""
    ones, zeros = max(0.0, float(positive.sum())), max(0.0, float(negative.sum()))
    count = ones + zeros
    if count < 1:
        return None
    chances = to_probability(values)
    taken = chances >= threshold
    confusion = (
        (float(negative[~taken].sum()), float(negative[taken].sum())),
        (float(positive[~taken].sum()), float(positive[taken].sum())),
    )
    right, called = confusion[0][0] + confusion[1][1], confusion[0][1] + confusion[1][1]
    guess = max(ones, zeros) / count
    right, called = min(max(right, 0.0), count), max(called, 0.0)
    found = {"accuracy": share(right, count)}
    if ones >= 1 and zeros >= 1:
        area = float(((np.cumsum(negative) - negative / 2) * positive).sum()) / (ones * zeros)
        area = min(max(area, 0.0), 1.0)
        above = np.cumsum(positive[::-1]), np.cumsum((positive + negative)[::-1])
        precise = np.clip(above[0] / np.maximum(above[1], 1e-12), 0.0, 1.0)
        precision = min(max(float((precise * positive[::-1]).sum()) / ones, 0.0), 1.0)
        found["auc"] = _bound(area, _deviate(area, ones, zeros))
        found["average_precision"] = _bound_logit(precision, ones)
    if ones >= 1:
        found["recall"] = share(confusion[1][1], ones)
    if called >= 1:
        found["precision"] = share(confusion[1][1], called)
    kept = np.clip(chances, 1e-12, 1 - 1e-12)
    losses = -np.log(np.stack([1 - kept, kept]))
    loss = float((losses * np.stack([negative, positive])).sum()) / count
    loss = max(0.0, loss)
    wide = math.sqrt(max(0.0, float((losses**2 * np.stack([negative, positive])).sum()) / count - loss**2) / count)
    found["log_loss"] = _widen(loss, wide)
    error = find_calibration_error(chances, negative, positive)
    found["calibration_error"] = Estimate(error, error, error)
    baseline = {"accuracy": guess, "auc": 0.5, "average_precision": ones / count}
    figures = Figures("classification", round(count), found, baseline, confusion, threshold)
    return Figures(**{**vars(figures), "cautions": _judge_classes(figures)})


def find_calibration_error(chances: Floats, negative: Floats, positive: Floats) -> float:
    """Find the mean distance between probabilities and what happened, over tenths of the probability."""
    tenths = np.minimum((chances * TENTHS).astype(int), TENTHS - 1)
    size = np.bincount(tenths, weights=negative + positive, minlength=TENTHS)
    said = np.bincount(tenths, weights=chances * (negative + positive), minlength=TENTHS)
    happened = np.bincount(tenths, weights=positive, minlength=TENTHS)
    return float(np.abs(said - happened).sum() / max(size.sum(), 1.0))


def describe_confusion(confusion: Floats, more: Mapping[str, Estimate]) -> Figures | None:
    """Compute figures of several classes from the counts of (class, predicted class)."""
    count = float(confusion.sum())
    sizes = confusion.sum(1)
    some = sizes >= 1
    if count < 1 or not some.any():
        return None
    recalls = np.clip(np.diag(confusion)[some] / sizes[some], 0.0, 1.0)
    wide = float(np.sqrt((recalls * (1 - recalls) / sizes[some]).sum())) / int(some.sum())
    found = {
        "accuracy": share(float(np.diag(confusion).sum()), count),
        **more,
        "recall": _bound(float(recalls.mean()), wide),
    }
    baseline = {"accuracy": float(sizes.max()) / count, "auc": 0.5, "recall": 1.0 / int(some.sum())}
    rows = tuple(tuple(row) for row in confusion.tolist())
    figures = Figures("classification", round(count), found, baseline, rows)
    return Figures(**{**vars(figures), "cautions": _judge_classes(figures)})


def _judge_classes(figures: Figures) -> tuple[str, ...]:
    """Say what the accuracy alone would hide."""
    said = []
    accuracy, guess = figures.values["accuracy"], figures.baseline["accuracy"]
    area = figures.values.get("auc")
    if area is not None and area.low <= 0.5:
        said.append(f"the model is not clearly better than guessing (AUC {area}): do not use it")
    elif accuracy.value <= guess:
        said.append(
            f"accuracy {accuracy.value:.1%} does not beat always saying the commonest class ({guess:.1%}): "
            "look at AUC and recall, or choose another threshold"
        )
    recall = figures.values.get("recall")
    if guess > 0.9 and recall is not None and figures.threshold is not None and recall.value < 0.5:
        said.append(
            f"the classes are unequal: at threshold {figures.threshold:g} the model finds {recall.value:.0%} of "
            "the rare one"
        )
    return tuple(said)


def find_area(scores: Floats, positive: Floats) -> tuple[float, float]:
    """Find the AUC and its standard deviation."""
    values, places = np.unique(scores, return_inverse=True)
    ones = np.bincount(places, weights=positive, minlength=len(values))
    zeros = np.bincount(places, minlength=len(values)) - ones
    area = float(((np.cumsum(zeros) - zeros / 2) * ones).sum()) / (float(ones.sum()) * float(zeros.sum()))
    return area, _deviate(area, float(ones.sum()), float(zeros.sum()))


def _deviate(area: float, ones: float, zeros: float) -> float:
    """Return the standard deviation of an AUC (Hanley and McNeil 1982); for 0 and 1, as if half a record were wrong."""
    least = 0.5 / (min(ones, zeros) + 1)
    area = min(max(area, least), 1 - least)
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
    return math.sqrt(max(spread, 0.0) / (ones * zeros))


def share(part: float, whole: float) -> Estimate:
    """Return a share with Wilson's interval."""
    value = min(max(part / whole, 0.0), 1.0)
    middle, spread = value + Z**2 / (2 * whole), Z * math.sqrt(value * (1 - value) / whole + Z**2 / (4 * whole**2))
    scale = 1 + Z**2 / whole
    return Estimate(value, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def _bound(value: float, deviation: float) -> Estimate:
    return Estimate(value, max(0.0, value - Z * deviation), min(1.0, value + Z * deviation))


def _bound_logit(value: float, count: float) -> Estimate:
    """Return the interval of a logit; for 0 and 1, which have no logit, as if half a record were different."""
    least = 0.5 / (count + 1)
    inside = min(max(value, least), 1 - least)
    logit, wide = math.log(inside / (1 - inside)), Z / math.sqrt(count * inside * (1 - inside))
    low, high = (1 / (1 + math.exp(-min(max(at, -700.0), 700.0))) for at in (logit - wide, logit + wide))
    return Estimate(value, min(low, value), max(high, value))


def _widen(value: float, deviation: float) -> Estimate:
    return Estimate(value, max(0.0, value - Z * deviation), value + Z * deviation)
