"""Table 4 of Dynamic DP-SGD at user level: 250,000 digits of infinite-mnist over 25,000 users, at equal *proven* ε.

python -m benchmarks.federated train --seeds 3       # 4 methods at ε = 0.1, 0.4 and 1; finished runs are skipped
python -m benchmarks.federated train --method static --epsilon 1 --engine flower --seeds 1
python -m benchmarks.federated table                 # what is finished, as Markdown

The paper's appendix with the shape of its federation is not public; ours: every user has 10 digits (users differ in
their digits, not in their number), every round draws each user with probability 0.02, and each sends one gradient
(DP-FedSGD). Engine "flower" sends every message through the real strategy and the real ClientApp; "fast" takes the same
rounds of the same mechanism with the gradients of all drawn users computed at once. Tests show that both give the same
model.
"""

from __future__ import annotations

import json
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
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from sordino import Budget, Recipe, data, recipes
from sordino.federated import FedSGD, InProcessGrid, PrivateStrategy, client_app
from sordino.propose import Optimizer

app = typer.Typer(add_completion=False)
RESULTS = Path(__file__).parent / "results" / "federated"
RECORDS, USERS, RATE, ROUNDS = 250_000, 25_000, 0.02, 150
CLIP, MOMENTUM, MU_RATIO, CLIP_RATIO = 1.0, 0.9, 1.25, 10 / 3  # the ratios are those of the authors' MNIST script
LEARNING_RATES = {0.1: 0.1, 0.4: 0.2, 1.0: 0.3}  # of the server; found with the static method, see docs/federated.md
METHODS = ("static", "growing_mu", "sensitivity_decay", "dynamic")
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One run."""

    method: str
    epsilon: float
    seed: int
    engine: str = "fast"
    lr: float = 0.3
    rounds: int = ROUNDS

    @property
    def label(self) -> str:
        return f"{self.method}-eps{self.epsilon:g}-seed{self.seed}-{self.engine}"

    def recipe(self, users: int = USERS) -> Recipe:
        """The authors' ratios; a method without one of them has ratio 1. δ = 1/(10 N) as in the paper."""
        recipe = recipes.dynamic(
            mu_ratio=MU_RATIO if self.method in ("growing_mu", "dynamic") else 1.0,
            clip_ratio=CLIP_RATIO if self.method in ("sensitivity_decay", "dynamic") else 1.0,
            batch_size=round(RATE * users),
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


def network(seed: int) -> nn.Module:
    """Small, since noise grows with the root of the number of parameters: halved images, 64 tanh, 10 classes."""
    torch.manual_seed(seed)
    hidden = [nn.AvgPool2d(2), nn.Flatten(), Centred(), nn.Linear(196, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def users_data(records: int = RECORDS, users: int = USERS) -> tuple[Split, Split]:
    """Images [users, digits, 1, 28, 28] and classes by user, and the 10,000 held-out digits. Made once, then kept."""
    cache = Path(os.environ.get("SORDINO_CACHE", "~/.cache/sordino")).expanduser() / f"federated-{records}.pt"
    loaded = data.load("infinite-mnist", records=records)
    if not cache.exists():
        x, y = loaded.train
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"x": x.mul(255).round().to(torch.uint8), "y": y}, cache.with_suffix(".partial"))
        cache.with_suffix(".partial").replace(cache)
    kept = torch.load(cache, weights_only=True)
    x, y = kept["x"].reshape(users, -1, 1, 28, 28), kept["y"].reshape(users, -1)
    return (x, y), loaded.test


def accuracy(model: nn.Module, test: Split) -> float:
    """The share of held-out records that are classified correctly."""
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def take_round(strategy: PrivateStrategy, train: Split) -> None:
    """One round of the strategy's mechanism, with every drawn user's FedSGD update computed by one vmap."""
    mechanism, (x, y) = strategy.mechanism, train
    current = mechanism.begin(range(len(y)))
    parameters = {name: p.detach() for name, p in mechanism.model.named_parameters()}

    def loss_of_user(weights: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(mechanism.model, weights, (images,)), classes)

    for part in torch.tensor(current.drawn, dtype=torch.int64).split(128):
        gradients = vmap(grad(loss_of_user), in_dims=(None, 0, 0))(parameters, x[part].float() / 255, y[part])
        for place, user in enumerate(part.tolist()):
            mechanism.add(current, user, {name: g[place] for name, g in gradients.items()}, within=False)
    mechanism.release(current)


def run(case: Case, train: Split, test: Split) -> dict[str, Any]:
    """All rounds of one case; the curve is the held-out accuracy after every tenth of the run."""
    model, started = network(case.seed), time.process_time()
    strategy = PrivateStrategy(model, case.recipe(len(train[1])), FedSGD(), seed=case.seed)
    curve = [accuracy(model, test)]
    if case.engine == "flower":
        strategy.start(
            _grid(train), evaluate_fn=lambda number, _: curve.append(accuracy(model, test)) if number else None
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
        "noise_multiplier": strategy.mechanism.recipe.noise_multiplier,
        "guarantee": strategy.guarantee().to_dict(),
    }


def _grid(train: Split) -> InProcessGrid:
    x, y = train

    def of_user(context: Context) -> Split:
        place = int(context.node_config["partition-id"])
        return x[place].float() / 255, y[place]

    return InProcessGrid(client_app(network(0), losses, of_user), len(y))


@app.command()
def train(
    epsilon: Annotated[list[float] | None, typer.Option(help="may be repeated")] = None,
    method: Annotated[list[str] | None, typer.Option(help="may be repeated; all four unless given")] = None,
    seeds: int = 3,
    engine: Annotated[str, typer.Option(help="fast or flower")] = "fast",
    rounds: int = ROUNDS,
    results: Annotated[Path, typer.Option(help="where the results are kept, one file per run")] = RESULTS,
) -> None:
    """Every method with every ε and seed."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    results.mkdir(parents=True, exist_ok=True)
    private, test = users_data()
    for seed, target, name in product(range(seeds), epsilon or [0.1, 0.4, 1.0], method or METHODS):
        case = Case(name, target, seed, engine, LEARNING_RATES.get(target, 0.2), rounds)
        file = results / f"{case.label}.json"
        if not file.exists():
            result = run(case, private, test)
            file.write_text(json.dumps(result, indent=1) + "\n")
            print(case.label, f"{result['accuracy']:.4f}", f"{result['cpu_seconds']:.0f} s", flush=True)


@app.command()
def table(results: Path = RESULTS) -> None:
    """Mean and deviation over the seeds of everything finished."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
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
