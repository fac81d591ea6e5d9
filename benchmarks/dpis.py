"""DPIS against DP-SGD at the same proven ε: accuracy, noise by epoch (the paper's figure 1) and time per epoch.

python -m benchmarks.dpis one --task mnist-cnn --method dpis --epsilon 3 --seed 0
python -m benchmarks.dpis every                # all tasks, methods, budgets and seeds; finished ones are skipped
python -m benchmarks.dpis table                # what is finished, as Markdown
python -m benchmarks.dpis write                # the same into docs/mechanisms/dpis.md
python -m benchmarks.dpis figure               # docs/mechanisms/img/dpis_noise.svg
python -m benchmarks.dpis prices               # the noise that a share K̃/(Ñ·C) saves, without training

A run that was killed goes on at its last checkpoint. Results are in benchmarks/results/dpis, a line per run;
the runs themselves (ledgers, checkpoints) in the folder --runs. A shortened run leaves no result.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import results
from benchmarks.many import finish
from sordino.accounting import Budget, calibrate_noise
from sordino.lab.experiments import Case, run
from sordino.lab.experiments.papers import paper_table
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.experiments.summaries import write_markdown

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "dpis"
PAGE = ROOT.parent / "docs" / "mechanisms" / "dpis.md"
FIGURE = ROOT.parent / "docs" / "mechanisms" / "img" / "dpis_noise.svg"
EPSILONS, METHODS = (1.0, 3.0), ("dpsgd", "dpis")


@dataclass(frozen=True)
class Task:
    """Data, a network and what both methods share; `own` is for DPIS alone (Sec. 5.3)."""

    dataset: str
    model: dict[str, Any]
    batch_size: int
    epochs: float
    lr: float
    features: dict[str, Any] = field(default_factory=dict)
    adam: bool = False
    own: dict[str, Any] = field(default_factory=dict)

    def case(
        self, method: str, epsilon: float, seed: int, epochs: float | None = None, records: int | None = None
    ) -> Case:
        """One run: DP-SGD priced by PLD, DPIS by its filter, both proven; momentum for images, Adam for text."""
        own = self.own if method == "dpis" else {}
        shared = {"batch_size": self.batch_size, "epochs": epochs or self.epochs, "clip": 0.1}
        return Case(
            dataset=self.dataset,
            method=method,
            epsilon=epsilon,
            seed=seed,
            records=records,
            features=self.features,
            model=self.model,
            optimizer={"kind": "adam", "lr": self.lr} if self.adam else {"kind": "sgd", "lr": self.lr, "momentum": 0.9},
            recipe={"name": method, **shared, **own},
        )


SCATTERED = {"kind": "scatter", "groups": 27}
TASKS = {
    "fashion-scatter": Task(
        "fashion-mnist", {"name": "scatter-cnn"}, 512, 15, 2.0, features=SCATTERED, own={"divider": 1.0}
    ),
    "fashion-cnn": Task("fashion-mnist", {"name": "mnist-cnn"}, 512, 15, 2.0, own={"divider": 1.0}),
    "mnist-scatter": Task("mnist", {"name": "scatter-cnn"}, 512, 15, 2.0, features=SCATTERED),
    "mnist-cnn": Task("mnist", {"name": "mnist-cnn"}, 512, 15, 2.0),
    "imdb-bilstm": Task(
        "imdb",
        {"name": "imdb-bilstm", "embedding": "glove"},
        *(256, 10, 2e-3),
        adam=True,
        own={"multiplier": 3.0, "adaptive": True},
    ),
}


def store(task: str, case: Case, row: Row) -> None:
    """Keep what the tables need of a finished run."""
    result = {"task": task, "method": case.method, "epsilon": case.epsilon, "seed": case.seed}
    result |= {"history": history(row), "guarantee": row["guarantee"]}
    result["label"] = f"{task}-{case.method}-eps{case.epsilon:g}-seed{case.seed}"
    keep_lines(RESULTS / f"{task}.jsonl", result)


def history(row: Row) -> list[dict[str, float]]:
    """Every epoch of a run; all of it is public (released values, a public test set, the clock)."""
    spent = [0.0, *(point["seconds"] for point in row["curve"])]
    return [
        {
            "epoch": epoch,
            "accuracy": point["accuracy"],
            "seconds": point["seconds"] - spent[epoch],
            "noise": row["noise"][epoch],
            "share": point.get("share", 1.0),
            "clip": row["clip"][epoch],
        }
        for epoch, point in enumerate(row["curve"])
    ]


Runs = Annotated[Path, typer.Option(help="Where ledgers and checkpoints are kept.")]


@app.command()
def one(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "mnist-cnn",
    method: str = "dpis",
    epsilon: float = 3.0,
    seed: int = 0,
    runs: Runs = Path("runs/dpis"),
    epochs: float | None = None,
    records: int | None = None,
) -> None:
    """Train once; `epochs` and `records` make it shorter for a try, which leaves no result."""

    def report(step: int, steps: int, reached: float) -> None:
        print(f"step {step} of {steps}: {reached:.4f}", flush=True)

    case = TASKS[task].case(method, epsilon, seed, epochs, records)
    row = run(case, runs, report)
    if not (epochs or records):
        store(task, case, row)


@app.command()
def every(
    runs: Runs = Path("runs/dpis"),
    task: Annotated[list[str] | None, typer.Option(help="may be repeated; all unless given")] = None,
    seeds: int = 3,
    workers: int | None = None,
) -> None:
    """Everything that is not finished, several at once."""
    points = product(range(seeds), task or TASKS, EPSILONS, METHODS)
    cases = [(name, TASKS[name].case(method, epsilon, seed)) for seed, name, epsilon, method in points]
    by_label = {case.label: name for name, case in cases}
    finish([case for _, case in cases], runs, lambda case, row: store(by_label[case.label], case, row), workers)


Groups = dict[tuple[str, float, str], list[dict[str, Any]]]


def finished() -> Groups:
    """The results by task, ε and method."""
    groups: Groups = defaultdict(list)
    for result in (line for path in sorted(RESULTS.glob("*.jsonl")) for line in read_lines(path)):
        groups[result["task"], result["epsilon"], result["method"]].append(result)
    return groups


@app.command()
def table() -> None:
    """Print what is finished."""
    print(tables())


@app.command()
def write() -> None:
    """Write what is finished into docs/mechanisms/dpis.md."""
    results.put(PAGE, tables(), by="benchmarks.dpis")


def tables() -> str:
    """Accuracy after the last epoch, what the paper prints, the noise, and the time of an epoch relative to DP-SGD."""
    groups = finished()
    keys = [key for key in product(TASKS, EPSILONS, METHODS) if key in groups]
    heads = ["task", "ε", "method", "accuracy", "printed", "σ_G at the end", "time per epoch"]
    return write_markdown(heads, [line(*key, groups) for key in keys])


def line(name: str, epsilon: float, method: str, groups: Groups) -> list[str]:
    """The row of a task, budget and method."""
    found = groups[name, epsilon, method]
    last = [100 * result["history"][-1]["accuracy"] for result in found]
    spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
    baseline = groups.get((name, epsilon, "dpsgd"))
    return [
        name,
        f"{epsilon:g}",
        method,
        f"{statistics.mean(last):.2f}{spread} ({len(last)})",
        printed(name, epsilon, method),
        f"{statistics.mean(result['history'][-1]['noise'] for result in found):.3f}",
        f"{_seconds(found) / _seconds(baseline):.1f}×" if baseline else "",
    ]


def printed(name: str, epsilon: float, method: str) -> str:
    """The figure of table 3 for this network; the paper's DPIS reads scattering features or GloVe vectors alone."""
    task = TASKS[name]
    plain = "DP-SGD-HF" if task.features else "DP-SGD, GloVe" if task.dataset == "imdb" else "DP-SGD-TS"
    raw = not task.features and task.dataset != "imdb"
    label = {"dpsgd": plain, "dpis": "" if raw else "DPIS"}[method]
    cells = paper_table("dpis:table3").cells([task.dataset])
    return next((f"{cell.printed:.1f}" for cell in cells if (cell.label, cell.column) == (label, epsilon)), "")


