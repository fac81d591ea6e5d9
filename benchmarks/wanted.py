"""Which results docs/results.md is to have, and what of them is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from benchmarks.shortened import left_out
from sordino.lab.experiments import catalogue
from sordino.lab.experiments.results import Row
from sordino.lab.experiments.summaries import summarise, write_markdown

DATASETS = ("mnist", "fashion-mnist", "cifar10", "imdb", "names")
EPSILONS = (1.0, 2.0, 3.0, 4.0)
METHODS = ("dpsgd", "dpsgd-ts", "dpsgd-hf", "auto-s", "decay", "dynamic", "dpis", "screening", "dpsur", "best")
SEEDS = 3
TEXTS, PICTURES = ("imdb", "names"), ("dpsgd-hf",)  # scattering is for images


def footing_of(dataset: str, method: str) -> str:
    """What a method shares with others so that their mechanisms can be compared; empty where it has its paper's."""
    return _known()[dataset, method].footing


def mechanism(dataset: str, method: str) -> str:
    """A method's name without that of its footing."""
    return method.removeprefix(f"{footing_of(dataset, method)}-")


def where(dataset: str, method: str) -> str:
    """What the runs on one footing share: the dataset, and the network where it is not one linear layer."""
    return f"{dataset}, CNN" if footing_of(dataset, method) == "cnn" else dataset


_known = cache(catalogue)


def missing(rows: Sequence[Row]) -> Iterator[str]:
    """Cells of methods × datasets × ε with too few seeds, or without a CNN, and what shortened runs leave out."""
    yield (
        f"Methods with fewer than {SEEDS} seeds at a proven ε, ε (seeds), whether with the paper's settings, shortened "
        "(`short`) or on one footing (`linear`, `cnn`).\n"
    )
    lines = _few_seeds(rows)
    yield write_markdown(["dataset", "method", "ε (seeds)"], lines) if lines else "Nothing.\n"
    without = ", ".join(_without_cnn(rows))
    yield f"Without a CNN's run on CIFAR-10 at a proven ε, whole or shortened: {without or 'none'}.\n"
    if short := left_out(rows):
        yield "Runs were shortened so that all datasets, ε and seeds had their turn on two cores; at the largest ε:\n"
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
