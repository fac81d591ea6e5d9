"""DPIS against DP-SGD at the same proven ε: accuracy, noise by epoch (the paper's figure 1) and time per epoch.

python -m benchmarks.dpis one --task mnist-cnn --method dpis --epsilon 3 --seed 0
python -m benchmarks.dpis every                # all tasks, methods, budgets and seeds; finished ones are skipped
python -m benchmarks.dpis table                # what is finished, as Markdown
python -m benchmarks.dpis figure               # docs/mechanisms/img/dpis_noise.svg

A run that was killed goes on at its last whole epoch. Results are in benchmarks/results/dpis, one JSON file per run;
the runs themselves (ledgers, checkpoints) in the folder --runs. A shortened run leaves no result.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Budget, Private, Recipe, data, models, recipes
from sordino.checkpoint import write_durably
from sordino.data import imdb
from sordino.features import scatter

app = typer.Typer(add_completion=False)
ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "dpis"
FIGURE = ROOT.parent / "docs" / "mechanisms" / "img" / "dpis_noise.svg"
EPSILONS, SEEDS, METHODS = (1.0, 3.0), (0, 1, 2), ("dpsgd", "dpis")
DELTA = 1e-5
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Records, a network and what both methods share; `own` is for DPIS alone (Sec. 5.3)."""

    records: Callable[[], tuple[Split, Split]]
    network: Callable[[], nn.Module]
    batch_size: int
    epochs: float
    clip: float
    lr: float
    adam: bool = False
    own: dict[str, Any] = field(default_factory=dict)

    def recipe(self, method: str, epsilon: float, records: int, epochs: float | None = None) -> Recipe:
        """The recipe of `method`, calibrated: DP-SGD by PLD, DPIS by its filter; both are proven."""
        shared: dict[str, Any] = {"batch_size": self.batch_size, "epochs": epochs or self.epochs, "clip": self.clip}
        recipe = recipes.dpis(**shared, **self.own) if method == "dpis" else recipes.dpsgd(**shared)
        return recipe.calibrate(Budget(epsilon, DELTA), records=records)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum 0.9 for images, Adam for text, as in the paper."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, self.lr) if self.adam else torch.optim.SGD(trained, self.lr, momentum=0.9)


def _images(name: str) -> tuple[Split, Split]:
    loaded = data.load(name)
    return loaded.train, loaded.test


def _scattered(name: str) -> tuple[Split, Split]:
    return tuple((scatter(x, groups=27), y) for x, y in _images(name))  # type: ignore[return-value]  # two of them


def _reviews() -> tuple[Split, Split]:
    loaded = imdb.load()
    return loaded.train, loaded.test


TASKS = {
    "fashion-scatter": Task(
        lambda: _scattered("fashion-mnist"), models.scatter_cnn, 512, 15, 0.1, 2.0, own={"divider": 1.0}
    ),
    "fashion-cnn": Task(lambda: _images("fashion-mnist"), models.mnist_cnn, 512, 15, 0.1, 2.0, own={"divider": 1.0}),
    "mnist-scatter": Task(lambda: _scattered("mnist"), models.scatter_cnn, 512, 15, 0.1, 2.0),
    "mnist-cnn": Task(lambda: _images("mnist"), models.mnist_cnn, 512, 15, 0.1, 2.0),
    "imdb-bilstm": Task(
        _reviews,
        lambda: models.imdb_bilstm(imdb.glove_embedding()),
        *(256, 10, 0.1, 2e-3, True),
        own={"multiplier": 3.0, "adaptive": True},
    ),
}


