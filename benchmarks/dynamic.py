"""Dynamic DP-SGD: what schedules cost, and what they are worth at equal *proven* ε.

python -m benchmarks.dynamic bounds             # ε of the paper's settings by every accountant, as Markdown
python -m benchmarks.dynamic timing             # how long calibration takes
python -m benchmarks.dynamic figures            # figures 2 and 4, docs/mechanisms/img/dynamic_*.svg
python -m benchmarks.dynamic train --dataset mnist --epsilon 0.4 --epsilon 1.2 --seeds 3
python -m benchmarks.dynamic grid --dataset mnist --epsilon 0.4      # the small grid over both ratios, one seed
python -m benchmarks.dynamic table              # what is finished, as Markdown

A run that was killed goes on at its last whole epoch, and finished ones are skipped. Ledgers, checkpoints and the
results (results.jsonl, one line per finished run) are in the folder --runs, outside the repository.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from sordino import Budget, Recipe, experiments, recipes
from sordino.accounting import epsilon

app = typer.Typer(add_completion=False)
IMAGES = Path(__file__).parent.parent / "docs" / "mechanisms" / "img"
RECORDS, DELTA, STEPS = 60_000, 1 / 600_000, 5_000
BATCH, EPOCHS, CLIP, LR = 256, 20, 1.5, 0.15
METHODS = ("static", "growing_mu", "sensitivity_decay", "dynamic")
ASKED = ("gdp", "pld", "rdp", "zcdp", "zcdp-epoch", "tcdp")
RATIOS = (1.0, 2.0, 10 / 3, 10.0)
MU_RATIO, CLIP_RATIO = 1.25, 10 / 3  # of the authors' script at ε = 0.4

Runs = Annotated[Path, typer.Option(help="where ledgers, checkpoints and results are kept")]
Dataset = Annotated[str, typer.Option(help="mnist or fashion-mnist")]


@dataclass(frozen=True)
class Case:
    """One run."""

    dataset: str
    method: str
    epsilon: float
    seed: int
    mu_ratio: float = 1.0
    clip_ratio: float = 1.0

    @property
    def label(self) -> str:
        ratios = f"mu{self.mu_ratio:.3g}-clip{self.clip_ratio:.3g}"
        return f"{self.dataset}-{self.method}-eps{self.epsilon:g}-{ratios}-seed{self.seed}"

    def experiment(self, epochs: float, records: int | None) -> experiments.Case:
        """The paper's settings, calibrated by PLD; δ = 1/(10 N) as in the paper."""
        ratios = {"mu_ratio": self.mu_ratio, "clip_ratio": self.clip_ratio}
        return experiments.Case(
            dataset=self.dataset,
            method=self.method,
            epsilon=self.epsilon,
            seed=self.seed,
            delta=0.1 / (records or RECORDS),
            records=records,
            data={"normalise": "dataset"},  # as the authors do
            model={"name": "mnist-cnn", "activation": "relu", "padding": 3},
            optimizer={"kind": "sgd", "lr": LR},
            recipe={"name": "dynamic", "batch_size": BATCH, "epochs": epochs, "clip": CLIP, **ratios},
        )


def case_of(dataset: str, method: str, target: float, seed: int, mu_ratio: float, clip_ratio: float) -> Case:
    """The method's own ratios; a method without one of them has ratio 1."""
    growing, decaying = method in ("growing_mu", "dynamic"), method in ("sensitivity_decay", "dynamic")
    return Case(dataset, method, target, seed, mu_ratio if growing else 1.0, clip_ratio if decaying else 1.0)


def run(case: Case, runs: Path, epochs: float = EPOCHS, records: int | None = None) -> None:
    """Train or go on training; the result is appended at the end, unless the run is shortened."""
    if any(result["label"] == case.label for result in finished(runs)):
        return

    def report(step: int, steps: int, reached: float) -> None:
        print(case.label, f"step {step} of {steps}: {reached:.4f}", flush=True)

    row = experiments.run(case.experiment(epochs, records), runs, report)
    if epochs == EPOCHS and records is None:
        curve = [round(point["accuracy"], 4) for point in row["curve"]]
        extra = {"seconds": row["seconds"], "curve": curve, "noise": row["noise"][0], "guarantee": row["guarantee"]}
        with (runs / "results.jsonl").open("a") as results:
            results.write(json.dumps({"label": case.label, **asdict(case), **extra}) + "\n")


def finished(runs: Path) -> Iterator[dict[str, Any]]:
    """The results so far."""
    path = runs / "results.jsonl"
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


@app.command()
def train(
    dataset: Dataset = "mnist",
    epsilon: Annotated[list[float] | None, typer.Option(help="may be repeated")] = None,
    method: Annotated[list[str] | None, typer.Option(help="may be repeated; all four unless given")] = None,
    seeds: int = 3,
    mu_ratio: float = MU_RATIO,
    clip_ratio: float = CLIP_RATIO,
    runs: Runs = Path("runs/dynamic"),
    epochs: float = EPOCHS,
    records: int | None = None,
) -> None:
    """The paper's table 1 at equal proven ε: every method with every ε and seed."""
    runs.mkdir(parents=True, exist_ok=True)
    for seed, target, name in product(range(seeds), epsilon or [0.4, 0.6, 1.2], method or METHODS):
        run(case_of(dataset, name, target, seed, mu_ratio, clip_ratio), runs, epochs, records)


