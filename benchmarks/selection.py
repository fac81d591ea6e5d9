"""What selection is worth: DP-SGD, noise screening, DPSUR and its refinements at the same ε, proven and published.

python -m benchmarks.selection one --task fashion-scatter --method dpsur --epsilon 3 --seed 0
python -m benchmarks.selection every           # all tasks, methods, budgets and seeds; finished ones are skipped
python -m benchmarks.selection table           # what is finished, as Markdown
python -m benchmarks.selection write           # the same into docs/mechanisms/selection.md
python -m benchmarks.selection prices          # how many attempts each method can afford, without training

A run that was killed goes on at its last checkpoint. Results are in benchmarks/results/selection, a line per
run; the runs themselves (ledgers, checkpoints) in the folder --runs. A shortened run leaves no result.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import results
from benchmarks.many import finish
from sordino.lab.experiments import Case, recipe_of, run
from sordino.lab.experiments.cases import EVALUATIONS
from sordino.lab.experiments.papers import paper_table
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.experiments.summaries import write_markdown

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
RESULTS = Path(__file__).parent / "results" / "selection"
PAGE = Path(__file__).parent.parent / "docs" / "mechanisms" / "selection.md"
EPSILONS = (1.0, 3.0)

METHODS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "screening": {},
    "screening-private": {"private": True},
    "dpsur": {},
    "dpsur-share": {"validation_share": 0.39},
    "dpsur-reuse": {"reuse": True},
    "dpsur-line": {"line_search": True},
    "dpsur-every-4": {"test_every": 4},
    "dpagd": {},
    "screening-published": {},
    "dpsur-published": {},
}


LOOKING = ("screening", "screening-published")
"""Methods whose energy is that of held-out records, which then do not measure accuracy."""


@dataclass(frozen=True)
class Task:
    """Data, a network and the settings of DPSUR; `noise` holds σ_t and σ_v by ε (docs/papers.md)."""

    dataset: str
    model: str
    batch_size: int
    lr: float
    noise: dict[float, tuple[float, float]]
    features: dict[str, Any] = field(default_factory=dict)
    adam: bool = False
    validation_size: int = 256
    public: int = 500

    def case(self, method: str, epsilon: float, seed: int = 0, records: int | None = None) -> Case:
        """One run with the paper's noise, and as many attempts as the budget pays for."""
        published = method.endswith("published")
        return Case(
            dataset=self.dataset,
            method=method,
            epsilon=epsilon,
            seed=seed,
            accounting="published" if published else "proven",
            published="rdp" if published else None,  # DPSUR's, for both: screening's older one pays for fewer updates
            records=records,
            data={"public": self.public} if method in LOOKING else {},
            features=self.features,
            model={"name": self.model},
            optimizer={"kind": "adam", "lr": self.lr} if self.adam else {"kind": "sgd", "lr": self.lr, "momentum": 0.9},
            recipe=self._recipe(method, epsilon),
        )

    def _recipe(self, method: str, epsilon: float) -> dict[str, Any]:
        sigma, test_sigma = self.noise[epsilon]
        options = dict(METHODS[method])
        kind, _, _ = method.partition("-")
        shared = {"name": kind, "batch_size": self.batch_size, "noise_multiplier": sigma, "clip": 0.1}
        test = {"validation_size": self.validation_size, "validation_noise": test_sigma}
        if kind == "dpagd":
            options |= {"choice_epsilon": 1.0, "validation_size": self.validation_size}
        elif kind == "dpsur" or options.pop("private", False):
            options |= test
        return {**shared, **options}


SCATTERED = {"kind": "scatter", "groups": 27}
TASKS = {
    "digits": Task(
        "digits", "digits-mlp", 128, 1.0, {1.0: (4.0, 2.0), 3.0: (2.0, 1.3)}, validation_size=64, public=179
    ),
    "fashion-scatter": Task(
        "fashion-mnist", "scatter-cnn", 2048, 4.0, {1.0: (4.0, 1.3), 3.0: (2.15, 0.8)}, features=SCATTERED
    ),
    "mnist-scatter": Task("mnist", "scatter-cnn", 1024, 2.0, {1.0: (2.0, 1.3), 3.0: (1.35, 0.9)}, features=SCATTERED),
    "imdb-bilstm": Task("imdb", "imdb-bilstm", 1024, 0.02, {1.0: (2.0, 1.3), 3.0: (1.35, 1.0)}, adam=True),
}

NETWORKS = tuple(name for name in TASKS if name != "digits")
"""The tasks with networks of the papers."""


def store(task: str, case: Case, row: Row) -> None:
    """Keep what the table needs of a finished run."""
    result = {key: row[key] for key in ("attempts", "accepted", "seconds", "accuracy", "method", "basis", "steps")}
    result |= {"task": task, "epsilon": row["guarantee"]["epsilon"]}
    result |= {"label": label_of(task, case), "target": case.epsilon}
    keep_lines(RESULTS / f"{task}.jsonl", result)


def label_of(task: str, case: Case) -> str:
    """Which run a stored result is of."""
    return f"{task}-{case.method}-eps{case.epsilon:g}-seed{case.seed}"


Runs = Annotated[Path, typer.Option(help="where ledgers and checkpoints are kept")]


