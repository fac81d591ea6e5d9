"""docs/performance.md and its plots, made from what `benchmarks.speed` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import profiles
from benchmarks.methods import METHODS
from benchmarks.nets import CASES

DOCS = Path(__file__).parent.parent / "docs"
Found = dict[str, dict[str, float]]


def write(stored: dict[str, Any]) -> None:
    """The whole page."""
    plot(stored["times"], stored["growth"])
    tables = {kind: table(kind, stored[kind]) for kind in ("times", "memory", "parts")}
    (DOCS / "performance.md").write_text(PAGE.format(**tables))


def cell(value: float | None, base: float) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value / base:.2f}"


def table(kind: str, rows: Found) -> str:
    """A Markdown table: of ratios to SGD for times and memory, of milliseconds for parts."""
    if kind == "parts":
        return profiles.table(rows)
    milliseconds = kind == "times"
    title, unit = ("time of a step ÷ SGD", "ms") if milliseconds else ("peak memory ÷ SGD", "MB")
    lines = [f"| {title} | SGD, {unit} | target | " + " | ".join(METHODS[1:]) + " |", "|---" * (len(METHODS) + 2) + "|"]
    for name, row in rows.items():
        base = row["SGD"]
        shown = base * 1000 if milliseconds else base / 2**20
        target = CASES[name].target if milliseconds else 1.15
        cells = " | ".join(cell(row.get(method), base) for method in METHODS[1:])
        lines.append(f"| {name} | {shown:.1f} | {target} | {cells} |")
    return "\n".join(lines)


def plot(times: Found, grown: Found) -> None:
    """docs/img/speed.svg and docs/img/growth.svg."""
    import matplotlib.pyplot as plt

    (DOCS / "img").mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 4))
    for index, method in enumerate(METHODS[1:]):
        places = [place + 0.13 * index for place, row in enumerate(times.values()) if method in row]
        heights = [row[method] / row["SGD"] for row in times.values() if method in row]
        axes.bar(places, heights, 0.12, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel="time of a step / SGD")
    axes.set_xticks(range(len(times)), [name.split(",")[0] for name in times], rotation=20, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "speed.svg", bbox_inches="tight")
    figure, both = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, (name, points) in zip(both, grown.items(), strict=True):
        sizes, taken = [int(size) for size in points], list(points.values())
        axes.loglog(sizes, taken, marker="o", label="Sordino")
        axes.loglog(sizes, [taken[0] * size / sizes[0] for size in sizes], "k:", label="linear")
        axes.set(xlabel=name, ylabel="seconds of a step")
        axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "growth.svg", bbox_inches="tight")


PAGE = """# Performance

Medians measured side by side in one run on one CPU thread with torch's CPU wheel, by `make bench`. Sordino runs
with its default microbatch and secure noise, the peers with torch's own generator. A dash: that mode does not run, or
(memory) takes more than ten seconds a step.

{times}

![time](img/speed.svg)

{memory}

## Where the time goes

The parts of one step, SGD and Sordino in turns. The backward pass of SGD forms the summed weight gradients; ours leaves
them out, measures every example instead, and forms the weighted sums afterwards. The noise is AES-128 in counter mode,
about 15 ns for each parameter whatever the batch: where a network has many parameters for little arithmetic, as VGG13
at a batch of 64 and the embedding network, it is the largest part of what private training adds.

{parts}

## Growth

Cost grows linearly with the batch and with depth: there is no term quadratic in the batch.

![growth](img/growth.svg)
"""
