"""What preconditioning does to a step, what it is worth on the footing of its paper, and what it costs.

``python -m benchmarks.preconditioning paper`` takes the runs of docs/mechanisms/preconditioned.md that are missing and
writes their table; ``geometry`` and ``cost`` write theirs, ``settings`` prints. Everything goes through the public API.

The footing is that of the paper's published code: two convolutions, ReLU and maxima, 5 epochs of expected draws of 256,
clip = 1, Adam at 1e-3, ε = 1. Pictures are halved in size, which makes a run four times as fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import units, worth
from benchmarks.results import CHOICE, put
from sordino import Budget, Private, Recipe, recipes
from sordino.lab import data
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.experiments.running import measure_accuracy
from sordino.lab.experiments.summaries import write_markdown
from sordino.mechanisms.preconditioned import Probed
from sordino.tables.dataset import tensors

STORED = Path(__file__).parent / "results" / "preconditioning.jsonl"
PAGE = CHOICE.parent / "mechanisms" / "preconditioned.md"
BY = "benchmarks.preconditioning"
app = typer.Typer(add_completion=False, help=__doc__)


# -- on the footing of the paper ---------------------------------------------------------------------------------------

SHAPES = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
"""Mean and deviation of the pixels, as everybody uses them; on the real records, so that no ε here covers them."""


@dataclass(frozen=True)
class Footing:
    """A row of the table: a recipe, its optimizer, its clipping bound, and the recipe's own options."""

    recipe: Callable[..., Recipe]
    optimizer: str = "Adam"
    lr: float = 1e-3
    clip: float = 1.0
    damping: float | None = None
    every: int | None = None

    def build(self, records: int, epsilon: float, epochs: float) -> Recipe:
        """The recipe of a run, calibrated."""
        named = {"damping": self.damping, "every": self.every}
        options = {name: value for name, value in named.items() if value is not None}
        recipe = self.recipe(batch_size=256, epochs=epochs, clip=self.clip, **options)
        return recipe.calibrate(Budget(epsilon, worth.DELTA), records=records)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "Adam":
            return torch.optim.Adam(model.parameters(), lr=self.lr)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def __str__(self) -> str:
        said = [self.optimizer, f"lr = {self.lr:g}", f"clip = {self.clip:g}"]
        said += [f"damping = {self.damping:g}"] if self.damping is not None else []
        return ", ".join(said + ([f"probed every {self.every} steps"] if self.every else []))


FOOTINGS = {
    "dpsgd": Footing(recipes.dpsgd),
    "preconditioned": Footing(recipes.preconditioned),
    "preconditioned, refreshed": Footing(recipes.preconditioned, damping=0.01, every=234),
    "dpsgd, small bound": Footing(recipes.dpsgd, "SGD", 0.5, 0.1),
    "preconditioned, small bound": Footing(recipes.preconditioned, "SGD", 0.5, 0.1),
}


