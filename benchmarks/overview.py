"""The first page of the results: one picture and one table per dataset, ours beside what papers print.

Figures of the papers that we rerun are in papers.toml of the laboratory, those of others in results/outside.toml here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sordino.lab.experiments import catalogue
from sordino.lab.experiments.papers import best_printed, paper_tables
from sordino.lab.experiments.publishing import load_pyplot
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import Summary, summarise, write_markdown

OUTSIDE = Path(__file__).parent / "results" / "outside.toml"
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0)
MARGIN = 0.3
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "imdb": "IMDb", "names": "Names"}
SEEDS = 3
Best = Mapping[tuple[str, float], Summary]


@dataclass(frozen=True)
class Outside:
    """A printed figure of a paper whose tables we do not rerun; `public` is what it used besides the records."""

    dataset: str
    paper: str
    epsilon: float
    accuracy: float
    public: str
    basis: str


@cache
def read_outside() -> tuple[Outside, ...]:
    """All of them, as the file has them."""
    return tuple(Outside(**figure) for figure in tomllib.loads(OUTSIDE.read_text("utf-8"))["figure"])


def tabulate_summary(datasets: Sequence[str], best: Best) -> str:
    """A line for each dataset, our best proven result at each ε."""
    lines = [[TITLES[name], *(_show(best.get((name, epsilon))) for epsilon in EPSILONS)] for name in datasets]
    return write_markdown(["dataset", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], lines)


def tabulate_best(dataset: str, best: Best, deltas: str) -> str:
    """A line for each ε: what the papers that we rerun print at most, our best proven result, and what others print."""
    lines = []
    for epsilon in sorted({*EPSILONS, *(each.epsilon for each in read_outside() if each.dataset == dataset)}):
        printed, ours = best_printed(dataset, epsilon), find_at(dataset, epsilon, best)
        others = [each for each in read_outside() if (each.dataset, each.epsilon) == (dataset, epsilon)]
        if printed is None and ours is None and not others:
            continue
        difference = f"{ours.mean - printed[0]:+.2f}" if printed and ours else ""
        reached = "" if not (printed and ours) else "yes" if ours.mean >= printed[0] + MARGIN else "no"
        shown = f"{printed[0]:.2f} ({printed[1]})" if printed else "none"
        row = [f"{epsilon:g}", shown, _show(ours) or "not run", ours.method if ours else "", difference, reached]
        lines.append([*row, "; ".join(f"{each.accuracy:.1f} ({each.paper})" for each in others)])
    ours_proven = f"ours, proven (δ = {deltas})"
    return write_markdown(["ε", "best printed", ours_proven, "method", "difference", "goal", "other papers"], lines)


def _show(ours: Summary | None) -> str:
    return ours.text if ours else ""


def tabulate_outside(best: Best) -> str:
    """Figures of other papers, with what they rest on, beside the best of ours at no larger ε."""
    lines = []
    for figure in read_outside():
        ours = find_ours(figure, best)
        told = [TITLES[figure.dataset], figure.paper, f"{figure.epsilon:g}", f"{figure.accuracy:.1f}"]
        lines.append([*told, f"{ours.text} at {ours.epsilon:g}" if ours else "not run", figure.public, figure.basis])
    return write_markdown(["dataset", "paper", "ε", "printed", "ours, proven", "public data", "basis"], lines)


def find_ours(figure: Outside, best: Best) -> Summary | None:
    """The best recipe at the figure's ε; where it was not run there, our best at a smaller one."""
    if (ours := find_at(figure.dataset, figure.epsilon, best)) is not None:
        return ours
    fitting = [ours for (name, epsilon), ours in best.items() if name == figure.dataset and epsilon <= figure.epsilon]
    return max(fitting, key=lambda ours: ours.mean, default=None)


def find_at(dataset: str, epsilon: float, best: Best) -> Summary | None:
    """Our best at an ε; at those of single papers, where not all methods were run, only the recipe called so."""
    ours = best.get((dataset, epsilon))
    return ours if ours and (epsilon in EPSILONS or ours.method == "best") else None


