"""Time and peak memory of one training step against non-private SGD and the peers.

python -m benchmarks.speed                    # everything, and docs/performance.md with its plots
python -m benchmarks.speed --only "MNIST CNN" # cases whose name contains this; the page keeps the others
python -m benchmarks.speed --part times       # one of times, memory, parts, growth; the page keeps the others

Times are ratios of medians measured interleaved in one process; every peak is measured in a process of its own. What
was measured is in benchmarks/results/speed.json; the page is made from it.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import typer

from benchmarks import page, profiles
from benchmarks.methods import METHODS, Step, private, step_of
from benchmarks.nets import CASES, Case, images, mnist_cnn, stack
from sordino.gradients import BookKeeping

RESULTS = Path(__file__).parent / "results" / "speed.json"
ROUNDS = 9
PATIENCE = 10.0
Found = dict[str, dict[str, float]]


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Seconds of each step: the median of `rounds`, taken in turns so that a busy moment hits all alike.

    The first step of each is not counted, unless it took longer than `PATIENCE`: then it is all there is.
    """
    first = {name: seconds(step) for name, step in steps.items()}
    slow = {name: [taken] for name, taken in first.items() if taken > PATIENCE}
    taken: dict[str, list[float]] = {name: slow.get(name, []) for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            if name not in slow:
                step()  # of its own before: another method's step leaves cold caches and another heap
                taken[name].append(seconds(step))
    return {name: statistics.median(times) for name, times in taken.items()}


def seconds(step: Step) -> float:
    """How long one step takes."""
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


def runnable(case: Case, methods: tuple[str, ...]) -> dict[str, Step]:
    """The methods that can take a step on this network; the others are named on stderr."""
    found: dict[str, Step] = {}
    for method in methods:
        try:
            step = step_of(method, replace(case, batch=2))
            step()
            step = step_of(method, case)
        except Exception as error:  # noqa: BLE001 – a peer may fail in any way, which is a result
            print(f"{case.name}: {method} does not run ({type(error).__name__})", file=sys.stderr)
            continue
        found[method] = step
    return found


def peak_of(method: str, case: Case) -> int:
    """Bytes by which one step raises the peak of resident memory, in this process."""
    step = step_of(method, case)
    step()  # settle what is allocated once
    step()
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would still count as resident
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    return max(0, status("VmHWM") - before)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def peaks(case: Case, methods: list[str]) -> dict[str, float]:
    """Peaks of all methods, each in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.speed", "--peak", case.name]
    return {m: float(subprocess.run([*command, m], capture_output=True, text=True, check=True).stdout) for m in methods}


def growth(rounds: int) -> Found:
    """Seconds of our step as the batch grows (MNIST CNN) and as layers are added (dense, 256 wide)."""
    batches = {2**k: Case("growth", mnist_cnn, images(1, 28), 2**k, 0) for k in range(6, 14)}
    depths = {2**k: Case("growth", stack(2**k), images(1, 28), 256, 0) for k in range(5)}

    def measured(cases: dict[int, Case]) -> dict[str, float]:
        steps = {str(key): private(*case.ready(), BookKeeping()) for key, case in cases.items()}
        return interleaved(steps, rounds)

    return {"batch": measured(batches), "layers": measured(depths)}


def times_of(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a step by every method that runs."""
    return interleaved(runnable(case, METHODS), rounds)


def memory_of(case: Case, rounds: int) -> dict[str, float]:
    """Peaks of all methods that run, and do so in less than `PATIENCE`."""
    first = {name: seconds(step) for name, step in runnable(case, METHODS).items()}
    return peaks(case, [name for name, taken in first.items() if taken < PATIENCE])


def parts_of(case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds of the parts of a step."""
    return profiles.profile(case, rounds)


MEASURES = {"times": times_of, "memory": memory_of, "parts": parts_of}


def main(only: str = "", part: str = "all", peak: tuple[str, str] = ("", ""), rounds: int = ROUNDS) -> None:
    """Measure, store it, and write docs/performance.md once there is something of everything."""
    if peak[0]:
        print(peak_of(peak[1], CASES[peak[0]]))
        return
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
    if {*MEASURES, "growth"} <= stored.keys():
        page.write(stored)


def _store(stored: dict[str, object]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
