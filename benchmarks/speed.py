"""Time and peak memory of one training step against non-private SGD and the peers.

python -m benchmarks.speed                    # everything, and docs/performance.md with its plots
python -m benchmarks.speed --only "MNIST CNN" # cases whose name contains this; the page keeps the others
python -m benchmarks.speed --part times       # times, memory, parts, levels, heap or growth; the page keeps the others

Times are ratios of medians, measured in turns; every method has a process of its own (`benchmarks.peers`). What was
measured is in benchmarks/results/speed.json; the page is made from it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import typer

from benchmarks import page, profiles
from benchmarks.peers import measured, seconds
from benchmarks.steps import CASES, Case, Step, images, mnist_cnn, private, stack
from sordino.gradients import BookKeeping

RESULTS = Path(__file__).parent / "results" / "speed.json"
ROUNDS, STARTS = 3, 4
Found = dict[str, dict[str, float]]


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Seconds of each step: the median of `rounds`, taken in turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # of its own before: another's step leaves cold caches and another heap
            taken[name].append(seconds(step))
    return {name: statistics.median(times) for name, times in taken.items()}


def growth(rounds: int) -> Found:
    """Seconds of our step as the batch grows (MNIST CNN) and as layers are added (dense, 256 wide)."""
    batches = {2**k: Case("growth", mnist_cnn, images(1, 28), 2**k, 0) for k in range(6, 14)}
    depths = {2**k: Case("growth", stack(2**k), images(1, 28), 256, 0) for k in range(5)}

    def of(cases: dict[int, Case]) -> dict[str, float]:
        steps = {str(key): private(*case.ready(), BookKeeping()) for key, case in cases.items()}
        return interleaved(steps, rounds)

    return {"batch": of(batches), "layers": of(depths)}


def times_of(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a step by every method that runs."""
    return measured(case.name, "time", rounds)


def memory_of(case: Case, _: int) -> dict[str, float]:
    """Bytes that a step adds to the peak, by every method that runs in reasonable time."""
    return measured(case.name, "peak", 1)


def parts_of(case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds of the parts of a step."""
    return profiles.profile(case, rounds)


def levels_of(case: Case, rounds: int) -> dict[str, float]:
    """Megabytes that the parts of a step reach."""
    return profiles.profile(case, rounds, profiles.Gauge)


MEASURES = {"times": times_of, "memory": memory_of, "parts": parts_of, "levels": levels_of}


def main(only: str = "", part: str = "all", rounds: int = ROUNDS) -> None:
    """Measure, store it, and write docs/performance.md once there is something of everything."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, measure in MEASURES.items():
        if part not in ("all", name):
            continue
        found: Found = {}
        for case in (case for case in CASES.values() if only in case.name):
            found[case.name] = measure(case, rounds)
            print(page.table(name, {case.name: found[case.name]}), flush=True)
            stored[name] = stored.get(name, {}) | found
            _store(stored)
    if part == "growth" or (part == "all" and not only):
        stored["growth"] = growth(3)
        _store(stored)
    if part == "heap" or (part == "all" and not only):
        stored["heap"] = profiles.measure_heaps(STARTS)
        print(profiles.tabulate_heaps(stored["heap"]), flush=True)
        _store(stored)
    if {*MEASURES, "growth", "heap"} <= stored.keys():
        page.write(stored)


def _store(stored: dict[str, object]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