def tabulate_networks(dataset: str, rows: Sequence[Row]) -> str:
    """A line for each network of the papers and ε: the best printed figure, and the best of our proven runs of it.

    As for the whole page, the best of ours is among the methods with most seeds, up to three.
    """
    printed = find_printed(dataset)
    ours: dict[tuple[str, float], Summary] = {}
    named = {row["method"]: str(row["case"]["model"]["name"]) for row in rows}
    proven = [each for each in summarise(rows) if each.basis == "proven"]
    for each in sorted(proven, key=lambda each: (min(each.seeds, SEEDS), each.mean)):
        ours[named[each.method], each.epsilon] = each
    lines = []
    for network, epsilon in sorted(key for key in ours if any(key[0] == network for network, _ in printed)):
        theirs, mine = printed.get((network, epsilon)), ours[network, epsilon]
        told = [f"{theirs[0]:.2f} ({theirs[1]})", f"{mine.mean - theirs[0]:+.2f}"] if theirs else ["none", ""]
        lines.append([network, f"{epsilon:g}", told[0], mine.text, mine.method, told[1]])
    header = ["network", "ε", "best printed", "ours, proven", "method", "difference"]
    return write_markdown(header, lines) if lines else ""


@cache
def find_printed(dataset: str) -> Mapping[tuple[str, float], tuple[float, str]]:
    """The best figure that the papers that we rerun print for a dataset, by network and ε, and in which table."""
    found: dict[tuple[str, float], tuple[float, str]] = {}
    for table in (each for each in paper_tables().values() if each.kind == "accuracy" and dataset in each.printed):
        for cell in table.cells([dataset]):
            network = str(table.case(cell, 0, "proven", catalogue()).model["name"])
            key = (network, cell.column)
            found[key] = max(found.get(key, (0.0, "")), (cell.printed, table.name))
    return found


def list_short(best: Best) -> Iterator[str]:
    """Plain words for every cell that does not reach the goal, or that others print more for."""
    for (dataset, epsilon), ours in sorted(best.items()):
        printed = best_printed(dataset, epsilon)
        if printed and epsilon in EPSILONS and ours.mean < printed[0] + MARGIN:
            gap = printed[0] + MARGIN - ours.mean
            yield f"- {TITLES[dataset]} at ε = {epsilon:g}: `{ours.method}` is {gap:.2f} points below the goal."
    for figure in read_outside():
        found = find_ours(figure, best)
        if found is not None and found.mean < figure.accuracy:
            yield (
                f"- {TITLES[figure.dataset]} at ε = {figure.epsilon:g}: {figure.accuracy:.1f} by {figure.paper}, "
                f"{figure.accuracy - found.mean:.1f} points above ours."
            )


def draw_overview(best: Best, folder: Path) -> list[Path]:
    """``<dataset>-overview.svg``: our best line, the best of the papers that we rerun, figures of others as points."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dataset in sorted({name for name, epsilon in best if epsilon in EPSILONS}):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        ours = [mine for name, e in sorted(best) if name == dataset and (mine := find_at(name, e, best))]
        heights, bars = [each.mean for each in ours], [each.spread or 0.0 for each in ours]
        axes.errorbar([each.epsilon for each in ours], heights, yerr=bars, marker="o", capsize=3, label="ours, proven")
        printed = [(epsilon, found[0]) for epsilon in EPSILONS if (found := best_printed(dataset, epsilon))]
        if printed:
            axes.plot(*zip(*printed, strict=True), "--s", color="grey", label="best of the papers that we rerun")
        others = [each for each in read_outside() if each.dataset == dataset]
        for each in others:
            axes.plot(each.epsilon, each.accuracy, "x", color="tab:red")
            left = each.epsilon > EPSILONS[-1] / 2  # or its name would leave the picture
            axes.annotate(
                each.paper,
                (each.epsilon, each.accuracy),
                fontsize=7,
                textcoords="offset points",
                xytext=(-7 if left else 7, -3),
                horizontalalignment="right" if left else "left",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )
        if others:
            axes.plot([], [], "x", color="tab:red", label="other papers")
        axes.set(xscale="log", xlabel="ε", ylabel="test accuracy, %", title=TITLES.get(dataset, dataset))
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize="small", loc="lower right")  # ours first
        paths.append(folder / f"{dataset}-overview.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(figure)
    return paths
