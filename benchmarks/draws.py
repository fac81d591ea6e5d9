"""CPU time of an entry of noise, of a draw, and of a step at any number of records; on one thread, interleaved.

``python -m benchmarks.draws``: the least of many turns, because other programs only ever add to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn

from sordino import Private, recipes
from sordino.accounting.ledger import Receipt
from sordino.noise import PIECE, Secure, Seeded, perturb

PAID = Receipt(1, GaussianDpEvent(1.0))
TURNS = 40
LARGE = 2**22


def measure(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of CPU for one call of each, the least of all turns."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(TURNS):
        for name, way in ways.items():
            start = time.process_time()
            for _ in range(repeats):
                way()
            found[name] = min(found[name], (time.process_time() - start) / repeats)
    return found


def compare_noise() -> None:
    """Nanoseconds for an entry: the old noise is what a seed still gives."""
    secure, seeded = Secure(), Seeded(1)
    single, model = torch.empty(PIECE), [torch.zeros(LARGE, dtype=torch.float64)]
    ways: dict[str, Callable[[], object]] = {
        "secure, a piece": lambda: secure.gaussian(PAID, PIECE, 1.0),
        "ziggurat on AES (before), a piece": lambda: seeded.gaussian(PAID, PIECE, 1.0),
        "torch.normal_ in float32, a piece": single.normal_,
    }
    for name, seconds in measure(ways, 10).items():
        print(f"{name:40} {seconds / PIECE * 1e9:8.2f} ns an entry")
    ways = {
        "secure, added to 4M entries": lambda: perturb(secure, PAID, model, 1.0),
        "before, added to 4M entries": lambda: perturb(seeded, PAID, model, 1.0),
    }
    for name, seconds in measure(ways, 1).items():
        print(f"{name:40} {seconds / LARGE * 1e9:8.2f} ns an entry")


def toss_all(source: Seeded, records: int, rate: float) -> object:
    """One coin for every record, as draws were made before."""
    return (source.uniform(records) < rate).nonzero()


def compare_draws() -> None:
    """Milliseconds for an expected draw of 256."""
    secure, seeded = Secure(), Seeded(1)
    for records in (10**4, 10**6, 10**7, 10**9):
        rate = 256 / records
        ways: dict[str, Callable[[], object]] = {"draw": partial(secure.toss, records, rate)}
        if records <= 10**7:
            ways["coins (before)"] = partial(toss_all, seeded, records, rate)
        for name, seconds in measure(ways, 1).items():
            print(f"{name:16} N = {records:>13,} {seconds * 1e3:10.3f} ms")


class Virtual:
    """Records that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((64,), index % 97 / 97), index % 2


def loss(model: nn.Module, batch: Any) -> Tensor:
    """One cross-entropy for each example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def open_run(records: int) -> Iterator[Any]:
    """The steps of a linear model on virtual records."""
    model = nn.Linear(64, 2)
    recipe = recipes.dpsgd(batch_size=256, steps=1000, noise_multiplier=1.0).for_records(records)
    return Private(model, torch.optim.SGD(model.parameters(), lr=0.1), Virtual(records), loss, recipe).steps()


def compare_steps() -> None:
    """Milliseconds for a step of 256 records by `Private.steps()`."""
    runs = {records: open_run(records) for records in (10**4, 10**6, 10**8, 10**9)}
    times: dict[int, list[float]] = {records: [] for records in runs}
    for _ in range(300):
        for records, steps in runs.items():
            start = time.process_time()
            next(steps)
            times[records].append(time.process_time() - start)
    for records, found in times.items():
        median, least = statistics.median(found[40:]) * 1e3, min(found[40:]) * 1e3
        print(f"{'step':16} N = {records:>13,} {median:10.3f} ms, least {least:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare_noise()
    compare_draws()
    compare_steps()
