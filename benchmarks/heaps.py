"""Page faults: why the same step of a small network takes a fifth longer in one process than in another.

glibc gives large freed blocks back to the system and fetches them again, page by page, or it keeps them, depending on
where they happen to lie. `sordino.lab.machine.keep` makes it keep them always.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

from benchmarks.methods import step_of
from benchmarks.nets import CASES
from benchmarks.peers import seconds
from sordino.lab import machine

CASE = "MNIST CNN 26k, 256"
TURN = 2.0
KINDS = tuple((method, kept) for kept in (False, True) for method in ("SGD", "Sordino"))


def measured(starts: int) -> dict[str, list[dict[str, float]]]:
    """For each kind one fresh process after the other: milliseconds of the quickest step, and page faults of a step."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        rounds = [[fresh.apply(_alone, kind) for kind in KINDS] for _ in range(starts)]
    return {named(*kind): [each[place] for each in rounds] for place, kind in enumerate(KINDS)}


def named(method: str, kept: bool) -> str:
    """What a row is called."""
    return f"{method}, {'kept' if kept else 'as it is'}"


def _alone(method: str, kept: bool) -> dict[str, float]:
    if kept:
        machine.keep()
    step = step_of(method, CASES[CASE])
    for _ in range(3):
        step()
    taken, before = [], _faults()
    ends = time.perf_counter() + TURN
    while time.perf_counter() < ends:
        taken.append(seconds(step))
    return {"ms": 1000 * min(taken), "faults": (_faults() - before) / len(taken)}


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def table(found: dict[str, Any]) -> str:
    """Every start as Markdown, one row for each kind."""
    starts = range(1, len(next(iter(found.values()))) + 1)
    lines = [f"| {CASE}: ms (page faults) | {' | '.join(f'start {start}' for start in starts)} |"]
    lines += ["|---" * (len(starts) + 1) + "|"]
    for name, each in found.items():
        cells = [f"{start['ms']:.1f} ({start['faults']:.0f})" for start in each]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(found: dict[str, Any]) -> float:
    """Sordino's step over SGD's, both with kept heaps, each by its quickest start."""
    return _least(found[named("Sordino", True)]) / _least(found[named("SGD", True)])


def _least(starts: list[dict[str, float]]) -> float:
    return min(start["ms"] for start in starts)
