"""`comparison`: methods side by side, on one self-contained page."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.guarantee import label_method, read_versions
from sordino.errors import InvalidInput
from sordino.report import page
from sordino.report.charts import Axis, Chart, Series, percent, plain, whole
from sordino.report.prices import thin

MOST_TICKS = 7
_SCHEDULES = {"noise": "Noise multiplier", "clip": "Clipping bound"}
MOST_POINTS = 60
Results = Sequence[Mapping[str, Any]]


def comparison(results: Results, path: str | os.PathLike[str], *, title: str = "Methods compared") -> None:
    """Write one HTML page that compares methods: accuracy against ε with its spread, curves, schedules and tables.

    `results` has one mapping per finished run, with these keys:

    - `dataset`: name of the data, one section of the page each
    - `method`: name of the method, one colour each
    - `epsilon`: the requested ε; None for a run without privacy, which is drawn as a line to compare with
    - `seed`: which repetition; runs that differ only in it are one point with its spread
    - `accuracy`: held-out accuracy in 0..1
    - `seconds`: how long it took, or None
    - `basis`: "proven", "asymptotic" or "published"
    - `accounting`: "published" if the paper's accountant chose the noise; such runs are a separate method here
    - `guarantee`: `Guarantee.to_dict()`, or None without privacy; its ε is the one that the table states
    - `curve`: `[{"step": int, "accuracy": float}, ...]`, may be empty
    - `noise`: noise multipliers, one per step or a few evenly spread ones, may be empty
    - `clip`: clipping bounds, likewise
    - `model`, `features`, `length`: how the figure was reached, in words; shown if any run says so

    The first five keys are needed, the others may be missing. Everything is escaped; nothing is fetched.
    """
    rows = [_Row.of(result) for result in results]
    if not rows:
        raise InvalidInput("results is empty: a comparison needs at least one run")
    page.write(path, _render_methods(rows, title))


@dataclass(frozen=True)
class _Row:
    """One run."""

    dataset: str
    method: str
    epsilon: float | None
    seed: str
    accuracy: float
    seconds: float | None
    basis: str
    stated: float | None
    curve: tuple[tuple[float, float], ...]
    noise: tuple[float, ...]
    clip: tuple[float, ...]
    settings: tuple[str, str, str] = ("", "", "")

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> _Row:
        try:
            epsilon, guarantee = result["epsilon"], result.get("guarantee") or {}
            basis, accounting = str(result.get("basis", "")), str(result.get("accounting", "proven"))
            return cls(
                dataset=str(result["dataset"]),
                method=label_method(str(result["method"]), basis, accounting),
                epsilon=None if epsilon in (None, math.inf, "infinity") else _require_positive(epsilon),
                seed=str(result["seed"]),
                accuracy=_require_finite(result["accuracy"]),
                seconds=None if result.get("seconds") is None else _require_finite(result["seconds"]),
                basis=basis,
                stated=float(str(guarantee["epsilon"])) if "epsilon" in guarantee else None,
                curve=tuple(
                    (_require_finite(p["step"]), _require_finite(p["accuracy"])) for p in result.get("curve") or ()
                ),
                noise=tuple(map(_require_finite, result.get("noise") or ())),
                clip=tuple(map(_require_finite, result.get("clip") or ())),
                settings=(_read_word(result, "model"), _read_word(result, "features"), _read_word(result, "length")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"a result of the comparison cannot be used: {error!r}") from None


def _read_word(result: Mapping[str, Any], key: str) -> str:
    return str(result.get(key) or "")


def _require_finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not finite")
    return number


def _require_positive(value: Any) -> float:
    number = _require_finite(value)
    if number <= 0:
        raise ValueError(f"epsilon={value} must be > 0, or None without privacy")
    return number


def _render_methods(rows: Sequence[_Row], title: str) -> str:
    """Render the page about `rows`."""
    names = list(dict.fromkeys(row.dataset for row in rows))
    sections = [
        _describe_dataset(k, name, [row for row in rows if row.dataset == name]) for k, name in enumerate(names)
    ]
    return page.render("comparison.html", title=title, sections=sections, versions=read_versions(), runs=len(rows)).html


def _describe_dataset(number: int, dataset: str, rows: Sequence[_Row]) -> dict[str, Any]:
    groups = _group(rows, lambda row: (row.method, row.epsilon))
    table = [_summarise(method, epsilon, group) for (method, epsilon), group in groups.items()]
    best: dict[float, float] = {}
    equal = [line for line in table if line["basis"] in ("proven", "–") and line["epsilon"] is not None]
    for line in equal:  # without a proof, an ε is not on an equal footing
        best[line["epsilon"]] = max(best.get(line["epsilon"], 0.0), line["mean"])
    for line in table:
        line["best"] = line in equal and line["mean"] == best[line["epsilon"]]
    single = len({row.epsilon for row in rows if row.epsilon is not None}) == 1
    charts = [
        None if single else _chart_against_epsilon(number, rows),
        *(_chart_over_steps(number, epsilon, rows) for epsilon in _choose_epsilons(rows)),
        *(_chart_schedule(number, key, title, rows) for key, title in _SCHEDULES.items()),
    ]
    return {
        "dataset": dataset,
        "charts": [chart for chart in charts if chart],
        "constants": _describe_constants(rows),
        "table": table,
        "bars": _list_bars(table) if single else [],
        "settled": any(any(row.settings) for row in rows),
    }


def _list_bars(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List a bar for every method if there is only one ε: its mean, and a line from the worst to the best run."""
    ordered = sorted(table, key=lambda line: -line["mean"])
    return [
        {
            "name": line["method"] if line["epsilon"] is not None else f"{line['method']}, without privacy",
            "width": f"{100 * min(max(line['mean'], 0.0), 1.0):.2f}%",
            "low": f"{100 * min(max(line['least'], 0.0), 1.0):.2f}%",
            "high": f"{100 * min(max(line['most'], 0.0), 1.0):.2f}%",
            "value": line["accuracy"],
            "free": line["epsilon"] is None,
        }
        for line in ordered
    ]


