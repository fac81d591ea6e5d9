"""What a minute, ten minutes and an hour of one core buy: accuracy against core-seconds, from stored runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overview import TITLES
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
        "How accurate can a private model be after a minute of training, after ten, after an hour? Every figure is at "
        "a proven ε. Where two columns agree, none of the methods that we ran used the extra time to do better.\n"
    )
    yield (
        "Time is the processor time of one core for the training alone, the mean over seeds, on a shared machine with "
        "two cores. It is also the best measure of energy that we have. It leaves out what is done once: computing "
        "features (a few minutes for each dataset, a quarter of an hour for the handwriting network) and searching for "
        "settings. `python -m benchmarks.results write` makes this page from stored runs.\n"
    )
    for epsilon in SHOWN:
        yield f"## ε = {epsilon:g}\n"
        lines = []
        for dataset in datasets:
            here = [point for point in points if (point.dataset, point.epsilon) == (dataset, epsilon)]
            lines.append([TITLES[dataset], *(_say_best(here, limit) for limit in BUDGETS.values())])
        yield write_markdown(["dataset", *BUDGETS], lines)
    yield "## The best for each time\n"
    yield (
        "These methods are on the front: to be more accurate than one of them takes longer. Times are core-seconds, "
        "accuracies per cent (number of seeds).\n"
    )
    for dataset in datasets:
        yield f"### {TITLES[dataset]}\n"
        yield f"![accuracy against time on {TITLES[dataset]}](../img/results/{dataset}-cost.svg)\n"
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
        axes.set(xscale="log", xlabel="core-seconds", ylabel="test accuracy, %", title=TITLES.get(dataset, dataset))
        axes.legend(fontsize="small", loc="lower right")
        paths.append(folder / f"{dataset}-cost.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
