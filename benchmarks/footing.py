"""Figures of docs/mechanisms from the stored runs on one footing: `python -m benchmarks.footing`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import matplotlib.pyplot as plt
import typer
from matplotlib.lines import Line2D

from benchmarks.figures import save
from benchmarks.results import STORED
from benchmarks.wanted import EPSILONS, footing_of, mechanism, where
from sordino.lab.experiments import read_all
from sordino.lab.experiments.results import Row

SELECTIVE = ("dpsgd", "screening", "dpsur", "dpsur-reuse")
SCHEDULED = ("dpsgd", "decay", "dynamic")
PLAIN = ("dpsgd", "auto-s")
ACROSS = 3
"""Panels beside each other."""


def importance(rows: Sequence[Row]) -> None:
    """By step: K̃/(Ñ·C), and σ_G over the σ of DP-SGD at the same ε (figure 1 of DPIS)."""

    def column(row: Row) -> tuple[str, float]:
        return where(row["dataset"], row["method"]), row["epsilon"]

    base = {column(row): row["noise"][0] for row in rows if mechanism(row["dataset"], row["method"]) == "dpsgd"}
    figure, (share, level) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    drawn = [row for row in rows if mechanism(row["dataset"], row["method"]) == "dpis" and not row["seed"]]
    for row in sorted(drawn, key=column):
        key = column(row)
        if row["epsilon"] not in (1.0, 3.0) or key not in base:
            continue
        steps = [point["step"] for point in row["curve"]]
        share.plot(steps, [point["share"] for point in row["curve"]], label=f"{key[0]}, ε = {key[1]:g}")
        level.plot(steps, [noise / base[key] for noise in row["noise"]])
    share.set(xlabel="step", ylabel="K̃ / (Ñ·C)", ylim=(0, 1.05))
    level.set(xlabel="step", ylabel="noise over DP-SGD's", ylim=(0, None))
    level.axhline(1.0, color="grey", linewidth=0.8)
    figure.legend(*share.get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    save(figure, "dpis_footing")


def accuracies(rows: Sequence[Row], methods: Sequence[str], name: str) -> None:
    """One panel per dataset and network: accuracy by ε, one point per seed and a line through the means."""
    found: dict[str, dict[tuple[str, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        method = mechanism(row["dataset"], row["method"])
        if method in methods and row["basis"] == "proven" and row["epsilon"] in EPSILONS:
            found[where(row["dataset"], row["method"])][method, row["epsilon"]].append(100 * row["accuracy"])
    lines = math.ceil(len(found) / ACROSS)
    figure, panels = plt.subplots(lines, ACROSS, figsize=(4 * ACROSS, 3.4 * lines), layout="constrained", squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    drawn: dict[str, Line2D] = {}
    for axes, (dataset, groups) in zip(panels.flat, sorted(found.items()), strict=False):
        for number, method in enumerate(methods):
            points = [(e, value) for e in EPSILONS for value in groups[method, e]]
            means = [(e, sum(values) / len(values)) for e in EPSILONS if (values := groups[method, e])]
            if means:
                (drawn[method],) = axes.plot(*zip(*means, strict=True), color=f"C{number}")
                axes.plot(*zip(*points, strict=True), ".", color=f"C{number}")
        axes.set(xlabel="ε (proven)", ylabel="held-out accuracy (%)", title=dataset)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper")
    save(figure, name)


def main() -> None:
    """All of them."""
    rows = [row for row in read_all(STORED) if footing_of(row["dataset"], row["method"]) in ("linear", "cnn")]
    importance(rows)
    accuracies(rows, SELECTIVE, "selection_footing")
    accuracies(rows, SCHEDULED, "dynamic_footing")
    accuracies(rows, PLAIN, "plain_footing")


if __name__ == "__main__":
    typer.run(main)