@app.command()
def one(
    task: str,
    method: str,
    epsilon: float = 3.0,
    seed: int = 0,
    runs: Runs = Path("runs/selection"),
    attempts: int | None = None,
    records: int | None = None,
) -> None:
    """One run; `attempts` and `records` make it shorter for a try, which leaves no result."""
    case = TASKS[task].case(method, epsilon, seed, records)
    row = run(case, runs, most=attempts)
    if not (attempts or records):
        store(task, case, row)
    print(f"{case.label}: {row['accepted']}/{row['attempts']} accepted, {row['accuracy']:.4f}")


@app.command()
def every(
    runs: Runs = Path("runs/selection"),
    task: Annotated[list[str] | None, typer.Option(help="may be repeated; all unless given")] = None,
    method: Annotated[list[str] | None, typer.Option(help="may be repeated; all unless given")] = None,
    seeds: int = 3,
    workers: int | None = None,
    evaluations: Annotated[int, typer.Option(help="how often a run is evaluated and saved")] = EVALUATIONS,
) -> None:
    """All runs that have no stored result yet, several at once."""
    points = product(task or TASKS, range(seeds), EPSILONS, method or METHODS)
    named = [(name, TASKS[name].case(method, epsilon, seed)) for name, seed, epsilon, method in points]
    done = {line["label"] for name in {name for name, _ in named} for line in read_lines(RESULTS / f"{name}.jsonl")}
    cases = [(name, case) for name, case in named if label_of(name, case) not in done]
    by_label = {case.label: name for name, case in cases}
    finish(
        [case for _, case in cases],
        runs,
        lambda case, row: store(by_label[case.label], case, row),
        workers,
        evaluations,
    )


@app.command()
def prices(records: int = 60_000) -> None:
    """How many attempts each method can afford at the settings of every task."""
    public = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    print("| task | ε | method | steps |\n|---|---|---|---|")
    for (name, task), epsilon, method in product(TASKS.items(), EPSILONS, METHODS):
        size = {"imdb-bilstm": 25_000, "digits": 1_437}.get(name, records)
        recipe = recipe_of(task.case(method, epsilon), size, public if method in LOOKING else None)
        print(f"| {name} | {epsilon:g} | {method} | {recipe.steps:,} |", flush=True)


Found = dict[tuple[str, float], list[dict[str, Any]]]
"""The results of a task by method and ε."""


@app.command()
def table() -> None:
    """Print what is finished, a table for each task."""
    print(tables())


@app.command()
def write() -> None:
    """Write what is finished on the papers' networks into docs/mechanisms/selection.md."""
    results.put(PAGE, tables(NETWORKS), by="benchmarks.selection")


def tables(names: Sequence[str] = tuple(TASKS)) -> str:
    """Accuracy, what was kept of the attempts, and what the paper prints for the method, at whatever basis."""
    heads = ["method", "basis"]
    for epsilon in EPSILONS:
        heads += [f"ε = {epsilon:g}", "kept / attempts", "printed"]
    parts = []
    for name in names:
        found = finished(name)
        kinds = [method for method in METHODS if any((method, epsilon) in found for epsilon in EPSILONS)]
        if kinds:
            parts.append(f"**{name}**\n\n" + write_markdown(heads, [line(name, method, found) for method in kinds]))
    return "\n".join(parts)


def finished(task: str) -> Found:
    """The stored results of a task."""
    found: Found = defaultdict(list)
    for result in read_lines(RESULTS / f"{task}.jsonl"):
        found[result["method"], result["target"]].append(result)
    return found


def line(task: str, method: str, found: Found) -> list[str]:
    """The row of a method."""
    cells = [method, next(runs[0]["basis"] for (name, _), runs in found.items() if name == method)]
    for epsilon in EPSILONS:
        runs = found.get((method, epsilon), [])
        cells += [score(runs), moved(method, runs), printed(task, method, epsilon)]
    return cells


def score(runs: list[dict[str, Any]]) -> str:
    """Mean, deviation and number of seeds."""
    scores = [100 * result["accuracy"] for result in runs]
    if len(scores) < 2:
        return f"{scores[0]:.2f} (1)" if scores else ""
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} ({len(scores)})"


def moved(method: str, runs: list[dict[str, Any]]) -> str:
    """Proposals that were kept, of all; where blocks are tested, a rollback changes the model too, so none are told."""
    if not runs:
        return ""
    kept, tried = (statistics.mean(result[key] for result in runs) for key in ("accepted", "attempts"))
    return "in blocks" if METHODS[method].get("test_every") else f"{kept:,.0f} / {tried:,.0f}"


def printed(task: str, method: str, epsilon: float) -> str:
    """The figure of the paper that the method is from."""
    kind, _, _ = method.partition("-")
    plain = "DPSGD-HF" if TASKS[task].features else "DPSGD"
    sources = {"dpsgd": ("dpsur:table2", plain), "dpsur": ("dpsur:table2", "DPSUR"), "dpagd": ("dpsur:table2", "DPAGD")}
    name, label = sources.get(kind, ("screening:table1", "screening"))
    paper, dataset = paper_table(name), TASKS[task].dataset
    cells = paper.cells([dataset]) if dataset in paper.printed else []
    return next((f"{cell.printed:.2f}" for cell in cells if (cell.label, cell.column) == (label, epsilon)), "")


if __name__ == "__main__":
    app()
