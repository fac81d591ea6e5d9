"""docs/tuning.md in numbers: what a search costs, and whether it is worth it.

python -m benchmarks.tuning prices            # the table of prices, and docs/img/tuning.svg
python -m benchmarks.tuning run               # Adult and Default: tuned against defaults at the same total ε
python -m benchmarks.tuning features          # Fashion-MNIST: the same for a linear head on features, by DP-SGD
python -m benchmarks.tuning write             # both tables into docs/tuning.md

Results are in benchmarks/results/tuning.jsonl, one line for each run; what is there is not run again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
import typer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.tables.cases import CASES, Case, read
from sordino import Budget, Private, Recipe, recipes
from sordino.accounting import epsilon as price
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.gaussian import gaussian_epsilon
from sordino.accounting.selection import GEOMETRIC, expect_trials
from sordino.lab.data import load
from sordino.lab.features import scatter
from sordino.lab.features.synthetic import scale_to_unit
from sordino.searching import Candidate, Winner, log_uniform, tune
from sordino.searching.costs import find_precision
from sordino.searching.of_tables import plan_table_search, tune_table
from sordino.tables.table import Table
from sordino.tables.training import Wishes, prepare_table, train_table

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
ROOT = Path(__file__).parent
STORED = ROOT / "results" / "tuning.jsonl"
PAGE, FIGURE = ROOT.parent / "docs" / "tuning.md", ROOT.parent / "docs" / "img" / "tuning.svg"
DELTA = 1e-5
EPSILONS, TRIALS, SEEDS = (1.0, 3.0, 8.0), (3, 5, 10, 20, 50, 100), 3
MEASURED = EPSILONS
TESTED = 4_000
"""Images of the test part that are looked at."""
BEGIN, END = "<!-- written by python -m benchmarks.tuning write: {} -->", "<!-- end -->"
Row = dict[str, Any]


# -- prices -----------------------------------------------------------------------------------------------------------


def price_search(alone: float, trials: int, eta: float, accountant: str) -> float:
    """The ε of the best of so many trials, each of which is a Gaussian release of `alone` at δ."""
    noise = 1 / find_precision(Budget(alone, DELTA))
    return price([(expect_trials([(GaussianDpEvent(noise), 1)], trials, eta), 1)], DELTA, accountant)


def tabulate_prices() -> list[Row]:
    """For every ε of one trial and every E[K]: by profiles, by Rényi divergences, and by composition."""
    rows = []
    for alone, trials in product(EPSILONS, TRIALS):
        mu = find_precision(Budget(alone, DELTA))
        row = {"alone": alone, "trials": trials, "composition": gaussian_epsilon(mu * math.sqrt(trials), DELTA)}
        for name, eta in (("logarithmic", 0.0), ("geometric", 1.0)):
            row[name] = price_search(alone, trials, eta, "pld")
            row[f"{name}, Rényi"] = price_search(alone, trials, eta, "rdp")
        rows.append(row)
    return rows


@app.command()
def prices() -> None:
    """The figure: price against E[K]."""
    rows = tabulate_prices()
    mpl.rcParams.update({"svg.hashsalt": "sordino", "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(11, 3.6))
    styles = {"geometric": "-", "geometric, Rényi": "--", "logarithmic": "-.", "composition": ":"}
    for axis, alone in zip(axes, EPSILONS, strict=True):
        mine = [row for row in rows if row["alone"] == alone]
        for name, style in styles.items():
            axis.plot([row["trials"] for row in mine], [row[name] for row in mine], style, label=name, marker=".")
        axis.set(xscale="log", title=f"one trial: ε = {alone:g}", xlabel="E[K]", ylim=(0, 5 * alone))
    axes[0].set_ylabel("ε of the search")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})
    print(write_prices(rows))


def write_prices(rows: list[Row]) -> str:
    """The same numbers as a table."""
    names = ("logarithmic", "logarithmic, Rényi", "geometric", "geometric, Rényi", "composition")
    lines = ["| ε of one trial | E[K] | " + " | ".join(names) + " |", "|---:" * (len(names) + 2) + "|"]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {row['alone']:g} | {row['trials']} | {cells} |")
    return "\n".join(lines)


# -- is it worth it? --------------------------------------------------------------------------------------------------


def read_stored() -> list[Row]:
    """What was run before."""
    return [json.loads(line) for line in STORED.read_text().splitlines()] if STORED.exists() else []


def choose_seeds(only: int | None) -> Iterable[int]:
    """All of them, or the only one that is wanted now."""
    return range(SEEDS) if only is None else [only]


def keep(row: Row) -> None:
    """Write it down at once, and say it."""
    with STORED.open("a") as file:
        file.write(json.dumps(row, sort_keys=True) + "\n")
    print(row, flush=True)


@app.command()
def run(trials: float = 5.0, eta: float = GEOMETRIC, only: int | None = None) -> None:
    """Adult and Default: settings that were searched against the defaults, at the same total ε."""
    done = {(row["data"], row["epsilon"], row["seed"], row["way"]) for row in read_stored()}
    cases = [case for case in CASES if case.name in ("adult", "default")]
    for seed, case, epsilon, way in product(choose_seeds(only), cases, MEASURED, ("defaults", "tuned")):
        if (case.name, epsilon, seed, way) not in done:
            found, settings = learn_table(case, epsilon, trials if way == "tuned" else None, eta)
            keep({"data": case.name, "epsilon": epsilon, "seed": seed, "way": way, **found, "settings": settings})


def learn_table(case: Case, epsilon: float, trials: float | None, eta: float) -> tuple[Row, Row]:
    """AUC and accuracy on the test part; a search holds out a fifth of the training records, the defaults none."""
    parts = read(case)
    table = Table(case.name, {name: list(parts.train[name]) for name in parts.train.columns})
    test = Table(case.name, {name: list(parts.test[name]) for name in parts.test.columns})
    wishes = Wishes(case.target, epsilon, delta=parts.delta, held_out=0.0 if trials is None else 0.2)
    ready = prepare_table(table, wishes)
    settings: Row = {}
    if trials is None:
        fitted = train_table(ready)
    else:
        fitted, winner = tune_table(plan_table_search(ready, expected_trials=trials, eta=eta))
        settings = {name: round(float(value), 4) for name, value in winner.settings.items()}
    learned = fitted.learned
    chances = learned.predict_proba(test)[:, learned.encoder.classes.index(case.positive)]
    labels = parts.labels(parts.test)
    accuracy = float(((chances > 0.5) == labels).mean())
    return {"auc": round(float(roc_auc_score(labels, chances)), 4), "accuracy": round(accuracy, 4)}, settings


@app.command()
def features(
    trials: float = 10.0, eta: float = GEOMETRIC, records: int = 8_000, epochs: int = 10, only: int | None = None
) -> None:
    """Fashion-MNIST: a linear head by DP-SGD whose rate and bound are searched, or as they come."""
    images = ImageProblem.load(records)
    done = {(row["data"], row["epsilon"], row["seed"], row["way"]) for row in read_stored()}
    common: dict[str, Any] = {"batch_size": 256, "epochs": epochs}
    ways = {"defaults": recipes.dpsgd(**common), "no rate": recipes.rate_free(**common)}
    for seed, epsilon, way in product(choose_seeds(only), MEASURED, (*ways, "tuned")):
        if (images.name, epsilon, seed, way) in done:
            continue
        budget, settings = Budget(epsilon, DELTA), dict[str, Any]()
        if way in ways:
            weights = images.train(ways[way].calibrate(budget, records=records), records).state_dict()["model"]
        else:
            won = images.search(recipes.dpsgd(**common), budget, trials, eta)
            weights = won.model
            settings = {name: round(float(value), 4) for name, value in won.settings.items()}
        accuracy = images.measure(weights)
        row = {"data": images.name, "epsilon": epsilon, "seed": seed, "way": way, "accuracy": round(accuracy, 4)}
        keep({**row, "settings": settings})


@dataclass(frozen=True, eq=False)
class ImageProblem:
    """Scattering features of Fashion-MNIST, of norm 1: made once, for all trials."""

    inputs: Tensor
    classes: Tensor
    test_inputs: Tensor
    test_classes: Tensor
    name = "fashion-mnist"

    @classmethod
    def load(cls, records: int) -> ImageProblem:
        data = load("fashion-mnist")
        first = [data.train_set[place] for place in range(records)]
        images = torch.stack([record[0] for record in first]).float()
        classes = torch.tensor([int(record[1]) for record in first])
        inputs = scale_to_unit(scatter(images, groups=27, quiet=True).flatten(1))
        seen, answers = data.test[0][:TESTED].float(), data.test[1][:TESTED]
        return cls(inputs, classes, scale_to_unit(scatter(seen, groups=27, quiet=True).flatten(1)), answers)

    @property
    def kept(self) -> int:
        """Records that a trial trains on; it is scored on the others."""
        return len(self.classes) * 4 // 5

    def build(self) -> nn.Linear:
        return nn.Linear(self.inputs.shape[1], 10)

    def train(self, recipe: Recipe, used: int) -> Private:
        model = self.build()
        private = Private(
            *(model, recipe.optimizer.build(model.parameters())),
            TensorDataset(self.inputs[:used], self.classes[:used]),
            lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
            recipe,
        )
        for _ in private.steps():
            pass
        return private

    def search(self, like: Recipe, budget: Budget, trials: float, eta: float) -> Winner:
        def objective(trial: Candidate) -> Private:
            wanted = replace(like, clip=trial["clip"], optimizer=replace(like.optimizer, lr=trial["lr"]))
            private = self.train(trial.calibrate(wanted), self.kept)
            with torch.no_grad():
                found = private.bench.objective.model(self.inputs[self.kept :])
            trial.score(found.argmax(1) == self.classes[self.kept :])
            return private

        space = {"lr": log_uniform(0.1, 30), "clip": log_uniform(0.1, 3)}
        return tune(objective, space, budget, expected_trials=trials, eta=eta, like=like, records=self.kept)

    def measure(self, weights: dict[str, Tensor]) -> float:
        model = self.build()
        model.load_state_dict(weights)
        with torch.no_grad():
            return float((model(self.test_inputs).argmax(1) == self.test_classes).double().mean())


def write_comparison(rows: list[Row]) -> str:
    """Means over the seeds, and the largest distance from them."""
    found: dict[tuple[str, float, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for figure in ("auc", "accuracy"):
            if figure in row:
                found[row["data"], row["epsilon"], figure][row["way"]].append(row[figure])
    lines = [
        "| data | total ε | figure | runs | defaults | tuned | no rate to choose |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for (data, epsilon, figure), ways in sorted(found.items()):
        cells = [_spread(ways.get(way, [])) for way in ("defaults", "tuned", "no rate")]
        runs = min(map(len, ways.values()))
        lines.append(f"| {data} | {epsilon:g} | {figure} | {runs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {max(abs(np.array(values) - mean)):.3f}"


@app.command()
def write() -> None:
    """Put both tables into the page."""
    text = PAGE.read_text()
    for name, table in (("prices", write_prices(tabulate_prices())), ("comparison", write_comparison(read_stored()))):
        begin = BEGIN.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        text = f"{before}{begin}\n{table}\n{END}{after}"
    PAGE.write_text(text)


if __name__ == "__main__":
    app()
