"""docs/results.md, docs/results/ and the tables of docs/mechanisms, from stored results; every figure is computed.

python -m benchmarks.results collect runs/fashion runs/imdb   # keep the finished runs of these folders
python -m benchmarks.results write                            # the pages, and docs/img/results/*.svg
python -m benchmarks.results attacks                          # the membership attacks of docs/audit.md

Stored results are in benchmarks/results/experiments, one JSON-lines file per dataset; a line is what
`sordino compare` and `sordino reproduce` leave of a run in <folder>/results.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import mechanisms, overview, pareto
from benchmarks.mechanisms import EPSILONS, ON_OWN_PAGES, footing_of, mechanism, where
from benchmarks.overview import SEEDS
from sordino.errors import InvalidInput
from sordino.lab.experiments import Case, catalogue, read_all, recipe_of, summaries
from sordino.lab.experiments.cases import Settings
from sordino.lab.experiments.papers import paper_tables
from sordino.lab.experiments.publishing import draw_figures
from sordino.lab.experiments.reproducing import Planned, cases_of, compare_side_by_side, plan
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.experiments.summaries import Summary, summarise, write_markdown

app = typer.Typer(add_completion=False)
ROOT = Path(__file__).parent
STORED = ROOT / "results" / "experiments"
PAGE = ROOT.parent / "docs" / "results.md"
IMAGES = PAGE.parent / "img" / "results"
CHOICE, SCHEDULES = PAGE.parent / "which-method.md", PAGE.parent / "mechanisms" / "dynamic.md"
IMPORTANCE, SELECTION = PAGE.parent / "mechanisms" / "dpis.md", PAGE.parent / "mechanisms" / "selection.md"
BEGIN, END = "<!-- written by {} -->", "<!-- end -->"
DATASETS = ("mnist", "fashion-mnist", "cifar10", "imdb", "names")
RECORDS = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}
METHODS = ("dpsgd", "dpsgd-ts", "dpsgd-hf", "auto-s", "decay", "dynamic", "dpis", "screening", "dpsur", "best")
TEXTS, PICTURES = ("imdb", "names"), ("dpsgd-hf",)  # scattering is for images
MOST_SEEDS, POINTS = 5, 8
KINDS = ("accuracy", "epsilon")
"""Tables of papers whose runs are stored here; times and attacks have pages of their own."""

Folders = Annotated[list[Path], typer.Argument(help="Folders of sordino compare or reproduce.")]


@app.command()
def collect(folders: Folders) -> None:
    """Copy finished runs of configured methods and of the papers' tables into the repository, whole ones only."""
    rows = read_all(*folders)
    wanted = {row["label"] for row in _configured(rows)} | _labels_of_tables()
    kept = [row for row in rows if row["label"] in wanted]
    for dataset in sorted({row["dataset"] for row in kept}):
        keep_lines(STORED / f"{dataset}.jsonl", *(row for row in kept if row["dataset"] == dataset))
    print(f"{len(kept)} of {len(rows)} results kept in {STORED}")


@app.command(name="write")
def page(figures: Annotated[bool, typer.Option(help="Draw the figures, too, which takes longest.")] = True) -> None:
    """Write the pages and their figures."""
    everything = read_all(STORED)
    stored = [row for row in everything if row["dataset"] != "digits" and not _is_elsewhere(row)]
    rows = _configured(stored)
    (PAGE.parent / "results").mkdir(exist_ok=True)
    for name, lines in _pages(rows, stored, _configured(everything)).items():
        (PAGE.parent / name).write_text("\n".join(lines))
    if rows and figures:
        drawn = (draw_figures(rows, IMAGES), overview.draw_overview(_best(rows), IMAGES))
        for path in chain(*drawn, pareto.draw_costs(rows, IMAGES)):
            print(path)
    put(CHOICE, mechanisms.tabulate_footing(rows))
    put(SCHEDULES, _paper("dynamic:table1", stored))
    put(SCHEDULES, mechanisms.tabulate_ratios(everything), part=" ratios")
    put(IMPORTANCE, mechanisms.tabulate_dpis(everything))
    put(SELECTION, mechanisms.tabulate_selection(everything))
    print(PAGE, CHOICE, SCHEDULES, IMPORTANCE, SELECTION)


