"""What a training step costs with a vault and without: python -m benchmarks.vault.steps"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Budget, Private, recipes
from sordino.vault import DatasetBudget, open_budget, open_vault

STEPS, ROUNDS = 300, 5


def take_steps(folder: Path, budget: DatasetBudget | None) -> tuple[float, float]:
    """Seconds of this process for all steps of a small run, and for making and closing it."""
    x = torch.randn(2_000, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    model = nn.Linear(20, 2)

    def losses(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1], reduction="none")

    recipe = recipes.dpsgd(batch_size=64, steps=STEPS, noise_multiplier=8.0).for_records(2_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.process_time()
    private = Private(model, optimizer, (x, y), losses, recipe, run=folder, vault=budget)
    ready = time.process_time()
    for _ in private.steps():
        pass
    done = time.process_time()
    private.close()
    return done - ready, ready - began + time.process_time() - done


def main() -> None:
    """Print the medians, in milliseconds; both kinds take turns."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        open_vault(place / "vault.sqlite", create=True).create("patients", Budget(20, 1e-6))
        found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for number in range(ROUNDS):
            for name, timings in found.items():
                budget = open_budget("patients", place / "vault.sqlite") if name == "with" else None
                timings.append(take_steps(place / f"{name}-{number}", budget))
    for name, timings in found.items():
        step, ends = (1_000 * statistics.median(column) for column in zip(*timings, strict=True))
        print(f"{name} a vault: {step / STEPS:.3f} ms a step, {ends:.0f} ms at both ends of the run")


if __name__ == "__main__":
    main()
