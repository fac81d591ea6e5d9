"""Table 4 of Dynamic DP-SGD at user level: 250,000 digits of infinite-mnist over many users, at equal *proven* ε.

python -m benchmarks.federated train --seeds 3       # 4 methods at ε = 0.1, 0.4 and 1; finished runs are skipped
python -m benchmarks.federated train --method static --epsilon 1 --engine flower --seeds 1
python -m benchmarks.federated train --engine simulation --seeds 1   # in Flower's simulation, with Ray
python -m benchmarks.federated table                 # what is finished, as Markdown

The paper's appendix with the shape of its federation is not public; ours: every user has as many digits as any other,
every round draws each user with the same probability, and each sends one gradient (DP-FedSGD). Engine "flower" sends
every message through the real strategy and the real ClientApp; "fast" takes the same rounds of the same mechanism with
the gradients of all drawn users computed at once. Tests show that both give the same model. Engine "simulation" is
Flower's own, with a node for every user and so with fewer of them (`benchmarks.federated_simulation`).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from sordino import Budget, Recipe, recipes
from sordino.federated import FedSGD, InProcessGrid, PrivateStrategy, client_app
from sordino.lab import data
from sordino.lab.experiments.results import keep_lines, read_lines
from sordino.recipe import Optimizer

app = typer.Typer(add_completion=False)
RESULTS = Path(__file__).parent / "results" / "federated.jsonl"
RECORDS = 250_000
CLIP, MOMENTUM, MU_RATIO, CLIP_RATIO = 1.0, 0.9, 1.25, 10 / 3  # the ratios are those of the authors' MNIST script
METHODS = ("static", "growing_mu", "sensitivity_decay", "dynamic")
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """A federation; the server's learning rates were found with the static method, see docs/federated.md."""

    users: int
    rate: float
    rounds: int
    hidden: int
    learning_rates: dict[float, float]


MANY = Shape(25_000, 0.02, 150, 64, {0.1: 0.1, 0.4: 0.2, 1.0: 0.3})
SHAPES = {
    "fast": MANY,
    "flower": MANY,
    "simulation": Shape(2_500, 0.04, 60, 0, {0.1: 0.03, 0.4: 0.05, 1.0: 0.1}),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    method: str
    epsilon: float
    seed: int
    engine: str = "fast"
    lr: float = 0.3
    rounds: int = MANY.rounds

    @property
    def shape(self) -> Shape:
        return SHAPES[self.engine]

    @property
    def label(self) -> str:
        return f"{self.method}-eps{self.epsilon:g}-seed{self.seed}-{self.engine}"

    def recipe(self, users: int) -> Recipe:
        """The authors' ratios; a method without one of them has ratio 1. δ = 1/(10 N) as in the paper."""
        recipe = recipes.dynamic(
            mu_ratio=MU_RATIO if self.method in ("growing_mu", "dynamic") else 1.0,
            clip_ratio=CLIP_RATIO if self.method in ("sensitivity_decay", "dynamic") else 1.0,
            batch_size=round(self.shape.rate * users),
            steps=self.rounds,
            clip=CLIP,
        )
        server = Optimizer("sgd", lr=self.lr, momentum=MOMENTUM)
        return replace(recipe, optimizer=server).calibrate(Budget(self.epsilon, 0.1 / users), records=users)


class Centred(nn.Module):
    """Pixels around zero, by round constants that every handwritten digit has."""

    def forward(self, pixels: Tensor) -> Tensor:
        """About zero, about one."""
        return (pixels - 0.13) / 0.31


def network(seed: int, hidden: int = MANY.hidden) -> nn.Module:
    """Small, since noise grows with the root of the number of parameters: halved images, `hidden` tanh, 10 classes."""
    torch.manual_seed(seed)
    pixels = [nn.AvgPool2d(2), nn.Flatten(), Centred()]
    inner = [nn.Linear(196, hidden), nn.Tanh()] if hidden else []
    return nn.Sequential(*pixels, *inner, nn.Linear(hidden or 196, 10))


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def users_data(users: int, records: int = RECORDS) -> tuple[Split, Split]:
    """Images [users, digits, 1, 28, 28] and classes by user, and the 10,000 held-out digits. Made once, then kept."""
    cache = cached(records)
    loaded = data.load("infinite-mnist", records=records)
    if not cache.exists():
        x, y = loaded.train
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"x": x.mul(255).round().to(torch.uint8), "y": y}, cache.with_suffix(".partial"))
        cache.with_suffix(".partial").replace(cache)
    return by_user(cache, users), loaded.test


def cached(records: int = RECORDS) -> Path:
    """Where the deformed digits are kept."""
    return Path(os.environ.get("SORDINO_CACHE", "~/.cache/sordino")).expanduser() / f"federated-{records}.pt"


