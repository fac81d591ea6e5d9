"""What docs/mechanisms and docs/which-method.md print of stored runs; `benchmarks.results` puts it there."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise, product

from sordino.lab.experiments import Settings, catalogue
from sordino.lab.experiments.papers import paper_table
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import Summary, summarise, write_markdown

EPSILONS = (1.0, 2.0, 3.0, 4.0)
PAIRED = {
    "fashion-scatter": ("fashion-mnist", "scatter"),
    "fashion-cnn": ("fashion-mnist", "pixels"),
    "mnist-scatter": ("mnist", "scatter"),
    "mnist-cnn": ("mnist", "pixels"),
    "imdb-bilstm": ("imdb", "frozen"),
}
"""Where DPIS is set beside DP-SGD: what the page calls it, the dataset and the footing."""
SELECTIVE = {"fashion-scatter": "fashion-mnist", "mnist-scatter": "mnist", "imdb-bilstm": "imdb"}
"""Where methods that reject are compared, on the papers' networks: what the page calls it, and the dataset."""
REJECTING = (
    *("dpsgd", "screening", "screening-private", "dpsur", "dpsur-share", "dpsur-reuse", "dpsur-line", "dpsur-every-4"),
    *("dpagd", "screening-published", "dpsur-published"),
)
MU_GRID, CLIP_GRID = (1.0, 0.8, 0.4), (1.0, 0.5, 0.3, 0.1)
"""1/ρ_μ and 1/ρ_c: six of the authors' 4 × 4 points, and the edges on which one of the two does not change."""
CORNERS = {(1.0, 1.0): "static", (0.8, 1.0): "growing-mu", (1.0, 0.3): "sensitivity-decay", (0.8, 0.3): "dynamic"}
"""The points that table 1 of Dynamic DP-SGD has: the same runs."""
ON_OWN_PAGES = ("selection", "scatter", "pixels", "frozen", "dynamic")
"""Footings of docs/mechanisms alone; docs/results.md leaves them out."""


@cache
def _known() -> Mapping[tuple[str, str], Settings]:
    return catalogue()


def footing_of(dataset: str, method: str) -> str:
    """What a method shares with others so that their mechanisms can be compared; empty where it has its paper's."""
    settings = _known().get((dataset, method))
    return settings.footing if settings else ""


def mechanism(dataset: str, method: str) -> str:
    """A method's name without that of its footing."""
    return method.removeprefix(f"{footing_of(dataset, method)}-")


def where(dataset: str, method: str) -> str:
    """What the runs on one footing share: the dataset, and the network where it is not one linear layer."""
    return f"{dataset}, CNN" if footing_of(dataset, method) == "cnn" else dataset


def tabulate_footing(rows: Sequence[Row]) -> str:
    """The mechanisms on one footing: same features, network, length and δ; bold is the best of a column."""
    best: dict[tuple[str, float], float] = {}
    cells: dict[tuple[str, str], dict[float, Summary]] = {}
    for each in summarise(rows):
        if footing_of(each.dataset, each.method) in ("linear", "cnn") and each.standing == "proven":
            place = where(each.dataset, each.method)
            best[place, each.epsilon] = max(best.get((place, each.epsilon), 0.0), each.mean)
            cells.setdefault((place, mechanism(each.dataset, each.method)), {})[each.epsilon] = each

    def shown(each: Summary | None) -> str:
        if each is None:
            return ""
        return f"**{each.text}**" if each.mean == best[where(each.dataset, each.method), each.epsilon] else each.text

    lines = [[*key, *(shown(by_epsilon.get(e)) for e in EPSILONS)] for key, by_epsilon in sorted(cells.items())]
    return write_markdown(["dataset", "method", *(f"ε = {e:g}" for e in EPSILONS)], lines)


# -- DPIS --------------------------------------------------------------------------------------------------------------

Groups = dict[tuple[str, float, str], list[Row]]


def group_pairs(rows: Sequence[Row]) -> Groups:
    """The runs of DPIS and of DP-SGD beside it, by task, ε and mechanism."""
    groups: Groups = defaultdict(list)
    for row, (task, place) in product(rows, PAIRED.items()):
        if (row["dataset"], footing_of(row["dataset"], row["method"])) == place:
            groups[task, row["epsilon"], mechanism(row["dataset"], row["method"])].append(row)
    return groups


def tabulate_dpis(rows: Sequence[Row]) -> str:
    """Accuracy after the last epoch, what the paper prints, the noise, and the time of an epoch relative to DP-SGD."""
    groups = group_pairs(rows)
    keys = [key for key in product(PAIRED, (1.0, 3.0), ("dpsgd", "dpis")) if key in groups]
    lines = []
    for task, epsilon, method in keys:
        found, baseline = groups[task, epsilon, method], groups.get((task, epsilon, "dpsgd"))
        noise = statistics.mean(row["noise"][-1] for row in found)
        time = f"{_time_epoch(found) / _time_epoch(baseline):.1f}×" if baseline else ""
        printed = _print_dpis(task, epsilon, method)
        lines.append([task, f"{epsilon:g}", method, _score(found), printed, f"{noise:.3f}", time])
    return write_markdown(["task", "ε", "method", "accuracy", "printed", "σ_G at the end", "time per epoch"], lines)