@app.command()
def attacks() -> None:
    """Accuracy, AUC and true positives at 0.1 % false ones, mean over seeds ± half the widest interval, as Markdown."""
    rows: dict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for result in read_lines(ROOT / "results" / "membership.jsonl"):
        for attack in result["attacks"]:
            rows[attack["attack"], result["method"], result["epsilon"]].append(attack)

    def shown(found: list[Row]) -> str:
        reach = max((one["high"] - one["low"]) / 2 for one in found)
        return f"{statistics.mean(one['value'] for one in found):.3f} ± {reach:.3f}"

    lines = []
    for (attack, method, epsilon), found in sorted(rows.items()):
        cells = [shown([one[key] for one in found]) for key in ("accuracy", "auc")]
        caught = shown([one["caught"]["0.001"] for one in found])
        lines.append([attack, method, "∞" if method == "none" else f"{epsilon:g}", str(len(found)), *cells, caught])
    print(write_markdown(["attack", "method", "ε", "seeds", "accuracy", "AUC", "TPR at 0.1 % FPR"], lines))


def _is_elsewhere(row: Row) -> bool:
    """Whether a run is told of in docs/mechanisms and not here."""
    return footing_of(row["dataset"], row["method"]) in ON_OWN_PAGES


def _configured(rows: Sequence[Row]) -> list[Row]:
    """The runs with just the settings of their configuration: others may share its name, but no mean."""
    known = catalogue()

    def as_configured(row: Row) -> bool:
        settings = known.get((row["dataset"], row["method"]))
        return settings is not None and _case(settings, row).label == row["label"]

    return [row for row in rows if as_configured(row)]


def _case(settings: Settings, row: Row) -> Case:
    return settings.case(row["epsilon"], row["seed"], row["accounting"])


def put(path: Path, text: str, part: str = "", by: str = "benchmarks.results") -> None:
    """Write `text` between the marks of a page that say it is written by this program."""
    mark = BEGIN.format(f"{by}{part}")
    before, begin, rest = path.read_text().partition(mark)
    if not begin:
        raise InvalidInput(f"{path} has no line {mark}: put it, and {END} below, where the text belongs")
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{begin}\n\n{text}\n{END}{after}")


def _pages(rows: Sequence[Row], stored: Sequence[Row], everything: Sequence[Row]) -> dict[str, Iterator[str]]:
    """Every page of the results by its place beside the first one."""
    found = dict.fromkeys((*DATASETS, *sorted(row["dataset"] for row in rows)))

    def of(name: str, some: Sequence[Row]) -> list[Row]:
        return [row for row in some if row["dataset"] == name]

    details = {f"results/{name}.md": _detail(name, of(name, rows), of(name, everything)) for name in found}
    return {
        PAGE.name: _first(rows, stored),
        **details,
        "results/methods.md": _methods(rows),
        "results/papers.md": _papers(rows, stored),
        "results/cost.md": pareto.write_page(rows, DATASETS),
    }


def _first(rows: Sequence[Row], stored: Sequence[Row]) -> Iterator[str]:
    hours = sum(row["seconds"] for row in stored) / 3600
    best = _best(rows)
    yield "# Results\n"
    yield (
        "For each dataset, this page compares our best result with the figures that papers print. Every ε of ours is "
        "*proven*. Accuracy is in per cent of the public test set: the mean over seeds ± the standard deviation "
        "(number of seeds). We measure the last model, or the average of the last ones, and never pick the best model "
        "seen during training.\n"
    )
    yield overview.tabulate_summary(DATASETS, best)
    yield (
        f"Our goal is to beat the best figure in the papers that we rerun by {overview.MARGIN} points, at the same ε. "
        "Most of their figures are at an ε that is not proven, and some are at a different δ. For other papers we "
        "quote the ε that the authors state.\n"
    )
    if short := list(overview.list_short(best)):
        yield "Where other papers are ahead of us, or where we miss our goal:\n"
        yield from short
        yield ""
    yield (
        "We chose our settings on public benchmarks, and no ε here pays for that choice. [Provenance](provenance.md) "
        "describes how we made it.\n"
    )
    yield (
        "More pages: [what a minute, ten minutes and an hour buy](results/cost.md), [what each method "
        "is](results/methods.md), [the papers' tables, figures of other papers, and what we did not "
        "run](results/papers.md), and one page for each dataset. `python -m benchmarks.results write` makes all of "
        f"them from {len(stored)} stored runs, which took {hours:.1f} hours on shared machines with two cores.\n"
    )
    for dataset in DATASETS:
        title = overview.TITLES[dataset]
        yield f"## {title}\n"
        yield f"![our best accuracy on {title} and the figures of papers](img/results/{dataset}-overview.svg)\n"
        yield overview.tabulate_best(dataset, best, _deltas(rows, dataset, "best") or "1e-05")
        yield f"[All methods on {title}](results/{dataset}.md)\n"


def _deltas(rows: Sequence[Row], dataset: str, method: str) -> str:
    found = {row["guarantee"]["delta"] for row in rows if (row["dataset"], row["method"]) == (dataset, method)}
    return ", ".join(f"{delta:g}" for delta in sorted(found))


