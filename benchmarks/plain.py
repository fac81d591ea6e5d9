"""The noise that a budget needs, by size of the draw: `python -m benchmarks.plain` draws docs/mechanisms/img."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from sordino import Budget, recipes

FIGURE = Path(__file__).parent.parent / "docs" / "mechanisms" / "img" / "plain_noise.svg"
RECORDS, EPOCHS, DELTA = 60_000, 20, 1e-5
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
BATCH_SIZES = (256, 1024, 4096)


def noises(batch_size: int) -> list[float]:
    """The calibrated noise multiplier at every ε."""
    recipe = recipes.dpsgd(batch_size=batch_size, epochs=EPOCHS)
    found = (recipe.calibrate(Budget(epsilon, DELTA), records=RECORDS).noise_multiplier for epsilon in EPSILONS)
    return [noise for noise in found if noise is not None]


def main() -> None:
    """Draw σ, and the noise that is left per record of a draw."""
    mpl.rcParams["svg.hashsalt"] = "sordino"  # the same bytes every time
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
    on_sum.legend()
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
