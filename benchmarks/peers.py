"""Every method in a process of its own, all alive at once, taking their steps in turns.

In one process the peers would share a heap: what one of them allocates and frees changes how long the others wait for
memory, by 20 % and more. In turns, so that a busy moment of the machine hits all alike.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.steps import CASES, METHODS, Step, step_of

PATIENCE = 10.0
TURN = 0.5
TURNS = 2


def seconds(step: Step) -> float:
    """How long one step takes."""
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


def quickest(step: Step) -> float:
    """The quickest of the steps that fit into a turn, after one that warms the caches; this machine has neighbours."""
    step()
    ends, taken = time.perf_counter() + TURN, [seconds(step)]
    while time.perf_counter() < ends:
        taken.append(seconds(step))
    return min(taken)


class Peak:
    """How far this process's resident memory rises above what it is when this is made."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory would still count as resident
        self.before = _status("VmRSS")
        self.reset()

    def reset(self) -> None:
        """Forget earlier peaks."""
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes above the start, at most, since the last reset."""
        return max(0, _status("VmHWM") - self.before)


def peak(step: Step) -> float:
    """Bytes by which one step raises the peak of this process's resident memory."""
    since = Peak()
    step()
    return since.read()


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def answer(connection: Connection, case_name: str, method: str) -> None:
    """What a peer's process does: build the step, then measure it as often as it is asked."""
    case = CASES[case_name]
    try:
        step_of(method, replace(case, batch=2))()
        step = step_of(method, case)
        connection.send(seconds(step))
    except Exception as error:  # noqa: BLE001 – a peer may fail in any way, which is a result
        connection.send(type(error).__name__)
        return
    for question in iter(connection.recv, "stop"):
        connection.send(quickest(step) if question == "time" else peak(step))


@contextmanager
def gathered(case_name: str) -> Iterator[tuple[dict[str, Connection], dict[str, float]]]:
    """The methods that run, each in its own process, and what their first step took; the others go to stderr."""
    spawn = multiprocessing.get_context("spawn")
    peers: dict[str, Connection] = {}
    first: dict[str, float] = {}
    for method in METHODS:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=answer, args=(theirs, case_name, method), daemon=True).start()
        theirs.close()
        try:
            taken = ours.recv()
        except EOFError:
            taken = "killed"
        if isinstance(taken, str):
            print(f"{case_name}: {method} does not run ({taken})", file=sys.stderr)
            continue
        peers[method], first[method] = ours, taken
    try:
        yield peers, first
    finally:
        for connection in peers.values():
            connection.send("stop")


def measured(case_name: str, question: str, rounds: int) -> dict[str, float]:
    """Each method's median over `rounds` of its least in a few turns: seconds ("time") or bytes ("peak").

    Every round has fresh processes, as where a process' memory happens to lie makes a difference of 20 %. A method
    whose first step took longer than `PATIENCE` is not asked again: that step is its time, and it has no peak.
    """
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        with gathered(case_name) as (peers, first):
            least = {method: taken for method, taken in first.items() if taken > PATIENCE and question == "time"}
            quick = {method: connection for method, connection in peers.items() if first[method] <= PATIENCE}
            for _ in range(TURNS):
                for method, connection in quick.items():
                    connection.send(question)
                    least[method] = min(least.get(method, math.inf), connection.recv())
        for method, value in least.items():
            found.setdefault(method, []).append(value)
    return {method: statistics.median(values) for method, values in found.items()}