def _best(rows: Sequence[Row]) -> dict[tuple[str, float], Summary]:
    """The best proven method by dataset and ε: among those with most seeds (up to three).

    That is the recipe called so where it is among them: the largest of many means over a test set flatters.
    """
    found: dict[tuple[str, float], Summary] = {}
    proven = [each for each in summarise(rows) if each.basis == "proven"]
    for each in sorted(proven, key=lambda each: (min(each.seeds, SEEDS), each.method == "best", each.mean)):
        found[each.dataset, each.epsilon] = each
    return found


def _detail(dataset: str, rows: Sequence[Row], everything: Sequence[Row]) -> Iterator[str]:
    """All methods on one dataset; `everything` has the runs of the mechanisms' own pages, too."""
    yield f"# {overview.TITLES.get(dataset, dataset)}: all methods\n"
    if not rows:
        yield "No run is stored yet.\n"
        return
    yield (
        "[What each method is](methods.md). Only a line marked `proven` is a guarantee. Seconds are wall-clock times "
        "on a machine that was sometimes busy: use them to tell minutes from hours, and no more.\n"
    )
    others = [row for row in rows if row["epsilon"] not in overview.EPSILONS]
    yield summaries.accuracy_table([row for row in rows if row["epsilon"] in overview.EPSILONS])
    if others:
        yield "At values of ε that only one paper uses:\n"
        yield summaries.accuracy_table(others)
    if networks := overview.tabulate_networks(dataset, everything):
        yield "## The papers' own networks\n"
        yield (
            "For each network that the papers train: the best figure they print, mostly at an ε that is not proven, "
            "and our best figure for the same network at a proven ε. Ours is the largest of several means on a test "
            "set, so it is slightly optimistic.\n"
        )
        yield networks
    yield f"![accuracy against ε](../img/results/{dataset}-accuracy-against-epsilon.svg)\n"
    yield "## ε to reach an accuracy\n"
    levels = summaries.levels_for(rows)
    yield (
        "How much ε had a run spent when an evaluation first showed this accuracy? We take the runs at the largest ε "
        f"and average over seeds. The table has methods that were evaluated at least {POINTS} times and whose "
        "accountant can tell ε during training. `≤` means that the first evaluation was already that good.\n"
    )
    yield summaries.epsilon_table(rows, levels, POINTS)
    yield "## Curves\n"
    yield f"![accuracy against steps](../img/results/{dataset}-accuracy-against-steps.svg)\n"
    yield f"![noise and clipping bound](../img/results/{dataset}-schedules.svg)\n"
    yield from _conditions(rows)


def _methods(rows: Sequence[Row]) -> Iterator[str]:
    """What every method is, once: on which datasets, and at which δ."""
    yield "# The methods of the results\n"
    yield (
        "One line for each method and its settings. [Provenance](../provenance.md) says where the settings come from "
        "and what else we tried. *One footing* means that the methods share everything except the mechanism.\n"
    )
    known, told = catalogue(), defaultdict(list)
    for method, dataset in sorted({(row["method"], row["dataset"]) for row in rows}):
        told[method, known[dataset, method].provenance].append(f"{dataset}, δ = {_deltas(rows, dataset, method)}")
    for (method, provenance), places in told.items():
        yield f"- `{method}` ({'; '.join(places)}): {provenance}"
    yield ""


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    """What the guarantees rest on, and of which methods: such as statistics of the training records."""
    resting: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for line in row["guarantee"]["assumptions"]:
            resting[line].add(row["method"])
    everyone = {row["method"] for row in rows}
    yield "## What these guarantees rest on\n"
    for line, methods in resting.items():
        whose = "all" if methods == everyone else ", ".join(f"`{method}`" for method in sorted(methods))
        yield f"- {line}: {whose}"
    yield ""


def _papers(rows: Sequence[Row], stored: Sequence[Row]) -> Iterator[str]:
    yield "# The papers' tables\n"
    yield (
        "What each paper prints, and what our reruns reach: at the ε that the paper charges, where that ε is not "
        "proven, and at a proven ε. The number of seeds is in brackets. [The papers](../papers.md) lists all "
        "settings.\n"
    )
    for name, table in paper_tables().items():
        if table.kind in KINDS and (shown := _paper(name, stored)):
            yield f"## {name}\n\n{shown}"
    yield "## Figures of other papers\n"
    yield (
        "What other papers print, and the public data they used. Beside it stands our best result at the same ε or, "
        "where we did not run our best recipe at that ε, at a smaller one.\n"
    )
    yield overview.tabulate_outside(_best(rows))
    yield "## What we did not run\n"
    yield from _missing(rows)