def _seconds(results: list[dict[str, Any]]) -> float:
    return float(statistics.median(epoch["seconds"] for result in results for epoch in result["history"]))


@app.command()
def figure() -> None:
    """σ_G by epoch for every finished task, DPIS over DP-SGD (the paper's figure 1)."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    groups = finished()
    for (name, epsilon, method), found in groups.items():
        if method == "dpis" and (baseline := groups.get((name, epsilon, "dpsgd"))):
            base = baseline[0]["history"][0]["noise"]
            noise = [epoch["noise"] / base for epoch in found[0]["history"]]
            axes.plot(range(1, len(noise) + 1), noise, label=f"{name}, ε = {epsilon:g}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="σ_G over DP-SGD's", ylim=(0, None))
    axes.legend(fontsize="small")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, bbox_inches="tight")


@app.command()
def prices(records: int = 60_000, epochs: int = 20, delta: float = 1e-5) -> None:
    """σ_G over DP-SGD's σ where K̃/(Ñ·C) is `share` throughout: SGM(q/share, σ_G/share) at equal ε, by PLD (Eq. 13)."""
    shares = (1.0, 0.5, 0.25)
    print("| b | ε | " + " | ".join(f"share {share:g}" for share in shares) + " |\n" + "|---" * (len(shares) + 2) + "|")
    for size, target in product((64, 256, 2048, 8192), (1.0, 3.0, 8.0)):
        steps, budget = round(epochs * records / size), Budget(target, delta)
        found = [share * calibrate_noise(budget, size / share / records, steps).noise_multiplier for share in shares]
        print(f"| {size:,} | {target:g} | " + " | ".join(f"{noise / found[0]:.2f}" for noise in found) + " |")


if __name__ == "__main__":
    app()
