"""What selection is worth: DP-SGD, noise screening, DPSUR and its refinements at the same ε, proven and published.

python -m benchmarks.selection one --task fashion-scatter --method dpsur --epsilon 3 --seed 0
python -m benchmarks.selection every           # all tasks, methods, budgets and seeds; finished ones are skipped
python -m benchmarks.selection table           # what is finished, as Markdown
python -m benchmarks.selection prices          # how many attempts each method can afford, without training

A run that was killed goes on at its last checkpoint. Results are in benchmarks/results/selection, one JSON file per
run; the runs themselves (ledgers, checkpoints) in the folder --runs. A shortened run leaves no result.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
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
RESULTS = Path(__file__).parent / "results" / "selection"
EPSILONS, SEEDS = (1.0, 3.0), (0, 1, 2)
DELTA, EVERY, MOST = 1e-5, 100, 100_000
Split = tuple[Tensor, Tensor]

METHODS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "screening": {},
    "screening-private": {"validation_noise": True},
    "dpsur": {},
    "dpsur-reuse": {"reuse": True},
    "dpsur-line": {"line_search": True},
    "dpsur-every-4": {"test_every": 4},
    "dpagd": {},
    "screening-published": {"accounting": "published"},
    "dpsur-published": {"accounting": "published"},
}


@dataclass(frozen=True)
class Task:
    """Records, a network and the settings of DPSUR; `noise` holds σ_t and σ_v by ε (PAPERS.md, section 2)."""

    records: Callable[[], tuple[Split, Split]]
    network: Callable[[], nn.Module]
    batch_size: int
    lr: float
    noise: dict[float, tuple[float, float]]
    adam: bool = False
    validation_size: int = 256

    def recipe(self, method: str, epsilon: float, records: int, public: Split) -> Recipe:
        """The recipe of `method` with the paper's noise, and as many attempts as the budget pays for."""
        sigma, test_sigma = self.noise[epsilon]
        options = dict(METHODS[method])
        shared: dict[str, Any] = {"batch_size": self.batch_size, "noise_multiplier": sigma}
        kind, _, _ = method.partition("-")
        if kind == "dpsgd":
            recipe = recipes.dpsgd(clip=0.1, **shared)
        elif kind == "dpagd":
            recipe = recipes.dpagd(clip=0.1, choice_epsilon=1.0, validation_size=self.validation_size, **shared)
        elif kind == "screening":
            energy: dict[str, Any] = {"public": public, "public_name": "half of the test set"}
            if options.pop("validation_noise", False):
                energy = {"validation_size": self.validation_size, "validation_noise": test_sigma}
            recipe = recipes.screening(**energy, **options, **shared)
        else:
            recipe = recipes.dpsur(
                validation_noise=test_sigma, validation_size=self.validation_size, **options, **shared
            )
        budget = Budget(epsilon, DELTA, accountant="rdp" if method.endswith("published") else "pld")
        return _longest(recipe, budget, records)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum 0.9 for images, Adam for text, as in the paper."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, self.lr) if self.adam else torch.optim.SGD(trained, self.lr, momentum=0.9)


def _longest(recipe: Recipe, budget: Budget, records: int) -> Recipe:
    """As many attempts as the budget pays for; where attempts differ in price, by bisection."""
    if recipe.selection.constant:
        return recipe.calibrate(budget, records=records)
    low, high = 1, MOST
    while low < high:
        middle = (low + high + 1) // 2
        price = replace(recipe, steps=middle).for_records(records).price(DELTA)
        low, high = (middle, high) if price <= budget.epsilon else (low, middle - 1)
    return replace(recipe, steps=low).calibrate(budget, records=records)


def _scattered(name: str) -> tuple[Split, Split]:
    loaded = data.load(name)
    train, test = ((scatter(x, groups=27), y) for x, y in (loaded.train, loaded.test))
    return train, test


def _reviews() -> tuple[Split, Split]:
    loaded = imdb.load()
    return loaded.train, loaded.test


def _digits() -> tuple[Split, Split]:
    loaded = data.load("digits")
    return loaded.train, loaded.test


TASKS = {
    "digits": Task(_digits, models.digits_mlp, 128, 1.0, {1.0: (4.0, 2.0), 3.0: (2.0, 1.3)}, validation_size=64),
    "fashion-scatter": Task(
        lambda: _scattered("fashion-mnist"), models.scatter_cnn, 2048, 4.0, {1.0: (4.0, 1.3), 3.0: (2.15, 0.8)}
    ),
    "mnist-scatter": Task(
        lambda: _scattered("mnist"), models.scatter_cnn, 1024, 2.0, {1.0: (2.0, 1.3), 3.0: (1.35, 0.9)}
    ),
    "imdb-bilstm": Task(_reviews, models.imdb_bilstm, 1024, 0.02, {1.0: (2.0, 1.3), 3.0: (1.35, 1.0)}, adam=True),
}


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, test: Split) -> float:
    """The share of held-out records that are classified correctly."""
    model.eval()
    with torch.no_grad():
        pairs = zip(test[0].split(500), test[1].split(500), strict=True)
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    model.train()
    return right / len(test[1])