def _summarise(method: str, epsilon: float | None, group: Sequence[_Row]) -> dict[str, Any]:
    accuracies = [row.accuracy for row in group]
    seconds = [row.seconds for row in group if row.seconds is not None]
    stated = [row.stated for row in group if row.stated is not None]
    return {
        "method": method,
        "epsilon": epsilon,
        "target": "∞" if epsilon is None else plain(epsilon),
        "stated": max(stated) if stated else None,
        "basis": " / ".join(sorted({row.basis for row in group if row.basis})) or "–",
        "mean": statistics.fmean(accuracies),
        "least": min(accuracies),
        "most": max(accuracies),
        "settings": group[0].settings,
        "accuracy": _write_spread(accuracies),
        "runs": len(group),
        "seconds": whole(statistics.fmean(seconds)) if seconds else "–",
    }


def _write_spread(values: Sequence[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _chart_against_epsilon(number: int, rows: Sequence[_Row]) -> Chart | None:
    private = [row for row in rows if row.epsilon is not None]
    if not private:
        return None
    series = []
    for method, group in _group(private, lambda row: row.method).items():
        by = sorted(_group(group, lambda row: row.epsilon).items())
        accuracies = [(epsilon, [row.accuracy for row in same]) for epsilon, same in by]
        points = [(epsilon, statistics.fmean(values)) for epsilon, values in accuracies]
        spread = [(epsilon, min(values), max(values)) for epsilon, values in accuracies if len(values) > 1]
        series.append(Series(method, points, dotted=True, spread=spread))
    free = [
        Series(f"{m}, without privacy", _draw_level(private, g), planned=True)
        for m, g in _group_unprotected(rows).items()
    ]
    values = [row.accuracy for row in rows]
    return Chart(
        f"accuracy-{number}",
        "Accuracy against ε",
        f"Mean held-out accuracy of {len(series)} methods at each ε, with the least and the largest over seeds.",
        _find_epsilon_axis(private),
        _find_share_axis(values),
        [*series, *free],
        note="Points are means over seeds, bars reach from the worst to the best.",
        wide=True,
    )


def _find_epsilon_axis(rows: Sequence[_Row]) -> Axis:
    values = sorted({row.epsilon for row in rows if row.epsilon is not None})
    if len(values) <= MOST_TICKS:
        return Axis("ε", values[0] / 1.2, values[-1] * 1.2, log=True, fixed=tuple(values))
    return Axis("ε", values[0] / 1.2, values[-1] * 1.2, log=True)


def _find_share_axis(values: Iterable[float]) -> Axis:
    axis = Axis.over("accuracy", values)
    return Axis("accuracy", max(0.0, axis.low), min(1.0, axis.high), write=percent)


def _group_unprotected(rows: Sequence[_Row]) -> dict[Any, list[_Row]]:
    return _group([row for row in rows if row.epsilon is None], lambda row: row.method)


def _draw_level(private: Sequence[_Row], group: Sequence[_Row]) -> list[tuple[float, float]]:
    mean = statistics.fmean(row.accuracy for row in group)
    places = [row.epsilon for row in private if row.epsilon is not None]
    return [(place, mean) for place in sorted(set(places))]


def _choose_epsilons(rows: Sequence[_Row]) -> list[float]:
    """Choose the smallest, the middle and the largest ε that have curves: nobody would read more."""
    found = sorted({row.epsilon for row in rows if row.epsilon is not None and row.curve})
    return sorted({found[0], found[len(found) // 2], found[-1]}) if found else []


def _chart_over_steps(number: int, epsilon: float, rows: Sequence[_Row]) -> Chart | None:
    """Chart accuracy over steps at one ε: mean and range over seeds, which may have been evaluated at other steps."""
    series = []
    for method, group in _group([r for r in rows if r.epsilon == epsilon and r.curve], lambda r: r.method).items():
        steps, values = _align([row.curve for row in group])
        keep = [round(k) for k in np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS))]
        steps, values = [steps[k] for k in keep], values[:, keep]
        points = list(zip(steps, values.mean(0).tolist(), strict=True))
        spread = list(zip(steps, values.min(0).tolist(), values.max(0).tolist(), strict=True))
        series.append(Series(method, points, spread=spread if len(group) > 1 else []))
    if all(len(s.points) < 2 for s in series):  # a curve of one point shows nothing
        return None
    return Chart(
        f"steps-{number}-{_write_ident(epsilon)}",
        f"Accuracy over steps at ε = {plain(epsilon)}",
        f"Held-out accuracy of {len(series)} methods while they train, mean and range over seeds.",
        Axis.along("step", (x for s in series for x, _ in s.points)),
        _find_share_axis(
            y for s in series for p in (s.points, [(x, v) for x, *vs in s.spread for v in vs]) for _, y in p
        ),
        series,
    )


def _align(curves: Sequence[tuple[tuple[float, float], ...]]) -> tuple[list[float], NDArray[np.float64]]:
    """Align every curve to the first one's steps, as far as all reach, by straight lines between measurements."""
    sides = [sorted(curve) for curve in curves]
    low, high = max(side[0][0] for side in sides), min(side[-1][0] for side in sides)
    steps = sorted({low, high, *(step for step, _ in sides[0] if low < step < high)}) if low <= high else [low]
    return steps, np.array([np.interp(steps, *np.transpose(side)) for side in sides])


def _find_schedules(key: str, rows: Sequence[_Row]) -> dict[str, tuple[float, ...]]:
    """Return the value of `key` at every step, for every method at its largest ε."""
    groups = _group([row for row in rows if getattr(row, key)], lambda row: row.method)
    return {name: getattr(max(group, key=lambda row: row.epsilon or 0.0), key) for name, group in groups.items()}


def _describe_constants(rows: Sequence[_Row]) -> list[str]:
    """Write one line instead of a chart of flat lines."""
    lines = []
    for key, title in _SCHEDULES.items():
        found = _find_schedules(key, rows)
        if found and all(len(set(values)) == 1 for values in found.values()):
            told = ", ".join(f"{method} {values[0]:.4g}" for method, values in found.items())
            lines.append(f"{title}, the same at every step, at the largest ε of each method: {told}.")
    return lines


def _chart_schedule(number: int, key: str, title: str, rows: Sequence[_Row]) -> Chart | None:
    """Chart the schedule of every method at its largest ε, over the share of the run; None if nothing moves."""
    found = _find_schedules(key, rows)
    if all(len(set(values)) == 1 for values in found.values()):
        return None
    series = []
    for method, values in found.items():
        points = [(k / max(1, len(values) - 1), value) for k, value in enumerate(values)]
        series.append(Series(method, thin(points, MOST_POINTS), stepped=True))
    return Chart(
        f"{key}-{number}",
        title,
        f"{title} of {len(series)} methods from the first to the last step, at the largest ε of each.",
        Axis("share of the run", 0.0, 1.0, write=percent),
        Axis.over(title.lower(), (y for s in series for _, y in s.points), zero=True),
        series,
        note="At the largest ε of each method.",
    )


def _group(rows: Sequence[_Row], key: Any) -> dict[Any, list[_Row]]:
    groups: dict[Any, list[_Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _write_ident(value: float) -> str:
    return f"{value:g}".replace(".", "-").replace("+", "")
