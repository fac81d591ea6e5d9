"""Time of one private step with one and two processes at a logical batch of 4096 (MNIST CNN), as a Markdown table.

python -m benchmarks.scaling      # prints the table, and keeps it in benchmarks/results/scaling.md

Every figure is the median over the steps of several launches, taken in turns so that a busy moment hits all alike. A
step is everything: the draw, the ledger's durable write, gradients, the all-reduce, secure noise, the optimizer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.speed.cases import CASES
from sordino import Private, recipes
from sordino.distributed import join

RESULT = Path(__file__).parent / "results" / "scaling.md"
BATCH, RECORDS = 4096, 60_000
SHAPES = ((1, 1), (1, 2), (2, 1))
"""Processes, and threads of each: two cores can be used by one process with two threads, or by two processes."""


def worker(steps: int) -> None:
    """One rank: warm up, then take `steps` steps; the leader prints their times."""
    join("gloo")
    torch.manual_seed(0)
    case = CASES["MNIST CNN 26k, 2048"]
    model = case.build()
    recipe = recipes.dpsgd(batch_size=BATCH, steps=steps + 2, noise_multiplier=1.0).for_records(RECORDS)
    with tempfile.TemporaryDirectory() as directory:
        optimizer = recipe.optimizer.build(model.parameters())
        private = Private(model, optimizer, case.draw(RECORDS), case.loss, recipe, run=Path(directory) / "run")
        private.step()
        private.step()
        times = []
        for _ in range(steps):
            before = time.perf_counter()
            private.step()
            times.append(time.perf_counter() - before)
        if private.run.team.leads:
            print(json.dumps(times), flush=True)
        private.close()


def launch(processes: int, threads: int, steps: int) -> list[float]:
    """Seconds of each step of one launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "benchmarks.scaling", "--worker", "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    line = next(line for line in result.stdout.splitlines() if line.startswith("["))
    times: list[float] = json.loads(line)
    return times


def table(seconds: dict[tuple[int, int], float]) -> str:
    """The figures as Markdown."""
    alone = seconds[1, 1]
    rows = [
        f"| {processes} | {threads} | {1000 * taken:.0f} | {alone / taken:.2f} × |"
        for (processes, threads), taken in seconds.items()
    ]
    head = ["| processes | threads of each | ms per step | speed |", "|---:|---:|---:|---:|"]
    return "\n".join([*head, *rows])


def main(
    steps: Annotated[int, typer.Option(help="Steps of each launch that are timed.")] = 8,
    rounds: Annotated[int, typer.Option(help="Launches of each kind.")] = 3,
    output: Annotated[Path, typer.Option(help="Where to write the table.")] = RESULT,
    rank: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Measure and print."""
    if rank:
        worker(steps)
        return
    taken: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(rounds):
        for shape in SHAPES:
            taken[shape] += launch(*shape, steps)
    text = table({shape: statistics.median(times) for shape, times in taken.items()})
    print(text)
    output.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
