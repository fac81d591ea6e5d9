"""Train on the digits with several processes that may be killed and start again.

    python examples/distributed.py                                                          # one process
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/distributed.py       # two, restarted if one ends

The program is the same for both. Each process computes the gradients of its part of every draw; the noise is drawn
once, and the ledger in the run's directory is written once. If you start it again after it has ended, it has nothing to
do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import Budget, Private, recipes
from sordino.distributed import join

Records = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Records) -> Tensor:
    """One loss per example."""
    images, digits = batch
    return cross_entropy(model(images), digits, reduction="none")


def train(run: Path, epochs: int) -> Private:
    """Begin the run in this directory, or continue it from its last save."""
    images, digits = load_digits(return_X_y=True)
    records = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    recipe = recipes.dpsgd(batch_size=256, epochs=epochs, lr=2.0)
    recipe = recipe.calibrate(Budget(epsilon=3, delta=1e-5), records=len(digits))
    torch.manual_seed(0)  # every process builds the same model
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    private = Private(model, recipe.optimizer.build(model.parameters()), records, loss, recipe)
    private.resume(run)
    for step in private.steps():
        if step.number % 20 == 0:
            private.save()
    private.save()
    return private


def main() -> None:
    """Train, and let one process say what it cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/distributed"))
    parser.add_argument("epochs", type=int, nargs="?", default=20)
    options = parser.parse_args()
    join()
    with train(options.run, options.epochs) as private:
        if private.run.team.leads:
            print(f"processes: {private.run.team.size}, steps: {private.position} of {private.total}")
            print(private.guarantee())


if __name__ == "__main__":
    main()
