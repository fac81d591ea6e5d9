"""What it costs to protect people instead of records: CPU time of a step with as many records, of fewer people.

Run ``python -m benchmarks.units``. Every record or person is drawn at every step, so that steps are alike; the two take
turns, and the medians are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import Private, recipes

RECORDS, EACH, TURNS = 256, 4, 5
LENGTH, WORDS = 48, 2000


class Sequences(nn.Module):
    """Words, an LSTM, and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.states, self.head = (
            nn.Embedding(WORDS, 64),
            nn.LSTM(64, 64, batch_first=True),
            nn.Linear(64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.states(self.words(x))[0][:, -1])
        return output


class Attention(nn.Module):
    """Words and two transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, 10)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.words(x)).mean(1))
        return output


def make_perceptron() -> nn.Module:
    """784-256-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def make_convolutions() -> nn.Module:
    """Two convolutions and two layers."""
    first = (nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1))
    second = (nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "perceptron 784-256-10": (make_perceptron, False),
    "CNN, 28 × 28": (make_convolutions, False),
    "LSTM, 48 words": (Sequences, True),
    "transformer, 48 words": (Attention, True),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per record."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def bind(make: Callable[[], nn.Module], text: bool, people: bool) -> Private:
    """A run that takes all records, of people or not, at every step."""
    torch.manual_seed(0)
    model = make()
    data = torch.randint(0, WORDS, (RECORDS, LENGTH)) if text else torch.randn(RECORDS, 1, 28, 28)
    labels = torch.randint(0, 10, (RECORDS,))
    units = RECORDS // EACH if people else RECORDS
    recipe = recipes.dpsgd(batch_size=units, steps=10_000, noise_multiplier=1.0).for_records(units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owners = torch.arange(RECORDS) % units if people else None
    return Private(model, optimizer, (data, labels), loss, recipe, unit=owners, validate=False)


def measure(run: Private, steps: int = 2) -> float:
    """CPU seconds of one step."""
    before = time.process_time()
    for _ in range(steps):
        run.step()
    return (time.process_time() - before) / steps


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| network | by record | by person | ratio |\n|---|---|---|---|")
    for name, (make, text) in NETWORKS.items():
        runs = [bind(make, text, people) for people in (False, True)]
        for run in runs:
            measure(run)
        turns = [[measure(run) for run in runs] for _ in range(TURNS)]
        record, person = (statistics.median(column) * 1000 for column in zip(*turns, strict=True))
        print(f"| {name} | {record:.0f} ms | {person:.0f} ms | {person / record:.2f} |", flush=True)


if __name__ == "__main__":
    main()
