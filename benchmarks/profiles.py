"""Where the time and the memory of a step go: its parts beside those of ordinary training, and page faults.

glibc gives large freed blocks back to the system and fetches them again, page by page, or it keeps them, depending on
where they happen to lie: the same step of a small network takes a fifth longer in one process than in another.
`sordino.lab.machine.keep` makes it keep them always.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dp_accounting import GaussianDpEvent

from benchmarks.peers import Peak, seconds
from benchmarks.steps import CASES, Case, batch_of, losses, step_of, trainable
from sordino.accounting.ledger import Receipt
from sordino.gradients import BookKeeping, Objective
from sordino.lab import machine
from sordino.noise import Secure, perturb

PARTS = ("SGD: forward", "SGD: backward", "SGD: update", "forward, backward, norms", "weighted sums", "noise", "update")
TURN = 1.5
Parts = dict[str, float]
HEAP_CASE = "MNIST CNN 26k, 256"
HEAP_TURN = 2.0
HEAP_KINDS = tuple((method, kept) for kept in (False, True) for method in ("SGD", "Sordino"))


class Clock:
    """Milliseconds of each part of each step; a part that happens once for every microbatch is added up."""

    whole: Callable[[list[float]], float] = sum

    def __init__(self) -> None:
        self.steps: list[Parts] = []

    def begin(self) -> None:
        """A step begins."""
        self.steps.append({})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        before = time.perf_counter()
        yield
        self.steps[-1][name] = self.steps[-1].get(name, 0.0) + 1000 * (time.perf_counter() - before)

    def found(self) -> Parts:
        """The parts of the quickest step, as `peers` takes the quickest."""
        return min(self.steps, key=lambda parts: sum(parts.values()))


class Gauge(Clock):
    """Megabytes: the highest that each part of the last step reached, above what was resident when the step began."""

    whole: Callable[[list[float]], float] = max

    def begin(self) -> None:
        super().begin()
        self.peak = Peak()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.peak.reset()
        yield
        self.steps[-1][name] = max(self.steps[-1].get(name, 0.0), self.peak.read() / 2**20)

    def found(self) -> Parts:
        return self.steps[-1]


def profile(case: Case, starts: int, clock: type[Clock] = Clock) -> Parts:
    """Every part of a step, ordinary and private steps in fresh processes (see `peers`): the median start."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        found: Parts = {}
        for kind in ("ordinary", "private"):
            tried = [fresh.apply(_alone, (kind, case.name, clock)) for _ in range(starts)]
            found |= sorted(tried, key=lambda parts: clock.whole(list(parts.values())))[len(tried) // 2]
    return found


def _alone(kind: str, case_name: str, clock_type: type[Clock]) -> Parts:
    clock = clock_type()
    if clock_type is Clock:
        machine.keep()  # or page faults, which come and go with the process, would drown the arithmetic (below)
    step = (_ordinary if kind == "ordinary" else _private)(CASES[case_name], clock)
    for _ in range(2):
        step()
    clock.steps.clear()
    ends = time.perf_counter() + TURN
    while not clock.steps or time.perf_counter() < ends:
        step()
    return clock.found()


def _ordinary(case: Case, clock: Clock) -> Callable[[], None]:
    model, data = case.ready()
    optimizer = torch.optim.SGD(trainable(model), lr=1e-3)

    def step() -> None:
        clock.begin()
        with clock.part("SGD: forward"):
            loss = losses(model, data).mean()
        with clock.part("SGD: backward"):
            loss.backward()
        with clock.part("SGD: update"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def _private(case: Case, clock: Clock) -> Callable[[], None]:
    model, data = case.ready()
    parameters = trainable(model)
    optimizer, engine, source = torch.optim.SGD(parameters, lr=1e-3), BookKeeping(), Secure()
    objective, receipt = Objective(model, losses), Receipt(1, GaussianDpEvent(1.0))

    def step() -> None:
        clock.begin()
        total: list[torch.Tensor] = []
        for part in zip(*(each.split(engine.microbatch(parameters)) for each in data), strict=True):
            batch = batch_of(part)
            with clock.part("forward, backward, norms"):
                found = engine.differentiate(objective, parameters, batch)
                weights = (1 / found.norms.clamp_min(1e-12)).clamp_max(1)
            with clock.part("weighted sums"):
                total = total or [torch.zeros(p.shape) for p in parameters]
                partial = iter(found.weighted_sum(weights))
                for mine in total:
                    mine += next(partial)
            del found
        with clock.part("noise"):
            perturb(source, receipt, total, 1.0)
        with clock.part("update"):
            for parameter, mine in zip(parameters, total, strict=True):
                parameter.grad = mine
            optimizer.step()
            optimizer.zero_grad()

    return step


def table(found: dict[str, Parts], unit: str = "milliseconds") -> str:
    """Parts as Markdown."""
    lines = [f"| {unit} | {' | '.join(PARTS)} | Sordino ÷ SGD |", "|---" * (len(PARTS) + 2) + "|"]
    for name, row in found.items():
        cells = " | ".join(f"{row[part]:.1f}" for part in PARTS)
        lines.append(f"| {name} | {cells} | {ratio(row, sum if unit == 'milliseconds' else max):.2f} |")
    return "\n".join(lines)


def ratio(row: Parts, whole: Callable[[list[float]], float]) -> float:
    """Our step over SGD's, `whole` being the sum of times or the highest of levels."""
    base = [value for part, value in row.items() if part.startswith("SGD")]
    return whole([value for part, value in row.items() if not part.startswith("SGD")]) / whole(base)


def measure_heaps(starts: int) -> dict[str, list[dict[str, float]]]:
    """For each kind one fresh process after the other: milliseconds of the quickest step, and page faults of a step."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        rounds = [[fresh.apply(_count_faults, kind) for kind in HEAP_KINDS] for _ in range(starts)]
    return {name_heap(*kind): [each[place] for each in rounds] for place, kind in enumerate(HEAP_KINDS)}


def name_heap(method: str, kept: bool) -> str:
    """What a row is called."""
    return f"{method}, {'kept' if kept else 'as it is'}"


def _count_faults(method: str, kept: bool) -> dict[str, float]:
    if kept:
        machine.keep()
    step = step_of(method, CASES[HEAP_CASE])
    for _ in range(3):
        step()
    taken, before = [], _page_faults()
    ends = time.perf_counter() + HEAP_TURN
    while time.perf_counter() < ends:
        taken.append(seconds(step))
    return {"ms": 1000 * min(taken), "faults": (_page_faults() - before) / len(taken)}


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def tabulate_heaps(found: dict[str, Any]) -> str:
    """Every start as Markdown, one row for each kind."""
    starts = range(1, len(next(iter(found.values()))) + 1)
    lines = [f"| {HEAP_CASE}: ms (page faults) | {' | '.join(f'start {start}' for start in starts)} |"]
    lines += ["|---" * (len(starts) + 1) + "|"]
    for name, each in found.items():
        cells = [f"{start['ms']:.1f} ({start['faults']:.0f})" for start in each]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare_heaps(found: dict[str, Any]) -> float:
    """Sordino's step over SGD's, both with kept heaps, each by its quickest start."""
    return _find_least(found[name_heap("Sordino", True)]) / _find_least(found[name_heap("SGD", True)])


def _find_least(starts: list[dict[str, float]]) -> float:
    return min(start["ms"] for start in starts)
