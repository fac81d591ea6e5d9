"""Figures of docs/mechanisms: python -m benchmarks.figures NAME

noise        σ by ε, and the noise that is left per record of a draw
dpis, jl     small runs on scikit-learn's digits
dynamic      ε spent against steps, and the bounds on it (figures 2 and 4 of Dynamic DP-SGD)
footing      the stored runs on one footing
selection    the stored runs of methods that reject, on digits
allocated    the noise of random allocation over that of Poisson draws
bands        the noise in models under correlated noise over DP-SGD's, by the number of bands
gains        the noise that filters of gradients leave
blocks       how long the layers of single gradients are
directions   in how many directions gradients are long, as they are and stretched
importance   σ_G by epoch over DP-SGD's, from stored runs (figure 1 of DPIS)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.mechanisms import EPSILONS as PAGE_EPSILONS
from benchmarks.mechanisms import footing_of, group_pairs, group_selective, mechanism, where
from benchmarks.prices import DELTA, RATIOS, STEPS, plan_growing
from benchmarks.results import STORED
from sordino import Budget, Private, Recipe, recipes
from sordino.accounting import epsilon as price
from sordino.gradients import Batch, BookKeeping, Objective
from sordino.lab.data import load
from sordino.lab.experiments import read_all
from sordino.lab.experiments.results import Row
from sordino.lab.networks import build
from sordino.mechanisms import banded
from sordino.mechanisms.blockwise import sort_names
from sordino.mechanisms.kalman import Kalman
from sordino.mechanisms.low_pass import LowPass
from sordino.mechanisms.preconditioned import Probed
from sordino.parts import Exact

IMAGES = Path(__file__).parent.parent / "docs" / "mechanisms" / "img"
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
BATCH_SIZES = (256, 1024, 4096)
PROJECTIONS = (8, 12, 24, 50, 100)
SELECTIVE = ("dpsgd", "screening", "dpsur", "dpsur-reuse")
SCHEDULED = ("dpsgd", "decay", "dynamic")
PLAIN = ("dpsgd", "auto-s")
ACROSS = 3
"""Panels beside each other."""

app = typer.Typer(add_completion=False, help=__doc__)


def calibrate_noises(batch_size: int) -> list[float]:
    """The calibrated noise multiplier of DP-SGD at every ε: N = 60,000, 20 epochs."""
    recipe = recipes.dpsgd(batch_size=batch_size, epochs=20)
    found = (recipe.calibrate(Budget(epsilon, 1e-5), records=60_000).noise_multiplier for epsilon in EPSILONS)
    return [noise for noise in found if noise is not None]


@app.command()
def noise() -> None:
    """σ by ε, and the noise that is left per record of a draw."""
    figure, (on_sum, per_record) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for batch_size in BATCH_SIZES:
        found = calibrate_noises(batch_size)
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
def bands() -> None:
    """The root mean square noise in the models of a run over that of DP-SGD at the same ε: N = 60,000."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, (batch_size, epochs) in zip(axes, ((256, 10), (1024, 10), (4096, 20)), strict=True):
        counts = [b for b in (1, 2, 4, 8, 14, 28) if b * batch_size <= 60_000]
        for epsilon in (1.0, 3.0, 8.0):
            noises = [_measure_bands(b, epsilon, batch_size, epochs) for b in counts]
            ratios = [noise / noises[0] for noise in noises]
            print(
                f"B={batch_size}, E={epochs}, ε={epsilon:g}: "
                + ", ".join(f"{b}: {r:.3f}" for b, r in zip(counts, ratios, strict=True))
            )
            axis.plot(counts, ratios, marker=".", label=f"ε = {epsilon:g}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xlabel="bands", title=f"B = {batch_size:,}, {epochs} epochs", xscale="log", ylim=(0, None))
        axis.set_xticks(counts, [f"{b}" for b in counts])
        axis.minorticks_off()
    axes[0].set(ylabel="noise over DP-SGD's")
    axes[-1].legend()
    save(figure, "banded_noise")


def _measure_bands(count: int, epsilon: float, batch_size: int, epochs: int) -> float:
    recipe = recipes.banded(bands=count, batch_size=batch_size, epochs=epochs)
    ready = recipe.calibrate(Budget(epsilon, 1e-5), records=60_000)
    assert ready.noise_multiplier is not None
    assert ready.steps is not None
    best = banded.optimise(count, ready.steps)
    return ready.noise_multiplier * math.sqrt(banded.measure_error(best, ready.steps)[0] * float(best @ best))


@app.command()
def allocated() -> None:
    """The noise of random allocation over that of Poisson draws at the same ε: N = 60,000."""
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    epsilons = (1.0, 3.0, 8.0)
    for batch_size, epochs in ((256, 1), (256, 10), (1024, 1), (1024, 10), (6000, 10)):
        ratios = []
        for epsilon in epsilons:
            budget = Budget(epsilon, 1e-5)
            dealt, drawn = (
                make(batch_size=batch_size, epochs=epochs).calibrate(budget, records=60_000).noise_multiplier
                for make in (recipes.allocation, recipes.dpsgd)
            )
            assert dealt is not None
            assert drawn is not None
            ratios.append(dealt / drawn)
        print(f"B={batch_size}, E={epochs}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios))
        axis.plot(epsilons, ratios, marker=".", label=f"B = {batch_size:,}, {epochs} epochs")
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set(xlabel="ε", ylabel="noise over that of Poisson draws", xscale="log")
    axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axis.minorticks_off()
    axis.legend()
    save(figure, "allocation_noise")


@app.command()
def gains() -> None:
    """The deviation of the noise that filters leave in a gradient, by the number of steps behind it."""
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    parameter = nn.Parameter(torch.zeros(1))
    steps = range(30)
    for beta in (0.5, 0.9, 0.98):
        low = LowPass(torch.optim.SGD([parameter], lr=1.0), (1 - beta,), (-beta,))
        axis.plot(steps, [low.gain(step) for step in steps], label=f"low pass, β = {beta:g}")
    for kappa in (0.3, 0.7):
        tracked = Kalman(torch.optim.SGD([parameter], lr=1.0), kappa)
        axis.plot(steps, [tracked.gain(step) for step in steps], linestyle="--", label=f"Kalman, κ = {kappa:g}")
    axis.set(xlabel="step", ylabel="noise left, over that released", ylim=(0, 1.05))
    axis.legend()
    save(figure, "proposals_gain")


@app.command()
def blocks(records: int = 256) -> None:
    """How long the layers of single gradients are on scikit-learn's digits, before any training."""
    torch.manual_seed(0)
    inputs, classes = (column[:records] for column in load("digits").train)
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 10)),
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    batch = Batch((inputs.flatten(1), classes), len(classes), lambda i: (inputs[i : i + 1], classes[i : i + 1]))
    found = BookKeeping().differentiate_blocks(
        Objective(model, _losses), list(parameters), batch, sort_names(names, "layer")
    )
    norms = found.block_norms.numpy()
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    labels = ["convolution 1", "convolution 2", "linear 1", "linear 2"]
    axis.boxplot(list(norms), whis=(5, 95), showfliers=False, tick_labels=labels)
    axis.set(ylabel="norm of a record's gradient", yscale="log")
    print(
        ", ".join(f"{label}: {float(sorted(row)[len(row) // 2]):.3f}" for label, row in zip(labels, norms, strict=True))
    )
    save(figure, "blockwise_norms")


