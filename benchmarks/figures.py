"""Figures of docs/mechanisms without large data: `python -m benchmarks.figures noise`, `dpis`, `jl` or `selection`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import Budget, Private, Recipe, recipes
from sordino.lab.data import load
from sordino.lab.experiments.results import read_lines
from sordino.lab.networks import build

IMAGES = Path(__file__).parent.parent / "docs" / "mechanisms" / "img"
RESULTS = Path(__file__).parent / "results" / "selection"
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
BATCH_SIZES = (256, 1024, 4096)
PROJECTIONS = (8, 12, 24, 50, 100)

app = typer.Typer(add_completion=False, help=__doc__)


def noises(batch_size: int) -> list[float]:
    """The calibrated noise multiplier of DP-SGD at every ε: N = 60,000, 20 epochs."""
    recipe = recipes.dpsgd(batch_size=batch_size, epochs=20)
    found = (recipe.calibrate(Budget(epsilon, 1e-5), records=60_000).noise_multiplier for epsilon in EPSILONS)
    return [noise for noise in found if noise is not None]


@app.command()
def noise() -> None:
    """σ by ε, and the noise that is left per record of a draw."""
    figure, (on_sum, per_record) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for batch_size in BATCH_SIZES:
        found = noises(batch_size)
        print(f"B={batch_size}: " + ", ".join(f"ε={e:g}: {n:.3f}" for e, n in zip(EPSILONS, found, strict=True)))
        on_sum.plot(EPSILONS, found, marker=".", label=f"B = {batch_size:,}")
        per_record.plot(EPSILONS, [noise / batch_size for noise in found], marker=".")
    on_sum.set(xlabel="ε", ylabel="noise multiplier σ", xscale="log", yscale="log")
    per_record.set(xlabel="ε", ylabel="noise per record σ / B", xscale="log", yscale="log")
    for axis in (on_sum, per_record):
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
    on_sum.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    per_record.set_yticks([0.0003, 0.001, 0.003, 0.01], ["0.0003", "0.001", "0.003", "0.01"])
    on_sum.legend()
    save(figure, "plain_noise")


@app.command()
def dpis(epsilon: float = 3.0, epochs: int = 30) -> None:
    """One run of DPIS on scikit-learn's digits for each clipping bound: K̃/(Ñ·C) and σ_G over DP-SGD's, by epoch."""
    figure, (share, level) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for clip in (0.5, 2.0, 8.0):
        kappas, noises = _dpis_run(clip, epsilon, epochs)
        print(f"C={clip:g}: last K/(NC) {kappas[-1]:.2f}, last noise {noises[-1]:.2f} of DP-SGD's")
        share.plot(range(1, len(kappas) + 1), kappas, label=f"C = {clip:g}")
        level.plot(range(1, len(noises) + 1), noises)
    share.set(xlabel="epoch", ylabel="K̃ / (Ñ·C)", ylim=(0, 1.05))
    level.set(xlabel="epoch", ylabel="noise over DP-SGD's", ylim=(0, None))
    level.axhline(1.0, color="grey", linewidth=0.8)
    share.legend()
    save(figure, "dpis_digits")


def _dpis_run(clip: float, epsilon: float, epochs: int) -> tuple[list[float], list[float]]:
    """By epoch: the mean clipped norm over C, and σ_G over the σ of DP-SGD by PLD."""
    torch.manual_seed(0)
    train, budget = load("digits").train, Budget(epsilon, 1e-5)
    records = len(train[1])
    recipe = recipes.dpis(batch_size=128, epochs=epochs, clip=clip).calibrate(budget, records=records)
    base = recipes.dpsgd(batch_size=128, epochs=epochs).calibrate(budget, records=records).noise_multiplier
    model = build("digits-mlp")
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.5 / clip), train, _losses, recipe)
    seen: dict[int, tuple[float, float]] = {}
    for _ in private.steps():
        epoch = private.bench.memory["released"]
        kappa = epoch["total"] / (epoch["records"] * epoch["clip"])
        seen[epoch["number"]] = (kappa, private.bench.memory["noise"] / base)
    kappas, noises = zip(*seen.values(), strict=True)
    return list(kappas), list(noises)


@app.command()
def jl(epsilon: float = 3.0, epochs: int = 15, seeds: int = 5) -> None:
    """Runs on scikit-learn's digits with r projections beside exact norms: the noise that ε buys, and accuracy."""
    figure, (level, score) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    exact = recipes.dpsgd(batch_size=128, epochs=epochs)
    estimated = {r: recipes.jl(batch_size=128, epochs=epochs, projections=r) for r in PROJECTIONS}
    plain, base = _digits_runs(exact, epsilon, seeds)
    for r, recipe in estimated.items():
        found, noise = _digits_runs(recipe, epsilon, seeds)
        print(f"r={r}: noise {noise:.3f} ({base:.3f}), accuracy {sum(found) / seeds:.2f} % ({sum(plain) / seeds:.2f})")
        level.plot([r], [noise / base], "o", color="C0")
        score.plot([r] * seeds, found, ".", color="C0", label="r projections" if r == PROJECTIONS[0] else None)
    for place, value in enumerate(plain):
        score.axhline(value, color="C1", linewidth=0.8, label=None if place else "exact norms")
    level.axhline(1.0, color="grey", linewidth=0.8)
    level.set(xlabel="projections r", ylabel="noise over that of exact norms", xscale="log", ylim=(0.9, None))
    score.set(xlabel="projections r", ylabel="held-out accuracy (%), each seed", xscale="log")
    for axis in (level, score):
        axis.set_xticks(PROJECTIONS, [str(r) for r in PROJECTIONS])
        axis.minorticks_off()
    score.legend(fontsize="small")
    save(figure, "jl_digits")


def _digits_runs(recipe: Recipe, epsilon: float, seeds: int) -> tuple[list[float], float]:
    """Held-out accuracies (%) of whole runs at this ε, and the noise multiplier they used."""
    digits, accuracies = load("digits"), []
    ready = recipe.calibrate(Budget(epsilon, 1e-5), records=len(digits.train[1]))
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = build("digits-mlp")
        private = Private(model, torch.optim.SGD(model.parameters(), lr=1.0), digits.train, _losses, ready, seed=seed)
        for _ in private.steps():
            pass
        x, y = digits.test
        accuracies.append(100 * float((model(x).argmax(1) == y).float().mean()))
    assert ready.noise_multiplier is not None
    return accuracies, ready.noise_multiplier


def _losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


@app.command()
def selection() -> None:
    """Held-out accuracy of every finished run on digits, by method, from benchmarks/results/selection."""
    groups: dict[tuple[float, str], list[float]] = defaultdict(list)
    for result in read_lines(RESULTS / "digits.jsonl"):
        groups[result["target"], result["method"]].append(100 * result["accuracy"])
    methods = sorted({method for _, method in groups}, key=lambda method: sum(groups[3, method]))
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for epsilon, shift in ((1, -0.12), (3, 0.12)):
        points = [(value, place + shift) for place, method in enumerate(methods) for value in groups[epsilon, method]]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, label=f"ε = {epsilon}")
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlabel="held-out accuracy (%), one point per seed")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend()
    save(figure, "selection_digits")


def save(figure: Figure, name: str) -> None:
    """docs/mechanisms/img/<name>.svg, the same bytes every time."""
    mpl.rcParams["svg.hashsalt"] = "sordino"
    file = IMAGES / f"{name}.svg"
    figure.savefig(file, metadata={"Date": None})
    print(f"wrote {file}")


if __name__ == "__main__":
    app()