def _print_dpis(task: str, epsilon: float, method: str) -> str:
    """The figure of table 3 for this network; the paper's DPIS reads scattering features or GloVe vectors alone."""
    dataset, footing = PAIRED[task]
    plain = {"scatter": "DP-SGD-HF", "frozen": "DP-SGD, GloVe", "pixels": "DP-SGD-TS"}[footing]
    label = {"dpsgd": plain, "dpis": "" if footing == "pixels" else "DPIS"}[method]
    cells = paper_table("dpis:table3").cells([dataset])
    return next((f"{cell.printed:.1f}" for cell in cells if (cell.label, cell.column) == (label, epsilon)), "")


def _time_epoch(rows: Sequence[Row]) -> float:
    ends = [[0.0, *(point["seconds"] for point in row["curve"])] for row in rows]
    return float(statistics.median(end - begin for each in ends for begin, end in pairwise(each)))


# -- selection ---------------------------------------------------------------------------------------------------------


def tabulate_selection(rows: Sequence[Row]) -> str:
    """Accuracy, what was kept of the attempts, and what the paper prints for the method, at whatever basis."""
    heads = ["method", "basis"]
    for epsilon in (1.0, 3.0):
        heads += [f"ε = {epsilon:g}", "kept / attempts", "printed"]
    parts = []
    for task, dataset in SELECTIVE.items():
        found = group_selective(rows, dataset)
        if lines := [_selective_line(dataset, method, found) for method in REJECTING if method in found]:
            parts.append(f"**{task}**\n\n{write_markdown(heads, lines)}")
    return "\n".join(parts)


def group_selective(rows: Sequence[Row], dataset: str) -> dict[str, dict[float, list[Row]]]:
    """The runs of a dataset by method, as the page calls it, and ε."""
    found: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["dataset"] == dataset and footing_of(dataset, row["method"]) == "selection":
            basis = "-published" if row["accounting"] == "published" else ""
            found[mechanism(dataset, row["method"]) + basis][row["epsilon"]].append(row)
    return found


def _selective_line(dataset: str, method: str, found: dict[str, dict[float, list[Row]]]) -> list[str]:
    runs = found[method]
    cells = [method, next(iter(runs.values()))[0]["basis"]]
    for epsilon in (1.0, 3.0):
        here = runs.get(epsilon, [])
        cells += [_score(here), _count_kept(here), _print_selection(dataset, method, epsilon)]
    return cells


def _count_kept(rows: Sequence[Row]) -> str:
    """Proposals that were kept, of all; where blocks are tested, a rollback changes the model too, so none are told."""
    if not rows:
        return ""
    kept, tried = (statistics.mean(row[key] for row in rows) for key in ("accepted", "attempts"))
    return "in blocks" if rows[0]["case"]["recipe"].get("test_every") else f"{kept:,.0f} / {tried:,.0f}"


def _print_selection(dataset: str, method: str, epsilon: float) -> str:
    """The figure of the paper that the method is from."""
    kind, _, _ = method.partition("-")
    plain = "DPSGD" if dataset == "imdb" else "DPSGD-HF"
    sources = {"dpsgd": ("dpsur:table2", plain), "dpsur": ("dpsur:table2", "DPSUR"), "dpagd": ("dpsur:table2", "DPAGD")}
    name, label = sources.get(kind, ("screening:table1", "screening"))
    paper = paper_table(name)
    cells = paper.cells([dataset]) if dataset in paper.printed else []
    return next((f"{cell.printed:.2f}" for cell in cells if (cell.label, cell.column) == (label, epsilon)), "")


def _score(rows: Sequence[Row]) -> str:
    """Mean, deviation and number of seeds."""
    scores = [100 * row["accuracy"] for row in rows]
    if len(scores) < 2:
        return f"{scores[0]:.2f} (1)" if scores else ""
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} ({len(scores)})"


# -- Dynamic DP-SGD ----------------------------------------------------------------------------------------------------


def method_at(mu: float, clip: float) -> str:
    """The configured method whose noise multiplier falls to `mu`, and whose bound falls to `clip`, of the first."""
    return CORNERS.get((mu, clip), f"dynamic-mu{mu:g}-clip{clip:g}")


def tabulate_ratios(rows: Sequence[Row], dataset: str = "mnist", epsilon: float = 0.4) -> str:
    """Accuracy at every point of the grid that is stored, of the first seed."""
    by_label = {row["label"]: row for row in rows}

    def shown(mu: float, clip: float) -> str:
        row = by_label.get(_known()[dataset, method_at(mu, clip)].case(epsilon).label)
        return f"{100 * row['accuracy']:.2f}" if row else ""

    heads = [f"{dataset}, ε = {epsilon:g}", *(f"1/ρ_c = {clip:g}" for clip in CLIP_GRID)]
    return write_markdown(heads, [[f"1/ρ_μ = {mu:g}", *(shown(mu, clip) for clip in CLIP_GRID)] for mu in MU_GRID])
