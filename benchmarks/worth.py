"""What the newer mechanisms are worth at equal proven ε: short runs, one search of settings for all, three seeds.

``python -m benchmarks.worth run`` takes the runs that are not stored yet, in an order in which whole columns of the
table are finished first; ``write`` puts the table into docs/which-method.md. Everything goes through the public API.

Each method has the same search: three learning rates, one run each, judged on 5,000 training records that no run sees
(fewer where there are few); while the best is the smallest or the largest, one beyond it is tried. The best is then run
with three other seeds and measured on the test set. The sizes below are far from what is best: they are what two shared
cores can do for all methods alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import units
from benchmarks.results import CHOICE, put
from sordino import Budget, Private, Recipe, recipes
from sordino.lab import data
from sordino.lab.experiments import catalogue
from sordino.lab.experiments.problem import model_of, problem_of
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.experiments.running import measure_accuracy
from sordino.lab.experiments.summaries import write_markdown
from sordino.tables.dataset import tensors

STORED = Path(__file__).parent / "results" / "worth.jsonl"
PAGE = CHOICE.parent / "mechanisms" / "preconditioned.md"
DELTA, EPSILONS, SEEDS = 1e-5, (1.0, 3.0), (0, 1, 2)
STEPS, BATCH, HELD_OUT, SEARCHED = 100, 512, 5_000, 100
"""Length of a run, expected size of a draw, training records that judge settings, and the seed of the search."""
BEYOND = 4
"""How often the search goes beyond the learning rates that a method starts with."""

Split = tuple[Tensor, Tensor]
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Method:
    """A row of the table: a recipe, its own options, and the learning rates that are tried first, evenly spaced."""

    recipe: Callable[..., Recipe]
    rates: tuple[float, ...] = (4.0, 8.0, 16.0)
    options: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.5


SLOW = (0.4, 0.8, 1.6)
METHODS = {
    "dpsgd": Method(recipes.dpsgd),
    "dpsgd, momentum": Method(recipes.dpsgd, SLOW, {"momentum": 0.9}),
    "banded": Method(recipes.banded, options={"bands": 4}),
    "blockwise": Method(recipes.blockwise),
    "preconditioned": Method(recipes.preconditioned, (8.0, 16.0, 32.0)),
    "low_pass": Method(recipes.low_pass),
    "kalman": Method(recipes.kalman),
    "averaged": Method(recipes.averaged),
    "adam_bc": Method(recipes.adam_bc, (0.003, 0.01, 0.03)),
    "allocation": Method(recipes.allocation),
    "dpis": Method(recipes.dpis, options={"momentum": 0.0}),
    "dpsur": Method(recipes.dpsur, options={"momentum": 0.0}),
}
LINEAR = ("imdb", "names")
"""Tasks on which DP-SGD gains much by momentum: there the others have it too."""
WITH_MOMENTUM = {
    f"{name}, momentum": replace(
        METHODS[name],
        rates=tuple(rate / 10 for rate in METHODS[name].rates),
        options={**METHODS[name].options, "momentum": 0.9},
    )
    for name in ("banded", "blockwise", "preconditioned", "allocation", "dpis", "dpsur")
}
METHODS |= WITH_MOMENTUM
YARDSTICK = ("dpsgd", "dpsgd, momentum")
"""DP-SGD at its best is the better of these."""


@dataclass(frozen=True)
class Task:
    """Records to train on, to choose settings by and to measure on, and a way to build a network."""

    train: Split
    choose: Split
    test: Split
    build: Callable[[int], nn.Module]


def build_cnn(channels: int) -> nn.Module:
    """Two convolutions and a layer on images of half the size, from 28 or 32 pixels; 10,186 parameters on grey ones."""
    return nn.Sequential(
        *(nn.AvgPool2d(2), nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.Tanh()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 10)),
    )


@cache
def load_pictures(name: str) -> Task:
    """A dataset of images; its pixels in [0, 1]."""
    loaded = data.load(name)
    channels = loaded.test[0].shape[1]
    return divide(tensors(loaded.train_set), loaded.test, lambda seed: seeded(seed, lambda: build_cnn(channels)))


@cache
def load_features(name: str) -> Task:
    """The fixed features of the `linear` footing, and its linear layer."""
    case = catalogue()[name, "linear-dpsgd"].case(1.0)
    found = problem_of(case)
    shape = tuple(found.train[0].shape[1:])
    return divide(found.train, found.test, lambda seed: seeded(seed, lambda: model_of(case, shape)))


WORDS, LENGTH = 5_000, 256
"""Of the table of words, and tokens of a review that are read."""


class Bag(nn.Module):
    """Logistic regression on the words of a text: a row of numbers for each word, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, 2, padding_idx=0), nn.Parameter(torch.zeros(2))
        nn.init.zeros_(self.words.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.words(tokens).sum(1) / math.sqrt(LENGTH) + self.bias
        return scores


@cache
def load_words() -> Task:
    """Reviews as their most frequent words, by rank, as synthetic tokens are; Keras counted these on the records."""
    loaded = data.load("imdb", words=WORDS, length=LENGTH)
    return divide(tensors(loaded.train_set), loaded.test, lambda seed: seeded(seed, Bag))


def divide(train: Split, test: Split, build: Callable[[int], nn.Module]) -> Task:
    """Put the last training records aside."""
    kept = len(train[1]) - min(HELD_OUT, len(train[1]) // 5)
    return Task((train[0][:kept], train[1][:kept]), (train[0][kept:], train[1][kept:]), test, build)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A network that starts from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


TASKS: dict[str, Callable[[], Task]] = {
    "mnist": lambda: load_pictures("mnist"),
    "fashion-mnist": lambda: load_pictures("fashion-mnist"),
    "cifar10": lambda: load_pictures("cifar10"),
    "imdb": lambda: load_features("imdb"),
    "names": lambda: load_features("names"),
    "imdb, words": load_words,
}


def compute_losses(model: nn.Module, batch: Split) -> Tensor:
    """Cross-entropy of each example."""
    inputs = batch[0] if batch[0].dtype == torch.int64 else batch[0].float()
    return F.cross_entropy(model(inputs), batch[1], reduction="none")


@cache
def calibrate(method: str, epsilon: float, records: int) -> Recipe:
    """The recipe of a run but for its learning rate, on which the noise does not depend."""
    chosen = METHODS[method]
    recipe = chosen.recipe(batch_size=BATCH, steps=STEPS, clip=chosen.clip, **chosen.options)
    return recipe.calibrate(Budget(epsilon, DELTA), records=records)


def train(task: Task, method: str, rate: float, epsilon: float, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and what the run says of itself."""
    recipe = calibrate(method, epsilon, len(task.train[1]))
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=rate))
    model = task.build(seed)
    optimizer = recipe.optimizer.build(model.parameters())
    begun = time.process_time()
    private = Private(model, optimizer, task.train, compute_losses, recipe)
    for _ in private.steps():
        pass
    guarantee = private.guarantee()
    return model, {
        "epsilon_spent": guarantee.epsilon,
        "basis": guarantee.basis,
        "noise": recipe.noise_multiplier,
        "seconds": round(time.process_time() - begun, 2),
    }


# -- what is stored ----------------------------------------------------------------------------------------------------


def name_run(task: str, epsilon: float, method: str, rate: float, seed: int) -> str:
    """What a run is known by."""
    return f"{task}/eps{epsilon:g}/{method}/{rate:g}/seed{seed}"


@dataclass(frozen=True)
class Search:
    """The learning rate to try next, None at the end; and the best so far, None before all of the first are tried."""

    following: float | None
    best: float | None


def search(rows: dict[str, Row], task: str, epsilon: float, method: str) -> Search:
    """How far the search of a method is, judged on the records put aside.

    Rates are kept on the grid of the first ones: a step beyond is a factor of the last two.
    """
    rates = METHODS[method].rates
    scores: dict[float, float] = {}
    best: float | None = None
    for _ in range(BEYOND + 1):
        for rate in rates:
            if (row := rows.get(name_run(task, epsilon, method, rate, SEARCHED))) is None:
                return Search(rate, best)
            scores[rate] = row["accuracy"]
        best = max(scores, key=lambda rate: scores[rate])
        if best not in (rates[0], rates[-1]):
            break
        below, above = rates[0] * rates[0] / rates[1], rates[-1] * rates[-1] / rates[-2]
        rates = (round_rate(below), *rates) if best == rates[0] else (*rates, round_rate(above))
    return Search(None, best)


def round_rate(rate: float) -> float:
    """Two digits, which is what a run is named by."""
    return float(f"{rate:.2g}")


def list_methods(task: str) -> list[str]:
    """The rows of a task's table."""
    if task == "imdb, words":
        return [method for method in METHODS if method.startswith(("dpsgd", "preconditioned", "adam_bc"))]
    return [method for method in METHODS if task in LINEAR or method not in WITH_MOMENTUM]


def list_missing(
    rows: dict[str, Row],
    tasks: Sequence[str],
    epsilons: Sequence[float] = EPSILONS,
    methods: Sequence[str] | None = None,
) -> Iterator[tuple[str, float, str, float, int]]:
    """The next runs, column by column; those of the report wait for their search."""
    for epsilon in epsilons:
        for task in tasks:
            for method in (each for each in list_methods(task) if methods is None or each in methods):
                found = search(rows, task, epsilon, method)
                rate, seeds = (found.best, SEEDS) if found.following is None else (found.following, (SEARCHED,))
                assert rate is not None
                for seed in seeds:
                    if name_run(task, epsilon, method, rate, seed) not in rows:
                        yield task, epsilon, method, rate, seed


@app.command()
def run(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks, in order; all unless given.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="Columns, in order; all unless given.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Rows; all unless given.")] = None,
    minutes: Annotated[float, typer.Option(help="Processor time to spend at most.")] = 50.0,
    stored: Annotated[Path, typer.Option(help="Where results are kept.")] = STORED,
) -> None:
    """Take the runs that are missing, one after the other; each is stored when it ends."""
    torch.set_num_threads(1)
    begun = time.process_time()
    while (time.process_time() - begun) / 60 < minutes:
        rows = {row["label"]: row for row in read_lines(stored)}
        following = next(list_missing(rows, tasks or list(TASKS), epsilon or EPSILONS, method), None)
        if following is None:
            break
        name, target, chosen, rate, seed = following
        task = TASKS[name]()
        model, told = train(task, chosen, rate, target, seed)
        accuracy = measure_accuracy(model, task.choose if seed == SEARCHED else task.test)
        row = {"label": name_run(*following), "task": name, "epsilon": target, "method": chosen, "rate": rate}
        keep_lines(stored, {**row, "seed": seed, "accuracy": accuracy, **told})
        print(row["label"], f"{100 * accuracy:.2f}", f"{told['seconds']:.1f} s", flush=True)


# -- the table ---------------------------------------------------------------------------------------------------------


def collect(rows: dict[str, Row], task: str, epsilon: float, method: str) -> list[float]:
    """Test accuracies of the best settings so far, in per cent."""
    if (chosen := search(rows, task, epsilon, method).best) is None:
        return []
    found = (rows.get(name_run(task, epsilon, method, chosen, seed)) for seed in SEEDS)
    return [100 * row["accuracy"] for row in found if row is not None]


def judge(ours: list[float], theirs: list[float]) -> str:
    """A difference of means in words, where twice its standard error tells the two apart."""
    if len(ours) < 2 or len(theirs) < 2:
        return "too few runs"
    difference = statistics.mean(ours) - statistics.mean(theirs)
    error = sum(statistics.variance(each) / len(each) for each in (ours, theirs)) ** 0.5
    if abs(difference) <= 2 * error:
        return f"{difference:+.1f}, within the noise"
    return f"{difference:+.1f}, {'worth it' if difference > 0 else 'not worth it'}"


def tabulate(rows: dict[str, Row]) -> str:
    """A line for each method, a pair of columns for each ε: accuracy, and the difference to DP-SGD at its best."""
    tables = []
    for task in TASKS:
        best: dict[float, list[float]] = {}
        for epsilon in EPSILONS:
            found = [collect(rows, task, epsilon, method) for method in YARDSTICK]
            best[epsilon] = max((each for each in found if each), key=statistics.mean, default=[])
        lines = []
        for method in list_methods(task):
            cells = [method]
            for epsilon in EPSILONS:
                scores = collect(rows, task, epsilon, method)
                ended = search(rows, task, epsilon, method).following is None
                cells += [_show(scores, ended), _compare(scores, best[epsilon])]
            if any(cells[1:]):
                lines.append(cells)
        if lines:
            heads = ["method", *(head for e in EPSILONS for head in (f"ε = {e:g}", "against DP-SGD at its best"))]
            tables.append(f"**{task}**\n\n{write_markdown(heads, lines)}")
    return "\n".join(tables) or "No column is finished yet.\n"


def _show(scores: list[float], ended: bool) -> str:
    """Mean, deviation and number of seeds; a star where another learning rate should still be tried."""
    mark = "" if ended else " *"
    if len(scores) < 2:
        return f"{scores[0]:.1f} (1){mark}" if scores else ""
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f} ({len(scores)}){mark}"