@app.command()
def directions(records: int = 400) -> None:
    """Over how many directions the squared length of gradients is spread on scikit-learn's digits, before training."""
    inputs, classes = (column[:records] for column in load("digits").train)
    torch.manual_seed(0)
    model = build("digits-cnn")
    inputs = inputs.reshape(-1, 1, 8, 8)
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for damping in (None, 1.0, 0.1, 0.01):
        norms = Exact() if damping is None else Probed(damping=damping)
        recipe = replace(recipes.dpsgd(batch_size=64, steps=1, noise_multiplier=1.0), norms=norms).for_records(records)
        run = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, classes), _losses, recipe)
        norms.survey(run.bench, 0)
        rows = [
            torch.stack(each)
            for each in zip(*(_differentiate(model, inputs[i], classes[i]) for i in range(records)), strict=True)
        ]
        if damping is not None:
            rows = run.bench.engine.stretches.apply(rows)  # type: ignore[attr-defined]
        lengths = torch.linalg.svdvals(torch.cat([each.flatten(1) for each in rows], 1).double()).square()
        share = (lengths.cumsum(0) / lengths.sum()).tolist()
        label = "as they are" if damping is None else f"stretched, damping {damping:g}"
        axis.plot(range(1, len(share) + 1), share, label=label)
        print(f"{label}: half of the length in {sum(each < 0.5 for each in share) + 1} directions")
    axis.set(xlabel="directions", ylabel="share of squared length", xscale="log")
    axis.legend()
    save(figure, "preconditioned_directions")