@app.command()
def grid(dataset: Dataset = "mnist", epsilon: float = 0.4, runs: Runs = Path("runs/dynamic")) -> None:
    """The authors' grid over both ratios. Its own cost in privacy is not part of any ε printed here."""
    runs.mkdir(parents=True, exist_ok=True)
    for mu, clip in product((0.2, 0.4, 0.6, 0.8), (0.1, 0.3, 0.5, 0.7)):
        run(Case(dataset, "grid", epsilon, 0, 1 / mu, 1 / clip), runs)


@app.command()
def table(runs: Runs = Path("runs/dynamic")) -> None:
    """Mean and spread over the seeds of everything finished."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for result in finished(runs):
        key = tuple(result[name] for name in ("dataset", "epsilon", "method", "mu_ratio", "clip_ratio"))
        found[key].append(100 * result["curve"][-1])
    print("| dataset | ε | method | ρ_μ | ρ_c | accuracy | seeds |\n|---|---|---|---|---|---|---|")
    for (dataset, target, method, mu, clip), scores in sorted(found.items()):
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        mean = statistics.mean(scores)
        print(f"| {dataset} | {target:g} | {method} | {mu:.3g} | {clip:.3g} | {mean:.2f}{spread} | {len(scores)} |")


# -- accounting ------------------------------------------------------------------------------------------------------


def planned(ratio: float, target: float, accountant: str) -> Recipe:
    """Growing μ over T = 5,000 steps, calibrated by one accountant."""
    recipe = recipes.growing_mu(ratio=ratio, batch_size=BATCH, steps=STEPS)
    return recipe.calibrate(Budget(target, DELTA, accountant=accountant), records=RECORDS)


@app.command()
def bounds() -> None:
    """The paper calibrates by the limit theorem: what that really costs."""
    print(f"| claimed ε | ρ_μ | μ_0 | {' | '.join(ASKED)} | μ_0, proven |\n|{'---|' * (len(ASKED) + 4)}")
    for target, ratio in product((0.4, 0.6, 1.2, 2.0), RATIOS):
        recipe = planned(ratio, target, "gdp")
        prices = " | ".join(f"{epsilon(recipe.plan(), DELTA, name):.3g}" for name in ASKED)
        first, sound = (1 / (found.noise_multiplier or 0) for found in (recipe, planned(ratio, target, "pld")))
        print(f"| {target:g} | {ratio:.3g} | {first:.4f} | {prices} | {sound:.4f} |", flush=True)


@app.command()
def timing() -> None:
    """Processor seconds of one calibration; the first has to build its distributions."""
    print("| T | ρ_μ | ε | seconds |\n|---|---|---|---|")
    for steps, ratio, target in ((5_000, 2.0, 1.2), (5_000, 10.0, 1.2), (100_000, 10.0, 1.2)):
        started = time.process_time()
        recipe = recipes.growing_mu(ratio=ratio, batch_size=BATCH, steps=steps)
        found = recipe.calibrate(Budget(target, DELTA), records=RECORDS)
        seconds = time.process_time() - started
        print(f"| {steps:,} | {ratio:g} | {found.price(DELTA):.4f} | {seconds:.1f} |", flush=True)


def spent(recipe: Recipe, accountant: str, points: int = 10) -> tuple[list[int], list[float]]:
    """ε of the first steps of a plan."""
    plan = recipe.plan()
    events = [event for event, count in plan for _ in range(count)]
    steps = [STEPS * point // points for point in range(1, points + 1)]
    return [0, *steps], [0.0, *(epsilon([(e, 1) for e in events[:n]], DELTA, accountant) for n in steps)]


@app.command()
def figures() -> None:
    """Figure 2: the budget spent against steps for several ratios. Figure 4: the bounds on it."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "sordino", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for ratio in RATIOS:
        axes.plot(*spent(planned(ratio, 1.2, "pld"), "pld"), label=f"ρ_μ = {ratio:.3g}", marker=".")
    axes.set(xlabel="step", ylabel="ε spent (PLD, proven)", title="ε = 1.2 after 5,000 steps, whatever the ratio")
    axes.legend()
    figure.savefig(IMAGES / "dynamic_spent.svg", metadata={"Date": None})
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for axes, (ratio, target) in zip(panels, ((10 / 3, 0.4), (10 / 3, 1.2), (10.0, 1.2)), strict=True):
        recipe = planned(ratio, target, "gdp")
        for name, label in (("rdp", "RDP (proven)"), ("pld", "PLD (proven, tight)"), ("gdp", "CLT (no bound)")):
            axes.plot(*spent(recipe, name), label=label, linestyle="--" if name == "gdp" else "-", marker=".")
        axes.set(xlabel="step", ylabel="ε", title=f"claimed ε = {target:g}, ρ_μ = {ratio:.3g}")
    panels[0].legend()
    figure.savefig(IMAGES / "dynamic_bounds.svg", metadata={"Date": None})


if __name__ == "__main__":
    app()