@dataclass
class Measured:
    """One finished epoch; everything in it is public (released values, a public test set, the clock)."""

    epoch: int
    accuracy: float
    seconds: float
    noise: float
    share: float
    clip: float


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, test: Split) -> float:
    """The share of held-out records that are classified correctly."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(test[0].split(500), test[1].split(500), strict=True)
        )
    model.train()
    return right / len(test[1])


def train(
    name: str, method: str, epsilon: float, seed: int, runs: Path, epochs: float | None, records: int | None
) -> None:
    """Train or go on training, an epoch at a time; the result is written at the end."""
    label = f"{name}-{method}-eps{epsilon:g}-seed{seed}"
    shortened = f"-{epochs or 'all'}-epochs-{records or 'all'}-records" if epochs or records else ""
    if (RESULTS / f"{label}.json").exists():
        return
    task = TASKS[name]
    (x, y), test = task.records()
    x, y = x[:records], y[:records]
    torch.manual_seed(seed)
    model = task.network()
    recipe = task.recipe(method, epsilon, len(y), epochs)
    private = Private(model, task.optimizer(model), (x, y), losses, recipe)
    folder, history = runs / (label + shortened), []
    if (folder / "ledger.sqlite").exists():
        history = private.load(folder).get("history", [])
    per_epoch = max(1, round(len(y) / task.batch_size))
    while private.position < private.total:
        started = time.perf_counter()
        for _ in range(min(per_epoch - private.position % per_epoch, private.total - private.position)):
            private.step()
        seconds = time.perf_counter() - started
        history.append(asdict(_measured(private, len(history), accuracy(model, test), seconds)))
        private.save(folder, extra={"history": history})
        print(label, history[-1], flush=True)
    if not shortened:
        _write(label, {"task": name, "method": method, "epsilon": epsilon, "seed": seed, "history": history}, private)


def _measured(private: Private, epoch: int, right: float, seconds: float) -> Measured:
    recipe, memory = private.bench.recipe, private.bench.memory
    assert recipe.noise_multiplier is not None
    released = memory.get("released") or {"total": 1.0, "records": 1.0, "clip": 1.0}
    share = released["total"] / released["records"] / released["clip"]
    clip = released["clip"] if memory.get("released") else recipe.clip
    return Measured(epoch, right, seconds, memory.get("noise", recipe.noise_multiplier), share, clip)


def _write(label: str, result: dict[str, Any], private: Private) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    result["guarantee"] = private.guarantee().to_dict()
    write_durably(RESULTS / f"{label}.json", json.dumps(result, indent=1).encode())
    private.close()


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
    """Train once; `epochs` and `records` make it shorter for a try."""
    train(task, method, epsilon, seed, runs, epochs, records)


@app.command()
def every(runs: Runs = Path("runs/dpis")) -> None:
    """Everything that is not finished, one run after the other."""
    for seed, name, epsilon, method in product(SEEDS, TASKS, EPSILONS, METHODS):
        train(name, method, epsilon, seed, runs, None, None)


def finished() -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    """The results by task, ε and method."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        groups[result["task"], result["epsilon"], result["method"]].append(result)
    return groups


@app.command()
def table() -> None:
    """Accuracy after the last epoch, and the time of an epoch relative to DP-SGD."""
    groups = finished()
    print("| task | ε | method | seeds | accuracy | last σ_G | time per epoch |\n|---|---|---|---|---|---|---|")
    for (name, epsilon, method), results in groups.items():
        last = [100 * result["history"][-1]["accuracy"] for result in results]
        spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
        baseline = groups.get((name, epsilon, "dpsgd"))
        relative = f"{_seconds(results) / _seconds(baseline):.1f}×" if baseline else ""
        noise = statistics.mean(result["history"][-1]["noise"] for result in results)
        cells = (
            name,
            f"{epsilon:g}",
            method,
            len(last),
            f"{statistics.mean(last):.2f}{spread}",
            f"{noise:.3f}",
            relative,
        )
        print("| " + " | ".join(map(str, cells)) + " |")


def _seconds(results: list[dict[str, Any]]) -> float:
    return float(statistics.median(epoch["seconds"] for result in results for epoch in result["history"]))


@app.command()
def figure() -> None:
    """σ_G by epoch for every finished task, DPIS over DP-SGD (the paper's figure 1)."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    groups = finished()
    for (name, epsilon, method), results in groups.items():
        if method == "dpis" and (baseline := groups.get((name, epsilon, "dpsgd"))):
            base = baseline[0]["history"][0]["noise"]
            noise = [epoch["noise"] / base for epoch in results[0]["history"]]
            axes.plot(range(1, len(noise) + 1), noise, label=f"{name}, ε = {epsilon:g}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="σ_G over DP-SGD's", ylim=(0, None))
    axes.legend(fontsize="small")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, bbox_inches="tight")


if __name__ == "__main__":
    app()