def _differentiate(model: nn.Module, inputs: Tensor, target: Tensor) -> list[Tensor]:
    loss = _losses(model, (inputs.unsqueeze(0), target.unsqueeze(0))).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@app.command()
def dpis(epsilon: float = 3.0, epochs: int = 30) -> None:
    """One run of DPIS on scikit-learn's digits for each clipping bound: K̃/(Ñ·C) and σ_G over DP-SGD's, by epoch."""
    figure, (share, level) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for clip in (0.5, 2.0, 8.0):
        kappas, noises = _run_dpis(clip, epsilon, epochs)
        print(f"C={clip:g}: last K/(NC) {kappas[-1]:.2f}, last noise {noises[-1]:.2f} of DP-SGD's")
        share.plot(range(1, len(kappas) + 1), kappas, label=f"C = {clip:g}")
        level.plot(range(1, len(noises) + 1), noises)
    share.set(xlabel="epoch", ylabel="K̃ / (Ñ·C)", ylim=(0, 1.05))
    level.set(xlabel="epoch", ylabel="noise over DP-SGD's", ylim=(0, None))
    level.axhline(1.0, color="grey", linewidth=0.8)
    share.legend()
    save(figure, "dpis_digits")


def _run_dpis(clip: float, epsilon: float, epochs: int) -> tuple[list[float], list[float]]:
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
        epoch = private.bench.states.save()
        kappa = epoch["total"] / (epoch["records"] * epoch["clip"])
        seen[epoch["number"]] = (kappa, private.bench.states.sampler.noise / base)
    kappas, noises = zip(*seen.values(), strict=True)
    return list(kappas), list(noises)


@app.command()
def jl(epsilon: float = 3.0, epochs: int = 15, seeds: int = 5) -> None:
    """Runs on scikit-learn's digits with r projections beside exact norms: the noise that ε buys, and accuracy."""
    figure, (level, score) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    exact = recipes.dpsgd(batch_size=128, epochs=epochs)
    estimated = {r: recipes.jl(batch_size=128, epochs=epochs, projections=r) for r in PROJECTIONS}
    plain, base = _run_digits(exact, epsilon, seeds)
    for r, recipe in estimated.items():
        found, noise = _run_digits(recipe, epsilon, seeds)
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