def _compare(scores: list[float], best: list[float]) -> str:
    if not scores or not best:
        return ""
    return "the yardstick" if scores == best else judge(scores, best)


@app.command()
def write(stored: Annotated[Path, typer.Option(help="Where results are kept.")] = STORED) -> None:
    """Put the table into docs/which-method.md."""
    rows = {row["label"]: row for row in read_lines(stored)}
    if unproven := sorted(label for label, row in rows.items() if row["basis"] != "proven"):
        raise SystemExit(f"{unproven[0]} is not proven: it has no place in this table")
    put(CHOICE, tabulate(rows), by="benchmarks.worth")
    print(f"{len(rows)} runs, {sum(row['seconds'] for row in rows.values()) / 60:.0f} minutes of one core: {CHOICE}")


# -- what stretching is worth, and costs -------------------------------------------------------------------------------


@app.command()
def settings(name: str = "mnist", steps: int = 60, noise: float = 0.8) -> None:
    """How damping and balance of preconditioning matter: one seed each, on the records put aside; printed."""
    torch.set_num_threads(1)
    task = TASKS[name]()
    shared = {"batch_size": BATCH, "steps": steps, "noise_multiplier": noise, "clip": 0.5}
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
            model = task.build(SEARCHED)
            optimizer = recipe.optimizer.build(model.parameters())
            run = Private(model, optimizer, task.train, compute_losses, recipe, validate=False, seed=SEARCHED)
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
    put(PAGE, write_markdown(heads, lines), part=" cost", by="benchmarks.worth")


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
