"""Dynamic DP-SGD: what schedules cost, and what they are worth at equal *proven* ε.

python -m benchmarks.dynamic bounds             # ε of the paper's settings by every accountant, as Markdown
python -m benchmarks.dynamic timing             # how long calibration takes
python -m benchmarks.dynamic figures            # figures 2 and 4, docs/mechanisms/img/dynamic_*.svg
python -m benchmarks.dynamic grid --dataset mnist --epsilon 0.4      # the small grid over both ratios, one seed

The paper's table 1 is made by `sordino compare` (docs/mechanisms/dynamic.md). The grid goes on where it was stopped;
its finished runs are kept in benchmarks/results/ratios, and its table is written into that page.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import results
from benchmarks.many import finish
from sordino import Budget, Recipe, recipes
from sordino.accounting import epsilon
from sordino.lab.experiments import Case, catalogue, read_all
from sordino.lab.experiments.results import Row, keep_lines
from sordino.lab.experiments.summaries import write_markdown

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
IMAGES = Path(__file__).parent.parent / "docs" / "mechanisms" / "img"
STORED = Path(__file__).parent / "results" / "ratios"
RECORDS, DELTA, STEPS, BATCH = 60_000, 1 / 600_000, 5_000, 256
ASKED = ("gdp", "pld", "rdp", "zcdp", "zcdp-epoch", "tcdp")
RATIOS = (1.0, 2.0, 10 / 3, 10.0)
MU_GRID, CLIP_GRID = (1.0, 0.8, 0.4), (1.0, 0.5, 0.3, 0.1)
"""1/ρ_μ and 1/ρ_c: six of the authors' 4 × 4 points, and the edges on which one of the two does not change."""
CORNERS = {(1.0, 1.0): "static", (0.8, 1.0): "growing-mu", (1.0, 0.3): "sensitivity-decay", (0.8, 0.3): "dynamic"}

Dataset = Annotated[str, typer.Option(help="mnist or fashion-mnist")]


# -- training --------------------------------------------------------------------------------------------------------


def at_ratios(dataset: str, target: float, mu: float, clip: float) -> Case:
    """The paper's settings with the bound falling to `clip` and the noise multiplier to `mu` of where they began.

    Where table 1 has a method with these ratios it is the same run, so that a finished one is not made again.
    """
    known = catalogue()
    if (mu, clip) in CORNERS:
        return known[dataset, CORNERS[mu, clip]].case(target)
    case = known[dataset, "dynamic"].case(target)
    ratios = {"mu_ratio": 1 / mu, "clip_ratio": 1 / clip}
    return replace(case, method=f"dynamic-mu{mu:g}-clip{clip:g}", recipe={**case.recipe, **ratios})


@app.command()
def grid(
    dataset: Dataset = "mnist",
    epsilon: float = 0.4,
    workers: int | None = None,
    out: Annotated[Path, typer.Option(help="that of sordino compare, whose finished runs are used")] = Path(
        "runs/grid"
    ),
) -> None:
    """The small grid over both ratios, one seed. Its own cost in privacy is not part of any ε printed here."""
    cases = {point: at_ratios(dataset, epsilon, *point) for point in product(MU_GRID, CLIP_GRID)}
    corners = {cases[point].label for point in CORNERS}

    def keep(case: Case, row: Row) -> None:
        if case.label not in corners:
            keep_lines(STORED / f"{dataset}.jsonl", row)

    finish(list(cases.values()), out, keep, workers)
    results.put(results.SCHEDULES, ratios_table(dataset, epsilon), by="benchmarks.dynamic")


def ratios_table(dataset: str, target: float) -> str:
    """Accuracy at every point of the grid that is stored; those of table 1 are with its runs (`benchmarks.results`)."""
    rows = {row["label"]: row for row in read_all(STORED, results.STORED)}

    def shown(mu: float, clip: float) -> str:
        row = rows.get(at_ratios(dataset, target, mu, clip).label)
        return f"{100 * row['accuracy']:.2f}" if row else ""

    heads = [f"{dataset}, ε = {target:g}", *(f"1/ρ_c = {clip:g}" for clip in CLIP_GRID)]
    return write_markdown(heads, [[f"1/ρ_μ = {mu:g}", *(shown(mu, clip) for clip in CLIP_GRID)] for mu in MU_GRID])


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
