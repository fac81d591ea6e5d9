"""Time and peak memory of one training step against non-private SGD and the peers.

python -m benchmarks.speed                    # everything, and docs/performance.md with its plots
python -m benchmarks.speed --only "MNIST CNN" # cases whose name contains this; prints the tables only

Times are ratios of medians measured interleaved in one process; every peak is measured in a process of its own.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import typer

from benchmarks import profiles
from benchmarks.methods import METHODS, Step, private, step_of
from benchmarks.nets import CASES, Case, images, mnist_cnn, stack
from sordino.gradients import BookKeeping

DOCS = Path(__file__).parent.parent / "docs"
ROUNDS = 9
PATIENCE = 10.0


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


def cell(value: float | None, base: float) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value / base:.2f}"


def table(title: str, rows: dict[str, dict[str, float]], milliseconds: bool) -> str:
    """A Markdown table of ratios to SGD."""
    unit = "ms" if milliseconds else "MB"
    lines = [f"| {title} | SGD, {unit} | target | " + " | ".join(METHODS[1:]) + " |", "|---" * (len(METHODS) + 2) + "|"]
    for name, row in rows.items():
        base = row["SGD"]
        shown = base * 1000 if milliseconds else base / 2**20
        target = CASES[name].target if milliseconds else 1.15
        cells = " | ".join(cell(row.get(method), base) for method in METHODS[1:])
        lines.append(f"| {name} | {shown:.1f} | {target} | {cells} |")
    return "\n".join(lines)


def growth(rounds: int) -> dict[str, dict[int, float]]:
    """Seconds of our step as the batch grows (MNIST CNN) and as layers are added (dense, 256 wide)."""
    batches = {2**k: Case("growth", mnist_cnn, images(1, 28), 2**k, 0) for k in range(6, 14)}
    depths = {2**k: Case("growth", stack(2**k), images(1, 28), 256, 0) for k in range(5)}

    def measured(cases: dict[int, Case]) -> dict[int, float]:
        steps = {str(key): private(*case.ready(), BookKeeping()) for key, case in cases.items()}
        return {int(key): value for key, value in interleaved(steps, rounds).items()}

    return {"batch": measured(batches), "layers": measured(depths)}


def plot(times: dict[str, dict[str, float]], grown: dict[str, dict[int, float]]) -> None:
    """docs/img/speed.svg and docs/img/growth.svg."""
    import matplotlib.pyplot as plt

    (DOCS / "img").mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 4))
    for index, method in enumerate(METHODS[1:]):
        places = [place + 0.13 * index for place, row in enumerate(times.values()) if method in row]
        heights = [row[method] / row["SGD"] for row in times.values() if method in row]
        axes.bar(places, heights, 0.12, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel="time of a step / SGD")
    axes.set_xticks(range(len(times)), [name.split(",")[0] for name in times], rotation=20, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "speed.svg", bbox_inches="tight")
    figure, both = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, (name, points) in zip(both, grown.items(), strict=True):
        axes.loglog(list(points), list(points.values()), marker="o", label="Sordino")
        first = next(iter(points))
        axes.loglog(list(points), [points[first] * key / first for key in points], "k:", label="linear")
        axes.set(xlabel=name, ylabel="seconds of a step")
        axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "growth.svg", bbox_inches="tight")


def main(only: str = "", peak: tuple[str, str] = ("", ""), rounds: int = ROUNDS) -> None:
    """Measure; without `only`, write docs/performance.md."""
    if peak[0]:
        print(peak_of(peak[1], CASES[peak[0]]))
        return
    chosen = [case for case in CASES.values() if only in case.name]
    times: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    for case in chosen:
        steps = runnable(case, METHODS)
        times[case.name] = interleaved(steps, rounds)
        memory[case.name] = peaks(case, [name for name in steps if times[case.name][name] < PATIENCE])
        print(table("time of a step ÷ SGD", {case.name: times[case.name]}, True))
        print(table("peak memory ÷ SGD", {case.name: memory[case.name]}, False), flush=True)
    found = {case.name: profiles.profile(case) for case in chosen}
    print(profiles.table(found), flush=True)
    if only:
        return
    plot(times, growth(3))
    page = PAGE.format(
        threads=torch.get_num_threads(),
        time=table("time of a step ÷ SGD", times, True),
        memory=table("peak memory ÷ SGD", memory, False),
        parts=profiles.table(found),
    )
    (DOCS / "performance.md").write_text(page)


PAGE = """# Performance

Medians measured side by side in one run on {threads} CPU threads with torch's CPU wheel, by `make bench`. Sordino runs
with its default microbatch and secure noise, the peers with torch's own generator. A dash: that mode does not run, or
(memory) takes more than ten seconds a step.

{time}

![time](img/speed.svg)

{memory}

## Where the time goes

The parts of one step, SGD and Sordino in turns. The backward pass of SGD forms the summed weight gradients; ours leaves
them out, measures every example instead, and forms the weighted sums afterwards. The noise is AES-128 in counter mode,
about 15 ns for each parameter whatever the batch: where a network has many parameters for little arithmetic, as VGG13
at a batch of 64 and the embedding network, it is the largest part of what private training adds.

{parts}

## Growth

Cost grows linearly with the batch and with depth: there is no term quadratic in the batch.

![growth](img/growth.svg)
"""

if __name__ == "__main__":
    typer.run(main)
