"""What a minute, ten minutes and an hour of one core buy: accuracy against core-seconds, from stored runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.making import find_making
from benchmarks.overview import TITLES
from sordino.lab.experiments.publishing import load_pyplot
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import write_markdown

SHOWN = (1.0, 3.0)
BUDGETS = {"a minute": 60.0, "ten minutes": 600.0, "an hour": 3600.0}


@dataclass(frozen=True)
class Point:
    """All seeds of a method at one proven ε: the mean of its core-seconds, and of its accuracies in per cent.

    `making` are the core-seconds of its features, which are made once; None where they were not measured.
    """

    dataset: str
    epsilon: float
    method: str
    seconds: float
    making: float | None
    accuracy: float
    seeds: int


def find_points(rows: Sequence[Row]) -> list[Point]:
    """Proven runs whose processor time is known, by dataset, ε and method; runs of old scripts kept none."""
    groups: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["basis"] == "proven" and row["epsilon"] in SHOWN and row.get("processor_seconds"):
            groups[row["dataset"], row["epsilon"], row["method"]].append(row)
    return [
        Point(
            *key,
            statistics.mean(row["processor_seconds"] for row in group),
            find_making(group[0]["case"]),
            100 * statistics.mean(row["accuracy"] for row in group),
            len(group),
        )
        for key, group in sorted(groups.items())
    ]


def find_front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in accuracy without taking longer, the quickest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (each.seconds, -each.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def write_page(rows: Sequence[Row], datasets: Sequence[str]) -> Iterator[str]:
    """The page, part by part."""
    points = find_points(rows)
    yield "# What a minute, ten minutes and an hour buy\n"
    yield (
        "How accurate is a private model after a minute, after ten minutes, after an hour? Time is the processor time "
        "of one core, averaged over seeds, on shared machines with two cores. It is also our best estimate of energy. "
        "Every figure is at a proven ε. The time to search for settings is not included; "
        "[provenance](../provenance.md) describes that search. `python -m benchmarks.results write` makes this page "
        "from stored runs.\n"
    )
    yield "## From nothing\n"
    yield (
        "The best result that fits into the time, which includes computing the features once. `python -m "
        "benchmarks.making` measures how long that takes; methods that it has not measured are left out. Where two "
        "columns agree, none of our methods did better with the extra time.\n"
    )
    yield from _tabulate_budgets(points, datasets, from_nothing=True)
    yield "## With features already computed\n"
    yield "Training only, as in every run after the first.\n"
    yield from _tabulate_budgets(points, datasets, from_nothing=False)
    yield "## The best for each time\n"
    yield (
        "No method that we ran is both faster and more accurate than one in these tables. The columns are "
        "core-seconds of training, core-seconds to compute the features once, and accuracy in per cent (number of "
        "seeds).\n"
    )
    for dataset in datasets:
        yield f"### {TITLES[dataset]}\n"
        yield f"![accuracy against time on {TITLES[dataset]}](../img/results/{dataset}-cost.svg)\n"
        lines = [
            [
                *(f"{point.epsilon:g}", point.method, f"{point.seconds:.0f}"),
                "not measured" if point.making is None else f"{point.making:.0f}",
                f"{point.accuracy:.2f} ({point.seeds})",
            ]
            for epsilon in SHOWN
            for point in find_front([p for p in points if (p.dataset, p.epsilon) == (dataset, epsilon)])
        ]
        header = ["ε", "method", "training", "features, once", "accuracy"]
        yield write_markdown(header, lines) if lines else "No run is stored yet.\n"


def _tabulate_budgets(points: Sequence[Point], datasets: Sequence[str], *, from_nothing: bool) -> Iterator[str]:
    """A table for each ε: the best that each budget buys, by dataset.

    From nothing, only where the time of the most accurate method's features is known: the others would mislead.
    """
    for epsilon in SHOWN:
        lines = []
        for dataset in datasets:
            here = [point for point in points if (point.dataset, point.epsilon) == (dataset, epsilon)]
            if from_nothing and here and max(here, key=lambda point: point.accuracy).making is None:
                lines.append([TITLES[dataset], *("not measured" for _ in BUDGETS)])
                continue
            if from_nothing:
                here = [replace(p, seconds=p.seconds + p.making) for p in here if p.making is not None]
            lines.append([TITLES[dataset], *(_say_best(here, limit) for limit in BUDGETS.values())])
        yield write_markdown([f"ε = {epsilon:g}", *BUDGETS], lines)


def _say_best(points: Sequence[Point], limit: float) -> str:
    fitting = find_front([point for point in points if point.seconds <= limit])
    if not fitting:
        return "-"
    best = fitting[-1]
    return f"{best.accuracy:.1f} ({best.method}, {best.seconds:.0f} s)"


def draw_costs(rows: Sequence[Row], folder: Path) -> list[Path]:
    """``<dataset>-cost.svg``: every method as a point, and the front as a line, at both ε."""
    pyplot, points, paths = load_pyplot(), find_points(rows), []
    folder.mkdir(parents=True, exist_ok=True)
    for dataset in sorted({point.dataset for point in points}):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for epsilon, colour in zip(SHOWN, ("tab:blue", "tab:orange"), strict=True):
            here = [point for point in points if (point.dataset, point.epsilon) == (dataset, epsilon)]
            axes.scatter([p.seconds for p in here], [p.accuracy for p in here], s=12, color=colour, alpha=0.5)
            front = find_front(here)
            line = {"drawstyle": "steps-post", "color": colour, "label": f"ε = {epsilon:g}"}
            axes.plot([p.seconds for p in front], [p.accuracy for p in front], **line)
            for point in front:
                place = (point.seconds, point.accuracy)
                axes.annotate(point.method, place, fontsize=7, textcoords="offset points", xytext=(3, 3))
        title = TITLES.get(dataset, dataset)
        axes.set(xscale="log", xlabel="core-seconds of training", ylabel="test accuracy, %", title=title)
        axes.legend(fontsize="small", loc="lower right")
        paths.append(folder / f"{dataset}-cost.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