def by_user(cache: Path, users: int) -> Split:
    """Every user's digits, read from disk only as far as they are used."""
    kept = torch.load(cache, weights_only=True, mmap=True)
    return kept["x"].reshape(users, -1, 1, 28, 28), kept["y"].reshape(users, -1)


def accuracy(model: nn.Module, test: Split) -> float:
    """The share of held-out records that are classified correctly."""
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def take_round(strategy: PrivateStrategy, train: Split) -> None:
    """One of the strategy's rounds, with every drawn user's FedSGD update computed by one vmap."""
    rounds, (x, y) = strategy.rounds, train
    current = rounds.begin(range(len(y)))
    parameters = {name: p.detach() for name, p in rounds.model.named_parameters()}

    def loss_of_user(weights: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(rounds.model, weights, (images,)), classes)

    for part in torch.tensor(current.drawn, dtype=torch.int64).split(128):
        gradients = vmap(grad(loss_of_user), in_dims=(None, 0, 0))(parameters, x[part].float() / 255, y[part])
        for place, user in enumerate(part.tolist()):
            rounds.add(current, user, {name: g[place] for name, g in gradients.items()}, within=False)
    rounds.release(current)


def run(case: Case, train: Split, test: Split, grid: Grid | None = None) -> dict[str, Any]:
    """All rounds of one case; the curve is the held-out accuracy after every tenth of the run."""
    model, started = network(case.seed, case.shape.hidden), time.process_time()
    strategy = PrivateStrategy(model, case.recipe(len(train[1])), FedSGD(), seed=case.seed)
    curve = [accuracy(model, test)]
    if case.engine != "fast":
        strategy.start(
            grid or _grid(train, case.shape.hidden),
            evaluate_fn=lambda number, _: curve.append(accuracy(model, test)) if number else None,
        )
        curve = curve[:: max(1, case.rounds // 10)]
    else:
        for number in range(case.rounds):
            take_round(strategy, train)
            if (number + 1) % max(1, case.rounds // 10) == 0:
                curve.append(accuracy(model, test))
    return {
        **asdict(case),
        "accuracy": accuracy(model, test),
        "curve": [round(value, 4) for value in curve],
        "cpu_seconds": round(time.process_time() - started, 1),
        "noise_multiplier": strategy.rounds.recipe.noise_multiplier,
        "guarantee": strategy.guarantee().to_dict(),
    }


def _grid(train: Split, hidden: int = MANY.hidden) -> InProcessGrid:
    x, y = train

    def of_user(context: Context) -> Split:
        place = int(context.node_config["partition-id"])
        return x[place].float() / 255, y[place]

    return InProcessGrid(client_app(network(0, hidden), losses, of_user), len(y))


@app.command()
def train(
    epsilon: Annotated[list[float] | None, typer.Option(help="may be repeated")] = None,
    method: Annotated[list[str] | None, typer.Option(help="may be repeated; all four unless given")] = None,
    seeds: int = 3,
    engine: Annotated[str, typer.Option(help="fast, flower or simulation")] = "fast",
    rounds: Annotated[int | None, typer.Option(help="those of the engine's shape unless given")] = None,
    results: Annotated[Path, typer.Option(help="the file of the results, one line per run")] = RESULTS,
) -> None:
    """Every method with every ε and seed."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    shape = SHAPES[engine]
    wanted = product(range(seeds), epsilon or [0.1, 0.4, 1.0], method or METHODS)
    cases = [
        Case(name, target, seed, engine, shape.learning_rates.get(target, 0.1), rounds or shape.rounds)
        for seed, target, name in wanted
    ]
    private, test = users_data(shape.users)
    finished = {result["label"] for result in read_lines(results)}
    waiting = [case for case in cases if case.label not in finished]

    def finish(grid: Grid | None = None) -> None:
        for case in waiting:
            result = run(case, private, test, grid)
            keep_lines(results, {"label": case.label, **result})
            print(case.label, f"{result['accuracy']:.4f}", f"{result['cpu_seconds']:.0f} s", flush=True)

    if engine != "simulation":
        finish()
    elif waiting:
        from benchmarks.federated_simulation import simulated

        simulated(finish, shape.users, shape.hidden)


@app.command()
def table(results: Path = RESULTS) -> None:
    """Mean and deviation over the seeds of everything finished."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in read_lines(results):
        found[result["method"], result["engine"]][result["epsilon"]].append(100 * result["accuracy"])
    targets = sorted({target for by_target in found.values() for target in by_target})
    print("| method | engine | " + " | ".join(f"ε = {target:g}" for target in targets) + " |")
    print("|---|---|" + "---|" * len(targets))
    order = sorted(found, key=lambda key: (key[1], METHODS.index(key[0])))
    for method, engine in order:
        cells = (_cell(found[method, engine][target]) for target in targets)
        print(f"| {method} | {engine} | {' | '.join(cells)} |")


def _cell(scores: list[float]) -> str:
    if not scores:
        return ""
    spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.2f}{spread} ({len(scores)})"


if __name__ == "__main__":
    app()
