"""Tables of docs/mechanisms that need no training: python -m benchmarks.prices dpis, selection, bounds or timing."""

from __future__ import annotations

import time
from itertools import product

import torch
import typer

from benchmarks.mechanisms import REJECTING, SELECTIVE
from sordino import Budget, Recipe, recipes
from sordino.accounting import calibrate_noise, epsilon
from sordino.lab.experiments import catalogue, recipe_of

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
RECORDS, DELTA, STEPS, BATCH = 60_000, 1 / 600_000, 5_000, 256
ASKED = ("gdp", "pld", "rdp", "zcdp", "zcdp-epoch", "tcdp")
RATIOS = (1.0, 2.0, 10 / 3, 10.0)


@app.command()
def dpis(records: int = RECORDS, epochs: int = 20, delta: float = 1e-5) -> None:
    """σ_G over DP-SGD's σ where K̃/(Ñ·C) is `share` throughout: SGM(q/share, σ_G/share) at equal ε, by PLD (Eq. 13)."""
    shares = (1.0, 0.5, 0.25)
    print("| b | ε | " + " | ".join(f"share {share:g}" for share in shares) + " |\n" + "|---" * (len(shares) + 2) + "|")
    for size, target in product((64, 256, 2048, 8192), (1.0, 3.0, 8.0)):
        steps, budget = round(epochs * records / size), Budget(target, delta)
        found = [share * calibrate_noise(budget, size / share / records, steps).noise_multiplier for share in shares]
        print(f"| {size:,} | {target:g} | " + " | ".join(f"{noise / found[0]:.2f}" for noise in found) + " |")


@app.command()
def selection() -> None:
    """How many attempts each method that rejects can afford, at its configured settings."""
    known, public = catalogue(), (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    print("| task | ε | method | steps |\n|---|---|---|---|")
    for (task, dataset), target, method in product(SELECTIVE.items(), (1.0, 3.0), REJECTING):
        settings = known[dataset, f"selection-{method.removesuffix('-published')}"]
        case = settings.case(target, accounting="published" if method.endswith("-published") else "proven")
        records = 25_000 if dataset == "imdb" else RECORDS
        recipe = recipe_of(case, records, public if "public" in case.data else None)
        print(f"| {task} | {target:g} | {method} | {recipe.steps:,} |", flush=True)


def plan_growing(ratio: float, target: float, accountant: str) -> Recipe:
    """Growing μ over T = 5,000 steps, calibrated by one accountant."""
    recipe = recipes.growing_mu(ratio=ratio, batch_size=BATCH, steps=STEPS)
    return recipe.calibrate(Budget(target, DELTA, accountant=accountant), records=RECORDS)


@app.command()
def bounds() -> None:
    """Dynamic DP-SGD calibrates by the limit theorem: what that really costs, by every accountant."""
    print(f"| claimed ε | ρ_μ | μ_0 | {' | '.join(ASKED)} | μ_0, proven |\n|{'---|' * (len(ASKED) + 4)}")
    for target, ratio in product((0.4, 0.6, 1.2, 2.0), RATIOS):
        recipe = plan_growing(ratio, target, "gdp")
        prices = " | ".join(f"{epsilon(recipe.plan(), DELTA, name):.3g}" for name in ASKED)
        first, sound = (1 / (found.noise_multiplier or 0) for found in (recipe, plan_growing(ratio, target, "pld")))
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


if __name__ == "__main__":
    app()