def _paper(name: str, rows: Sequence[Row]) -> str:
    """The cells of a paper's table for which there are runs, side by side with them."""
    by_label = {row["label"]: row for row in rows}
    shown = [each for each in _planned(name) if any(case.label in by_label for case in cases_of([each]))]
    return compare_side_by_side(paper_tables()[name], shown, by_label.get) if shown else ""


@cache
def _planned(name: str) -> list[Planned]:
    table = paper_tables()[name]
    return plan(table, list(table.printed), catalogue(), seeds=MOST_SEEDS)


def _labels_of_tables() -> set[str]:
    """The runs of every table of a paper: some change a setting under a method's name."""
    names = [name for name, table in paper_tables().items() if table.kind in KINDS]
    return {case.label for name in names for case in cases_of(_planned(name))}


def _missing(rows: Sequence[Row]) -> Iterator[str]:
    """Cells of methods × datasets × ε with too few seeds, or without a CNN, and what shortened runs leave out."""
    yield (
        f"These methods have fewer than {SEEDS} seeds at a proven ε, counting runs with the paper's settings, "
        "shortened runs (`short`) and runs on one footing (`linear`, `cnn`).\n"
    )
    lines = _few_seeds(rows)
    yield write_markdown(["dataset", "method", "ε (seeds)"], lines) if lines else "Nothing.\n"
    without = ", ".join(_without_cnn(rows))
    if without:
        yield f"On CIFAR-10 we ran no CNN at a proven ε, not even a shortened run, with: {without}.\n"
    if short := _left_out(rows):
        yield "We shortened some runs so that two cores could cover every dataset, ε and seed. At the largest ε:\n"
        yield short


def _few_seeds(rows: Sequence[Row]) -> list[list[str]]:
    seeds: dict[tuple[str, str, float], int] = {}
    for each in summarise(rows):
        if each.basis == "proven":
            cell = (where(each.dataset, each.method), mechanism(each.dataset, each.method), each.epsilon)
            seeds[cell] = max(seeds.get(cell, 0), each.seeds)
    asked = [cell for cell in product(DATASETS, METHODS) if cell[0] not in TEXTS or cell[1] not in PICTURES]
    lines = []
    for place, method in dict.fromkeys((*asked, *(cell[:2] for cell in seeds if cell[0] not in DATASETS))):
        found = {epsilon: seeds.get((place, method, epsilon), 0) for epsilon in EPSILONS}
        lacking = [f"{epsilon:g} ({count})" for epsilon, count in found.items() if count < SEEDS]
        if lacking:
            lines.append([place, method, ", ".join(lacking)])
    return lines


def _without_cnn(rows: Sequence[Row]) -> Iterator[str]:
    """Methods with no CNN on CIFAR-10 at some ε; the best recipe may be of any network."""
    proven = [row for row in rows if _is_cnn(row) and row["basis"] == "proven"]
    found = {(mechanism(row["dataset"], row["method"]), row["epsilon"]) for row in proven}
    for method in METHODS:
        lacking = [f"{epsilon:g}" for epsilon in EPSILONS if (method, epsilon) not in found]
        if lacking and method != "best":
            yield method if len(lacking) == len(EPSILONS) else f"{method} (ε {', '.join(lacking)})"


def _is_cnn(row: Row) -> bool:
    return bool(row["dataset"] == "cifar10" and row["case"]["model"]["name"].endswith("cnn"))


def _left_out(rows: Sequence[Row]) -> str:
    """A line per shortened method at its largest ε; hours are those of the stored runs, by the records they drew."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if footing_of(row["dataset"], row["method"]) == "short":
            groups[row["dataset"], row["method"]].append(row)
    header = ["dataset", "method", "ε", "we ran", "the paper's noise allows", "hours for all of it"]
    return write_markdown(header, [_short_line(*key, group) for key, group in sorted(groups.items())]) if groups else ""


def _short_line(dataset: str, method: str, group: Sequence[Row]) -> list[str]:
    epsilon = max(row["epsilon"] for row in group)
    recipe = group[0]["case"]["recipe"]
    whole = recipe_of(catalogue()[dataset, method.removeprefix("short-")].case(epsilon), RECORDS[dataset])
    per_record = statistics.mean(row["seconds"] / row["steps"] for row in group) / recipe["batch_size"]
    hours = per_record * (whole.steps or 0) * whole.batch_size / 3600
    taken, paper = ((recipe["steps"], recipe["batch_size"]), (whole.steps, whole.batch_size))
    words = [f"{steps:,} steps of {size:,}" for steps, size in (taken, paper)]
    return [dataset, method, f"{epsilon:g}", *words, f"{hours:.1f}"]


if __name__ == "__main__":
    app()
