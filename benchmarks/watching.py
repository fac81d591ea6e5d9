"""What the probe of real draws costs: processor time of a step with and without it, for a small MLP and a CNN.

python -m benchmarks.watching
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import Private, recipes

RECORDS, DRAW, STEPS = 10_000, 256, 32


def networks() -> dict[str, nn.Module]:
    """The MLP with and without dropout, and the CNN of DP-SGD's usual MNIST experiments."""
    torch.manual_seed(0)
    cnn = [nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
    head = [nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)]
    return {
        "MLP": nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
        "MLP with dropout": nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        ),
        "CNN": nn.Sequential(*cnn, *head),
    }


def loss(model: nn.Module, batch: Any) -> Tensor:
    """One loss per record."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    """Print one line for each network."""
    torch.set_num_threads(1)
    data = torch.randn(RECORDS, 1, 28, 28), torch.randint(10, (RECORDS,))
    for name, model in networks().items():
        recipe = recipes.dpsgd(batch_size=DRAW, steps=STEPS, noise_multiplier=1.0).for_records(RECORDS)
        times: dict[str, list[float]] = {}
        for validate in (True, False, True):  # the first one is thrown away: it loads what the others find loaded
            begun = time.process_time()
            private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, recipe, validate=validate)
            taken = [time.process_time() - begun]
            for _ in range(STEPS):
                begun = time.process_time()
                private.step()
                taken.append(time.process_time() - begun)
            private.close()
            times["watched" if validate else "plain"] = taken
        step = statistics.median(times["plain"][1:])
        early = sum(times["watched"][number] - times["plain"][number] for number in (1, 2))
        late = statistics.median(times["watched"][number] - step for number in (4, 8, 16, 32))
        shares = {steps: (early + (steps.bit_length() - 2) * late) / (steps * step) for steps in (100, 1_000, 5_000)}
        told = ", ".join(f"{share:.1%} of {steps:,} steps" for steps, share in shares.items())
        print(
            f"{name}: probe at the start {times['watched'][0] - times['plain'][0]:.2f} s, step {1e3 * step:.1f} ms, "
            f"checks of draws 1 and 2 {early / step:.1f} steps, later ones {late / step:.1f} each; {told}"
        )


if __name__ == "__main__":
    main()
