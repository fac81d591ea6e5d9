"""One fresh start: every method in a process of its own, all alive at once, taking their steps in turns.

In one process the methods would share a heap: what one of them allocates and frees changes how long the others wait for
memory, by 20 % and more. In turns, so that a busy moment of the machine hits all alike. A start is a Python process
that has computed nothing; its methods are forked from it, so that starts differ in where their memory happens to lie,
which makes a difference too, and the methods of one start do not.

`python -m benchmarks.speed.starts` reads a `Wish` as JSON and prints what was found.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import stacks
from benchmarks.speed.cases import Case, find_case
from benchmarks.speed.methods import DURABLE, METHODS, OURS, Taken

PATIENCE = 10.0
"""A peer whose first step takes longer is not asked again: that step is its time, and it has no peak."""
LONG = 15.0
"""A probe that takes longer is made once for a network, and left out in the other starts and ways of Sordino."""
VISIBLE = 0.1
"""Durable ledgers are timed where an ordinary step takes less: a write of a millisecond does not show elsewhere."""
SHARE, FREE = 0.45, 0.8
"""What one method may have of the machine's memory, and at most of what is free."""
LIMIT = 600.0
"""Seconds after which a method that has not answered is let go."""
TRIMMED = 2**30
PR_SET_PDEATHSIG = 1
Steps = list[tuple[float, int]]


@dataclass(frozen=True)
class Wish:
    """What a start is to measure; a method may be followed by " @ " and a case of its own."""

    case: str
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    threads: int = 1
    turns: int = 3
    seconds: float = 0.3
    peaks: int = 0
    profile: float = 0.0
    validate: bool = True
    clock: str = "wall"


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Processor time is for busy machines: it leaves out waiting for the disk and, on several threads, says nothing."""


class Peak:
    """How far this process's resident memory rises above what it is when this is made."""

    def __init__(self) -> None:
        trim()  # or freed memory would still count as resident
        self.before = read_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes above the start, at most."""
        return max(0, read_status("VmHWM") - self.before)


def trim() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def read_status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


class Runner:
    """Takes the steps of one loop and measures them."""

    def __init__(self, loop: Iterator[Taken], clock: str = "wall") -> None:
        self.loop, self.now, self.last = loop, CLOCKS[clock], 0.0

    def take(self) -> tuple[float, int, bool]:
        """Seconds and examples of one step, and whether it counts."""
        before = self.now()
        examples, counts = next(self.loop)
        self.last = self.now() - before
        return self.last, examples, counts and examples > 0

    def turn(self, seconds: float) -> Steps:
        """The steps that fit into `seconds`, at least one, after one that warms the caches where that matters."""
        if self.last < seconds / 2:
            self.take()
        ends, steps = self.now() + seconds, Steps()
        while not steps or self.now() < ends:
            taken, examples, counts = self.take()
            if counts:
                steps.append((taken, examples))
        if read_status("VmRSS") > TRIMMED:
            trim()  # others need it while this one waits
        return steps

    def peak(self, count: int) -> list[int]:
        """Bytes by which each of so many steps raises the peak of this process's resident memory."""
        found: list[int] = []
        while len(found) < count:
            since = Peak()
            if self.take()[2]:
                found.append(since.read())
        return found

    def profile(self, seconds: float) -> dict[str, float]:
        """The share of each part of a step."""

        def work() -> None:
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends:
                self.take()

        return stacks.watch(work)