def _run_digits(recipe: Recipe, epsilon: float, seeds: int) -> tuple[list[float], float]:
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
def dynamic() -> None:
    """Figure 2 of Dynamic DP-SGD: the budget spent against steps for several ratios. Figure 4: the bounds on it."""
    mpl.rcParams.update({"svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3})
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for ratio in RATIOS:
        axes.plot(*_spend(plan_growing(ratio, 1.2, "pld"), "pld"), label=f"ρ_μ = {ratio:.3g}", marker=".")
    axes.set(xlabel="step", ylabel="ε spent (PLD, proven)", title="ε = 1.2 after 5,000 steps, whatever the ratio")
    axes.legend()
    save(figure, "dynamic_spent")
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for axes, (ratio, target) in zip(panels, ((10 / 3, 0.4), (10 / 3, 1.2), (10.0, 1.2)), strict=True):
        recipe = plan_growing(ratio, target, "gdp")
        for name, label in (("rdp", "RDP (proven)"), ("pld", "PLD (proven, tight)"), ("gdp", "CLT (no bound)")):
            axes.plot(*_spend(recipe, name), label=label, linestyle="--" if name == "gdp" else "-", marker=".")
        axes.set(xlabel="step", ylabel="ε", title=f"claimed ε = {target:g}, ρ_μ = {ratio:.3g}")
    panels[0].legend()
    save(figure, "dynamic_bounds")


def _spend(recipe: Recipe, accountant: str, points: int = 10) -> tuple[list[int], list[float]]:
    """ε of the first steps of a plan."""
    events = [event for event, count in recipe.plan() for _ in range(count)]
    steps = [STEPS * point // points for point in range(1, points + 1)]
    return [0, *steps], [0.0, *(price([(e, 1) for e in events[:n]], DELTA, accountant) for n in steps)]


@app.command()
def selection() -> None:
    """Held-out accuracy of every stored run on digits, by method."""
    found = group_selective(read_all(STORED), "digits")
    groups = {(epsilon, method): rows for method, by_epsilon in found.items() for epsilon, rows in by_epsilon.items()}
    scores = {key: [100 * row["accuracy"] for row in rows] for key, rows in groups.items()}
    methods = sorted(found, key=lambda method: sum(scores[3.0, method]))
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for epsilon, shift in ((1.0, -0.12), (3.0, 0.12)):
        points = [(value, place + shift) for place, method in enumerate(methods) for value in scores[epsilon, method]]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, label=f"ε = {epsilon:g}")
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlabel="held-out accuracy (%), one point per seed")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend()
    save(figure, "selection_digits")


@app.command()
def importance() -> None:
    """σ_G by epoch for every task of docs/mechanisms/dpis.md, DPIS over DP-SGD: the first seed."""
    figure, axes = plt.subplots(figsize=(7, 4))
    groups = group_pairs(read_all(STORED))
    for (name, epsilon, method), found in groups.items():
        if method == "dpis" and (baseline := groups.get((name, epsilon, "dpsgd"))):
            noise = [level / baseline[0]["noise"][0] for level in found[0]["noise"]]
            axes.plot(range(1, len(noise) + 1), noise, label=f"{name}, ε = {epsilon:g}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="σ_G over DP-SGD's", ylim=(0, None))
    axes.legend(fontsize="small")
    save(figure, "dpis_noise")


@app.command()
def footing() -> None:
    """The stored runs on one footing: accuracy by ε of every mechanism, and the noise of DPIS by step."""
    rows = [row for row in read_all(STORED) if footing_of(row["dataset"], row["method"]) in ("linear", "cnn")]
    _draw_importance(rows)
    _draw_accuracies(rows, SELECTIVE, "selection_footing")
    _draw_accuracies(rows, SCHEDULED, "dynamic_footing")
    _draw_accuracies(rows, PLAIN, "plain_footing")


def _draw_importance(rows: Sequence[Row]) -> None:
    """By step: K̃/(Ñ·C), and σ_G over the σ of DP-SGD at the same ε (figure 1 of DPIS)."""

    def column(row: Row) -> tuple[str, float]:
        return where(row["dataset"], row["method"]), row["epsilon"]

    base = {column(row): row["noise"][0] for row in rows if mechanism(row["dataset"], row["method"]) == "dpsgd"}
    figure, (share, level) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    drawn = [row for row in rows if mechanism(row["dataset"], row["method"]) == "dpis" and not row["seed"]]
    for row in sorted(drawn, key=column):
        key = column(row)
        if row["epsilon"] not in (1.0, 3.0) or key not in base:
            continue
        steps = [point["step"] for point in row["curve"]]
        share.plot(steps, [point["share"] for point in row["curve"]], label=f"{key[0]}, ε = {key[1]:g}")
        level.plot(steps, [noise / base[key] for noise in row["noise"]])
    share.set(xlabel="step", ylabel="K̃ / (Ñ·C)", ylim=(0, 1.05))
    level.set(xlabel="step", ylabel="noise over DP-SGD's", ylim=(0, None))
    level.axhline(1.0, color="grey", linewidth=0.8)
    figure.legend(*share.get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    save(figure, "dpis_footing")


def _draw_accuracies(rows: Sequence[Row], methods: Sequence[str], name: str) -> None:
    """One panel per dataset and network: accuracy by ε, one point per seed and a line through the means."""
    found: dict[str, dict[tuple[str, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        method = mechanism(row["dataset"], row["method"])
        if method in methods and row["basis"] == "proven" and row["epsilon"] in PAGE_EPSILONS:
            found[where(row["dataset"], row["method"])][method, row["epsilon"]].append(100 * row["accuracy"])
    lines = math.ceil(len(found) / ACROSS)
    figure, panels = plt.subplots(lines, ACROSS, figsize=(4 * ACROSS, 3.4 * lines), layout="constrained", squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    drawn: dict[str, Line2D] = {}
    for axes, (dataset, groups) in zip(panels.flat, sorted(found.items()), strict=False):
        for number, method in enumerate(methods):
            points = [(e, value) for e in PAGE_EPSILONS for value in groups[method, e]]
            means = [(e, sum(values) / len(values)) for e in PAGE_EPSILONS if (values := groups[method, e])]
            if means:
                (drawn[method],) = axes.plot(*zip(*means, strict=True), color=f"C{number}")
                axes.plot(*zip(*points, strict=True), ".", color=f"C{number}")
        axes.set(xlabel="ε (proven)", ylabel="held-out accuracy (%)", title=dataset)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper")
    save(figure, name)


def save(figure: Figure, name: str) -> None:
    """docs/mechanisms/img/<name>.svg, the same bytes every time."""
    mpl.rcParams["svg.hashsalt"] = "sordino"
    file = IMAGES / f"{name}.svg"
    figure.savefig(file, metadata={"Date": None})
    print(f"wrote {file}")


if __name__ == "__main__":
    app()
