"""Publishes finished runs: tables, exports, the HTML page, and figures if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sordino.accounting.guarantee import label_method
from sordino.errors import SordinoError
from sordino.lab.experiments.results import Row, export
from sordino.lab.experiments.summaries import (
    Summary,
    accuracy_table,
    describe_settings,
    epsilon_table,
    epsilon_to_reach,
    levels_for,
    summarise,
)
from sordino.report import comparison


def publish(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write results.csv, results.parquet, table.md, figures/*.svg and comparison.html, as far as extras allow."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.csv", folder / "table.md"]
    export(rows, paths[0])
    levels = levels_for(rows)
    table = accuracy_table(rows, settings=True)
    paths[1].write_text(f"{table}\nε spent to reach an accuracy\n\n{epsilon_table(rows, levels)}")
    if importlib.util.find_spec("pyarrow"):
        paths.append(folder / "results.parquet")
        export(rows, paths[-1])
    if importlib.util.find_spec("matplotlib"):
        paths += draw_figures(rows, folder / "figures")
    paths.append(folder / "comparison.html")
    comparison([{**row, **_tell_settings(row)} for row in rows], paths[-1], title="Methods at equal ε")
    return paths


def _tell_settings(row: Row) -> dict[str, str]:
    return dict(zip(("model", "features", "length"), describe_settings([row]), strict=True))


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """All figures of every dataset in `rows`, as ``<dataset>-<what>.svg``."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dataset in sorted({row["dataset"] for row in rows}):
        mine = [row for row in rows if row["dataset"] == dataset]
        for name, paint in _FIGURES.items():
            figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
            colours = pyplot.colormaps["tab20"]
            axes.set_prop_cycle(color=[*colours(range(0, 20, 2)), *colours(range(1, 20, 2))])  # the dark ones first
            paint(axes, mine)
            axes.set_title(dataset)
            if axes.get_legend_handles_labels()[1]:  # beside the axes, where it hides no points
                figure.legend(fontsize="small", loc="outside right upper")
            paths.append(folder / f"{dataset}-{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
            pyplot.close(figure)
    return paths


def plot_against_epsilon(axes: Any, rows: Sequence[Row]) -> None:
    """Plot accuracy against ε; the bar is the deviation over seeds, and unproven ε are dashed."""
    lines: dict[str, list[Summary]] = defaultdict(list)
    for each in summarise(rows):
        lines[label_method(each.method, each.basis, each.accounting)].append(each)
    for label, points in lines.items():
        axes.errorbar(
            [point.epsilon for point in points],
            [point.mean for point in points],
            yerr=[point.spread or 0.0 for point in points],
            label=label,
            linestyle="-" if points[0].basis == "proven" else "--",
            marker="o",
            capsize=3,
        )
    axes.set(xlabel="ε", ylabel="held-out accuracy, %")


def plot_against_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Plot accuracy against steps at the largest ε, one line per method: its first seed."""
    for row in _choose_runs(rows):
        steps = [point["step"] for point in row["curve"]]
        line = "-" if row["basis"] == "proven" else "--"
        label = f"{_name_run(row)}, ε = {row['epsilon']:g}"
        axes.plot(steps, [100 * point["accuracy"] for point in row["curve"]], line, label=label)
    axes.set(xlabel="step", ylabel="held-out accuracy, %")


def plot_to_reach(axes: Any, rows: Sequence[Row]) -> None:
    """Plot the ε that each method had spent when it reached an accuracy (noise screening, table 3)."""
    levels = levels_for(rows)
    found = [epsilon_to_reach(rows, level) for level in levels]
    keys = sorted({key for column in found for key in column})
    for place, key in enumerate(keys):
        heights = [column[key].epsilon or 0.0 for column in found]
        where = [index + 0.8 * place / max(1, len(keys)) for index in range(len(levels))]
        axes.bar(where, heights, width=0.8 / max(1, len(keys)), label=label_method(key[1], key[2]), align="edge")
    axes.set_xticks([index + 0.4 for index in range(len(levels))], [f"{100 * level:.0f} %" for level in levels])
    axes.set(xlabel="accuracy to reach (no bar: not reached)", ylabel="ε spent")


def plot_noise_and_clip(axes: Any, rows: Sequence[Row]) -> None:
    """Plot the noise multiplier (lines) and the clipping bound relative to its first value (dotted) against steps."""
    for row in _choose_runs(rows):
        label = _name_run(row)
        steps = [point["step"] for point in row["curve"]]
        if not row["noise"] or not row["clip"]:
            continue  # runs on a table have no schedule
        (line,) = axes.plot(steps, row["noise"], label=label)
        axes.plot(steps, [bound / row["clip"][0] for bound in row["clip"]], ":", color=line.get_color())
    axes.set(xlabel="step", ylabel="σ (lines), C_t / C_0 (dotted)", yscale="log")


_FIGURES: dict[str, Callable[[Any, Sequence[Row]], None]] = {
    "accuracy-against-epsilon": plot_against_epsilon,
    "accuracy-against-steps": plot_against_steps,
    "epsilon-to-reach": plot_to_reach,
    "schedules": plot_noise_and_clip,
}


def load_pyplot() -> Any:
    """Matplotlib without a window, drawing the same picture each time."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SordinoError(f"matplotlib cannot be imported ({error}): pip install 'sordino[bench]'") from error
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "sordino", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot

    return pyplot


def _choose_runs(rows: Iterable[Row]) -> list[Row]:
    """For each method, the run with the largest ε and the smallest seed."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: (-row["epsilon"], row["seed"])):
        best.setdefault(_name_run(row), row)
    return [best[key] for key in sorted(best)]


def _name_run(row: Row) -> str:
    return label_method(row["method"], row["basis"], row["accounting"])