def build_network() -> nn.Module:
    """The paper's network, for pictures of 14 pixels: 43,082 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def prepare(pictures: Tensor, name: str) -> Tensor:
    """Standardised, and halved in size."""
    mean, deviation = SHAPES[name]
    return F.avg_pool2d((pictures.float() - mean) / deviation, 2)


def name_run(task: str, row: str, epsilon: float, epochs: float, seed: int) -> str:
    """What a run is known by."""
    return f"{task}/eps{epsilon:g}/epochs{epochs:g}/{row}/{FOOTINGS[row]}/seed{seed}"


@app.command()
def paper(
    tasks: Annotated[list[str] | None, typer.Argument(help="Datasets, in order; mnist unless given.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Rows; all unless given.")] = None,
    epsilon: float = 1.0,
    epochs: float = 5.0,
    seeds: int = 1,
    stored: Annotated[Path, typer.Option(help="Where results are kept.")] = STORED,
) -> None:
    """Take the runs that are missing, and write the table."""
    torch.set_num_threads(1)
    for seed in range(seeds):
        for task in tasks or ["mnist"]:
            for name in row or list(FOOTINGS):
                label = name_run(task, name, epsilon, epochs, seed)
                if label not in {each["label"] for each in read_lines(stored)}:
                    keep_lines(
                        stored, {"label": label, "task": task, "row": name, **train(task, name, epsilon, epochs, seed)}
                    )
                    print(read_lines(stored)[-1], flush=True)
    put(PAGE, tabulate(read_lines(stored)), part=" paper", by=BY)


def train(task: str, name: str, epsilon: float, epochs: float, seed: int) -> Row:
    """One run: its accuracy on the test set, and what it says of itself."""
    loaded, footing = data.load(task), FOOTINGS[name]
    inputs, labels = tensors(loaded.train_set)
    model = worth.seeded(seed, build_network)
    recipe = footing.build(len(labels), epsilon, epochs)
    begun = time.process_time()
    train_set = prepare(inputs, task), labels
    private = Private(model, footing.make_optimizer(model), train_set, worth.compute_losses, recipe)
    for _ in private.steps():
        pass
    seconds, guarantee = round(time.process_time() - begun), private.guarantee()
    accuracy = measure_accuracy(model, (prepare(loaded.test[0], task), loaded.test[1]))
    return {
        "epsilon": epsilon,
        "epochs": epochs,
        "seed": seed,
        "accuracy": accuracy,
        "noise": recipe.noise_multiplier,
        "epsilon_spent": guarantee.epsilon,
        "basis": guarantee.basis,
        "seconds": seconds,
    }


def tabulate(rows: list[Row]) -> str:
    """A line for each footing, a column for each dataset and length."""
    columns = sorted({(row["task"], row["epochs"]) for row in rows}, reverse=True)
    lines = []
    for name, footing in FOOTINGS.items():
        found = [[row for row in rows if (row["row"], row["task"], row["epochs"]) == (name, *c)] for c in columns]
        if any(found):
            lines.append([name.partition(",")[0], str(footing), *map(_show, found)])
    return write_markdown(["", "settings", *(f"{task}, epochs: {epochs:g}" for task, epochs in columns)], lines)


def _show(rows: list[Row]) -> str:
    """Mean, deviation and number of seeds."""
    scores = [100 * row["accuracy"] for row in rows]
    if len(scores) < 2:
        return "".join(f"{score:.1f} (1)" for score in scores)
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f} ({len(scores)})"


# -- what it does to a step --------------------------------------------------------------------------------------------

EXAMPLES = 400
STRETCHED: dict[str, dict[str, Any]] = {
    "pink noise, damping 0.1 (the default)": {},
    "white noise, damping 0.1": {"inputs": "white"},
    "pink noise, damping 0.01": {"damping": 0.01},
    "pink noise, damping 0.001": {"damping": 0.001},
    "pink noise, damping 0.1, not balanced": {"balanced": False},
}


@app.command()
def geometry(name: str = "mnist") -> None:
    """Directions of stretched gradients, and progress of a step per noise, on the small CNN of the comparison.

    Progress is what a step along the mean clipped gradient lowers the loss by, to first order: <mean g, mean clipped>.
    Clipped gradients are no longer than C in either geometry, so that the noise is the same.
    """
    torch.set_num_threads(1)
    task = worth.TASKS[name]()
    fresh = task.build(0)
    trained, _ = worth.train(task, "dpsgd", 16.0, 1.0, 0)
    lines: dict[str, list[str]] = {"none: DP-SGD": [], **{key: [] for key in STRETCHED}}
    for model in (fresh, trained):
        plain = differentiate(model, task.train)
        rows = _flatten(plain)
        steps = {"none: DP-SGD": rows, **{key: _flatten(stretch(model, task, plain, key)) for key in STRETCHED}}
        made = {key: float(rows.mean(0) @ _clip(found).mean(0)) for key, found in steps.items()}
        for key, found in steps.items():
            lines[key] += [f"{count_directions(found):.0f}", f"{made[key] / made['none: DP-SGD']:.2f}"]
    heads = [
        "stretched by",
        *(f"{each}{when}" for when in ("", " after 100 draws") for each in ("directions", "progress")),
    ]
    put(PAGE, write_markdown(heads, [[key, *cells] for key, cells in lines.items()]), part=" geometry", by=BY)


def differentiate(model: nn.Module, records: worth.Split) -> list[Tensor]:
    """The gradients of some records, one by one: for every parameter [records, *shape]."""
    found = []
    for place in range(EXAMPLES):
        losses = worth.compute_losses(model, (records[0][place : place + 1], records[1][place : place + 1]))
        found.append(torch.autograd.grad(losses.sum(), list(model.parameters())))
    return [torch.stack(column) for column in zip(*found, strict=True)]


def stretch(model: nn.Module, task: worth.Task, gradients: list[Tensor], key: str) -> list[Tensor]:
    """The same in the geometry of a row."""
    recipe = recipes.preconditioned(batch_size=64, steps=1, noise_multiplier=1.0, **STRETCHED[key])
    settled = recipe.for_records(len(task.train[1]))
    run = Private(
        model, torch.optim.SGD(model.parameters(), 0.1), task.train, worth.compute_losses, settled, validate=False
    )
    assert isinstance(settled.norms, Probed)
    return settled.norms.probe(run.bench, 0).apply(gradients)


def count_directions(rows: Tensor) -> float:
    """(Σ s²)² / Σ s⁴ of the singular values s: over how many directions the squared length is spread."""
    squares = torch.linalg.svdvals(rows.double()).square()
    return float(squares.sum().square() / squares.square().sum())


def _flatten(gradients: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in gradients], 1)


def _clip(rows: Tensor, bound: float = 0.5) -> Tensor:
    weights: Tensor = (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    return rows * weights


# -- its settings, and its price in time -------------------------------------------------------------------------------


@app.command()
def settings(name: str = "mnist", steps: int = 60, noise: float = 0.8) -> None:
    """How damping and balance of preconditioning matter: one seed each, on the records put aside; printed."""
    torch.set_num_threads(1)
    task = worth.TASKS[name]()
    shared = {"batch_size": worth.BATCH, "steps": steps, "noise_multiplier": noise, "clip": 0.5}
    tried: list[tuple[Callable[..., Recipe], dict[str, Any], tuple[float, ...]]] = [
        (recipes.dpsgd, {}, (2.0, 4.0, 8.0)),
        (recipes.preconditioned, {"damping": 0.1}, (4.0, 8.0)),
        (recipes.preconditioned, {"damping": 0.01}, (8.0,)),
        (recipes.preconditioned, {"damping": 0.1, "balanced": False}, (8.0,)),
        (recipes.preconditioned, {"damping": 0.01, "balanced": False}, (2.0, 4.0, 12.0)),
    ]
    for make, options, rates in tried:
        for rate in rates:
            recipe = make(lr=rate, **options, **shared).for_records(len(task.train[1]))
            model = task.build(worth.SEARCHED)
            optimizer = recipe.optimizer.build(model.parameters())
            run = Private(
                model, optimizer, task.train, worth.compute_losses, recipe, validate=False, seed=worth.SEARCHED
            )
            for _ in run.steps():
                pass
            score = 100 * measure_accuracy(model, task.choose)
            print(f"{recipe.name} {options or ''} lr={rate:g}: {score:.2f}", flush=True)


@app.command()
def cost(turns: int = 7) -> None:
    """Processor time of a step beside DP-SGD's, by turns, and of probing; into docs/mechanisms/preconditioned.md."""
    torch.set_num_threads(1)
    lines = []
    for name, (make, text) in units.NETWORKS.items():
        runs = [_bind(make, text, recipe) for recipe in (recipes.dpsgd, recipes.preconditioned)]
        begun = time.process_time()
        norms = runs[1].bench.recipe.norms
        norms.survey(runs[1].bench, 0)
        probing = time.process_time() - begun
        for each in runs:
            units.measure(each)
        measured = [[units.measure(each) for each in runs] for _ in range(turns)]
        plain, stretched = (statistics.median(column) * 1000 for column in zip(*measured, strict=True))
        lines.append([name, f"{plain:.0f} ms", f"{stretched:.0f} ms", f"{stretched / plain:.2f}", f"{probing:.1f} s"])
        print(lines[-1], flush=True)
    heads = ["network, 256 records", "DP-SGD", "preconditioned", "ratio", "probing, once"]
    put(PAGE, write_markdown(heads, lines), part=" cost", by=BY)


def _bind(make: Callable[[], nn.Module], text: bool, recipe: Callable[..., Recipe]) -> Private:
    """A run that takes all records at every step."""
    torch.manual_seed(0)
    model, count = make(), units.RECORDS
    inputs = torch.randint(0, units.WORDS, (count, units.LENGTH)) if text else torch.randn(count, 1, 28, 28)
    settled = recipe(batch_size=count, steps=10_000, noise_multiplier=1.0).for_records(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Private(model, optimizer, (inputs, torch.randint(0, 10, (count,))), units.loss, settled, validate=False)


if __name__ == "__main__":
    app()