def die_with_parent() -> None:
    """An interrupted run leaves nothing behind that goes on measuring."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(connection: Connection, wish: Wish, method: str, folder: str, validate: bool) -> None:
    """What a method's process does: set up, take a step, then measure as often as it is asked."""
    die_with_parent()
    torch.set_num_threads(wish.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    limit = int(min(SHARE * _read_memory("MemTotal"), FREE * _read_memory("MemAvailable")))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    now = CLOCKS[wish.clock]
    begun = now()
    try:
        name, case = split(method, wish.case)
        runner = Runner(METHODS[name](case, Path(folder), validate), wish.clock)
        first, examples, _ = runner.take()
        connection.send({"setup": now() - begun, "first": first, "examples": examples})
        for question, argument in iter(connection.recv, ("stop", 0)):
            connection.send(getattr(runner, question)(argument))
    except Exception as error:  # noqa: BLE001 – a method may fail in any way, which is a result
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def split(method: str, case: str) -> tuple[str, Case]:
    """A method's own name, and its case."""
    name, _, own = method.partition(" @ ")
    return name, find_case(own or case)


def _read_memory(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


class Start:
    """The methods of a wish that run, and what was found so far."""

    def __init__(self, wish: Wish, folder: str) -> None:
        self.wish, self.folder = wish, folder
        self.alive: dict[str, tuple[Connection, Any]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.fails: dict[str, str] = {}

    def ask(self, method: str, question: str, argument: float) -> Any:
        """A method's answer; one that fails is let go."""
        with suppress(OSError):  # where its process is gone, there is no answer to come
            self.alive[method][0].send((question, argument))
        said = self.hear(method)
        if isinstance(said, str):
            self.fails[method] = said
            self.found.pop(method, None)
            self.dismiss(method)
            return None
        return said

    def hear(self, method: str) -> Any:
        """What a method says; a string says why there is nothing else to come."""
        connection, _ = self.alive[method]
        if not connection.poll(LIMIT):
            return f"took more than {LIMIT:g} s"
        try:
            return connection.recv()
        except (EOFError, OSError):
            return "its process was killed"

    def dismiss(self, method: str) -> None:
        """End a method's process."""
        connection, process = self.alive.pop(method)
        connection.close()
        process.terminate()
        process.join()

    def enlist(self, method: str) -> None:
        """Start a method, and keep it if it runs and is not hopelessly slow."""
        if method in DURABLE and self.last_step("SGD") > VISIBLE:
            return
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        validate = self.wish.validate and self.found.get("Sordino", {}).get("setup", 0.0) <= LONG
        process = context.Process(target=answer, args=(theirs, self.wish, method, self.folder, validate), daemon=True)
        process.start()
        theirs.close()
        self.alive[method] = ours, process
        said = self.hear(method)
        if isinstance(said, str):
            self.fails[method] = said
            self.dismiss(method)
            return
        self.found[method] = {"setup": said["setup"], "probed": validate, "steps": []}
        if said["first"] > PATIENCE and method not in ("SGD", *OURS):
            self.found[method] |= {"steps": [(said["first"], said["examples"])], "single": True}
            self.dismiss(method)

    def last_step(self, method: str) -> float:
        """Seconds of the newest step of a method, or 0."""
        steps = self.found.get(method, {}).get("steps", [])
        return steps[-1][0] if steps else 0.0

    def turns(self) -> None:
        """Every method in turn, forwards and backwards."""
        for number in range(self.wish.turns):
            for method in list(self.alive)[:: -1 if number % 2 else 1]:
                steps = self.ask(method, "turn", self.wish.seconds)
                if steps is not None:
                    self.found[method]["steps"] += steps

    def run(self) -> dict[str, Any]:
        """All that was wished for."""
        for method in self.wish.methods:
            self.enlist(method)
            if method == "SGD" and method in self.alive:
                self.found["SGD"]["steps"] += self.ask("SGD", "turn", self.wish.seconds) or []
        self.turns()
        for method in [each for each in ("SGD", "Sordino") if self.wish.profile and each in self.alive]:
            self.found[method]["profile"] = self.ask(method, "profile", self.wish.profile)
        for method in list(self.alive) if self.wish.peaks else ():
            peaks = self.ask(method, "peak", self.wish.peaks)
            if peaks is not None:
                self.found[method]["peaks"] = peaks
        for method in list(self.alive):
            self.dismiss(method)
        return {"found": self.found, "fails": self.fails}


def preload(wish: Wish) -> None:
    """Import what the methods need, once for all of them."""
    needed = [name for method in wish.methods for name in split(method, wish.case)[1].needs]
    if any(method.startswith("Opacus") for method in wish.methods):
        needed.append("opacus")
    for name in needed:
        if find_spec(name):
            import_module(name)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).zero_grad()  # loads half of torch when it is first made


class Failed(Exception):
    """A start came to nothing."""


def begin(wish: Wish) -> dict[str, Any]:
    """A start in a Python process of its own: {"found": by method, "fails": why the others do not run}."""
    command = [sys.executable, "-m", "benchmarks.speed.starts"]
    done = subprocess.run(command, input=json.dumps(asdict(wish)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Failed(f"a start of {wish.case} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Read a wish, measure, print."""
    die_with_parent()
    wish = Wish(**json.load(sys.stdin))
    warnings.simplefilter("ignore")
    preload(wish)
    with tempfile.TemporaryDirectory(prefix="sordino-bench-") as folder:
        print(json.dumps(Start(wish, folder).run()))


if __name__ == "__main__":
    main()
