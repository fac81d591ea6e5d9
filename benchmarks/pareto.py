"""What a minute, ten minutes and an hour of one core buy: accuracy against core-seconds, from stored runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sordino.lab.experiments.publishing import load_pyplot
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import write_markdown

SHOWN = (1.0, 3.0)
BUDGETS = {"a minute": 60.0, "ten minutes": 600.0, "an hour": 3600.0}


@dataclass(frozen=True)
class Point:
    """All seeds of a method at one proven ε: the mean of its core-seconds, and of its accuracies in per cent."""

    dataset: str
    epsilon: float
    method: str
    seconds: float
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
        "Written by `python -m benchmarks.results write` from stored runs. Time is processor time of one core for the "
        "training itself, the mean over seeds, on a shared machine with two cores: as good a measure of energy as we "
        "have. What is made once is not in it: features (a few minutes a dataset; the network of the handwriting "
        "features about a quarter of an hour) and the search for settings. Every figure is at a proven ε. Where "
        "two columns agree, more time bought nothing among the methods that were run.\n"
    )
    for epsilon in SHOWN:
        yield f"## ε = {epsilon:g}\n"
        lines = []
        for dataset in datasets:
            here = [point for point in points if (point.dataset, point.epsilon) == (dataset, epsilon)]
            lines.append([dataset, *(_say_best(here, limit) for limit in BUDGETS.values())])
        yield write_markdown(["dataset", *BUDGETS], lines)
    yield "## The front of each dataset\n"
    yield "Methods that no other beats without taking longer: core-seconds, accuracy in per cent (seeds).\n"
    for dataset in datasets:
        yield f"![{dataset}](../img/results/{dataset}-cost.svg)\n"
        lines = [
            [f"{point.epsilon:g}", point.method, f"{point.seconds:.0f}", f"{point.accuracy:.2f} ({point.seeds})"]
            for epsilon in SHOWN
            for point in find_front([p for p in points if (p.dataset, p.epsilon) == (dataset, epsilon)])
        ]
        yield write_markdown(["ε", "method", "core-seconds", "accuracy"], lines) if lines else "No run is stored yet.\n"


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
        axes.set(xscale="log", xlabel="core-seconds", ylabel="test accuracy, %", title=dataset)
        axes.legend(fontsize="small", loc="lower right")
        paths.append(folder / f"{dataset}-cost.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