def train(
    name: str, method: str, epsilon: float, seed: int, runs: Path, attempts: int | None, records: int | None
) -> None:
    """Train or go on training; the result is written at the end. `attempts` and `records` shorten it."""
    label = f"{name}-{method}-eps{epsilon:g}-seed{seed}"
    if (RESULTS / f"{label}.json").exists():
        return
    task = TASKS[name]
    (x, y), (test_x, test_y) = task.records()
    x, y = x[:records], y[:records]
    half = len(test_y) // 2
    thin = max(1, half // 500)
    public, test = (test_x[:half:thin], test_y[:half:thin]), (test_x[half:], test_y[half:])
    torch.manual_seed(seed)
    model = task.network()
    private = Private(model, task.optimizer(model), (x, y), losses, task.recipe(method, epsilon, len(y), public))
    shortened = f"-{attempts}-attempts-{records}-records" if attempts or records else ""
    folder = runs / (label + shortened)
    extra: dict[str, Any] = {"attempts": 0, "accepted": 0, "seconds": 0.0, "memory": {}}
    if (folder / "ledger.sqlite").exists():
        extra |= private.load(folder)
        private.bench.memory.update(extra["memory"])
    while private.position < private.total and extra["attempts"] < (attempts or MOST):
        _some(private, extra, min(EVERY, (attempts or MOST) - extra["attempts"]))
        extra["memory"] = {key: value for key, value in private.bench.memory.items() if isinstance(value, int)}
        private.save(folder, extra)
    if not shortened:
        _write(label, private, extra | {"accuracy": accuracy(model, test), "method": method, "task": name})
    print(f"{label}{shortened}: {extra['accepted']}/{extra['attempts']} accepted, {accuracy(model, test):.4f}")


def _some(private: Private, extra: dict[str, Any], count: int) -> None:
    """A few attempts; whether one was accepted shows in the model, and is paid for."""
    started = time.perf_counter()
    first = private.bench.parameters()[-1]
    for _ in range(count):
        if private.position == private.total:
            break
        before = first.detach().clone()
        private.step()
        extra["attempts"] += 1
        extra["accepted"] += int(not torch.equal(before, first))
    extra["seconds"] += time.perf_counter() - started


def _write(label: str, private: Private, result: dict[str, Any]) -> None:
    guarantee = private.guarantee(DELTA)
    result |= {"epsilon": guarantee.epsilon, "basis": guarantee.basis, "steps": private.total}
    result.pop("memory")
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_durably(RESULTS / f"{label}.json", json.dumps(result, indent=1).encode())


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
    """One run."""
    train(task, method, epsilon, seed, runs, attempts, records)


@app.command()
def every(runs: Runs = Path("runs/selection"), task: str | None = None) -> None:
    """All runs that are not finished yet, cheap tasks first, or those of one task."""
    for name, seed, epsilon, method in product([task] if task else TASKS, SEEDS, EPSILONS, METHODS):
        train(name, method, epsilon, seed, runs, None, None)


@app.command()
def prices(records: int = 60_000) -> None:
    """How many attempts each method can afford at the settings of every task."""
    public = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    print("| task | ε | method | steps |\n|---|---|---|---|")
    for (name, task), epsilon, method in product(TASKS.items(), EPSILONS, METHODS):
        size = {"imdb-bilstm": 25_000, "digits": 1_437}.get(name, records)
        print(f"| {name} | {epsilon:g} | {method} | {task.recipe(method, epsilon, size, public).steps:,} |", flush=True)


@app.command()
def table() -> None:
    """Mean and deviation over seeds of all finished runs."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        found[result["task"], result["method"], path.stem.split("-eps")[1].split("-")[0]].append(result)
    print("| task | method | ε | basis | accuracy | accepted / attempts | seeds |\n|---|---|---|---|---|---|---|")
    for (task, method, epsilon), results in sorted(found.items()):
        scores = [100 * result["accuracy"] for result in results]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        tried = sum(result["attempts"] for result in results) // len(results)
        kept = sum(result["accepted"] for result in results) // len(results)
        row = (task, method, epsilon, results[0]["basis"], f"{statistics.mean(scores):.2f} ± {spread:.2f}")
        moved = "in blocks" if METHODS[method].get("test_every") else f"{kept:,} / {tried:,}"  # a rollback moves too
        print(f"| {' | '.join(row)} | {moved} | {len(results)} |")


if __name__ == "__main__":
    app()
