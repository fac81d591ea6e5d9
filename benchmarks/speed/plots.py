"""The plots of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.cases import GROWING
from benchmarks.speed.methods import OURS, PEERS

SHOWN = (OURS[0], *PEERS)


def draw(results: Mapping[str, Any], scale: Mapping[str, Any], folder: Path) -> None:
    """speed.svg and, once there is something to draw, growth.svg; the same bytes every time."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sordino"
    folder.mkdir(parents=True, exist_ok=True)
    _compare(results, folder / "speed.svg")
    if scale.get("axes"):
        _grow(scale["axes"], folder / "growth.svg")
    plt.close("all")


def _compare(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4))
    for index, method in enumerate(SHOWN):
        times = [result["times"]["1"] for result in results.values()]
        found = [(place, row) for place, row in enumerate(times) if method in row and "SGD" in row]
        if found:
            places = [place + 0.14 * (index - 2) for place, _ in found]
            axes.bar(places, [row[method]["seconds"] / row["SGD"]["seconds"] for _, row in found], 0.13, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel="time of a step / SGD")
    axes.set_xticks(range(len(results)), list(results), rotation=30, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _grow(axes_found: Mapping[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(GROWING), figsize=(13, 3.2))
    for axes, name in zip(panels, GROWING, strict=True):
        for way, points in axes_found.get(name, {"points": {}})["points"].items():
            cases = [case for case in GROWING[name] if case.name in points]
            sizes = [float("".join(c for c in case.name if c.isdigit())) for case in cases]
            if sizes:
                axes.loglog(sizes, [1000 * points[case.name] for case in cases], marker="o", label=way)
        axes.set(xlabel=name, ylabel="ms of a step")
        if axes.lines:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
