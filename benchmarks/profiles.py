"""Where the time of a step goes: the parts of Sordino's step beside those of ordinary training."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from dp_accounting import GaussianDpEvent

from benchmarks.methods import trainable
from benchmarks.nets import CASES, Case, losses
from sordino.accounting.ledger import Receipt
from sordino.gradients import BookKeeping, Objective
from sordino.gradients.engine import Batch
from sordino.noise import Secure, perturb

PARTS = ("SGD: forward", "SGD: backward", "SGD: update", "forward, backward, norms", "weighted sums", "noise", "update")


class Clock:
    """Milliseconds by part, one list of measurements each."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        before = time.perf_counter()
        yield
        self.taken[name].append(1000 * (time.perf_counter() - before))

    def medians(self, steps: int) -> dict[str, float]:
        """A part's milliseconds in one step; a part that happens once for each microbatch is added up."""
        return {name: statistics.median(times) * len(times) / steps for name, times in self.taken.items()}


def profile(case: Case, steps: int = 5) -> dict[str, float]:
    """Milliseconds of every part of a step, ordinary and private steps each in a process of its own (see `peers`)."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        kinds = (fresh.apply(_alone, (kind, case.name, steps)) for kind in ("ordinary", "private"))
        return {part: taken for each in kinds for part, taken in each.items()}


def _alone(kind: str, case_name: str, steps: int) -> dict[str, float]:
    clock = Clock()
    step = (_ordinary if kind == "ordinary" else _private)(CASES[case_name], clock)
    for _ in range(2):
        step()
    clock.taken.clear()
    for _ in range(steps):
        step()
    return clock.medians(steps)


def _ordinary(case: Case, clock: Clock) -> Callable[[], None]:
    model, data = case.ready()
    optimizer = torch.optim.SGD(trainable(model), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        with clock.part("SGD: forward"):
            loss = losses(model, data).mean()
        with clock.part("SGD: backward"):
            loss.backward()
        with clock.part("SGD: update"):
            optimizer.step()

    return step


def _private(case: Case, clock: Clock) -> Callable[[], None]:
    model, data = case.ready()
    parameters = trainable(model)
    optimizer, engine, source = torch.optim.SGD(parameters, lr=1e-3), BookKeeping(), Secure()
    objective, receipt = Objective(model, losses), Receipt(1, GaussianDpEvent(1.0))

    def step() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for part in zip(*(each.split(engine.microbatch(parameters)) for each in data), strict=True):
            batch = Batch(part, len(part[0]), lambda i, part=part: tuple(x[i : i + 1] for x in part))
            with clock.part("forward, backward, norms"):
                found = engine.differentiate(objective, parameters, batch)
                weights = (1 / found.norms.clamp_min(1e-12)).clamp_max(1)
            with clock.part("weighted sums"):
                for mine, more in zip(total, found.weighted_sum(weights), strict=True):
                    mine += more
            del found
        with clock.part("noise"):
            perturb(source, receipt, total, 1.0)
        with clock.part("update"):
            for parameter, mine in zip(parameters, total, strict=True):
                parameter.grad = mine
            optimizer.step()
            optimizer.zero_grad()

    return step


def table(found: dict[str, dict[str, float]]) -> str:
    """Milliseconds as Markdown."""
    lines = [f"| milliseconds | {' | '.join(PARTS)} |", "|---" * (len(PARTS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[part]:.1f}' for part in PARTS)} |" for name, row in found.items()]
    return "\n".join(lines)
