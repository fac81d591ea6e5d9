"""Many cases at once: a process per run, one torch thread each, as many as there are cores.

A process that dies takes its run alone; that is tried once more and goes on at its last checkpoint. If this process
dies, its workers notice and stop, so that nobody works on a run that somebody else may take up.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput, SordinoError
from sordino.experiments import store
from sordino.experiments.case import Case

PARENT_DIED, FAILED = 3, 4
TRIES = 2


@dataclass(frozen=True)
class Told:
    """What is known of a run: "waiting", "running", "finished" or "failed", and how far it is."""

    case: Case
    state: str
    step: int = 0
    steps: int = 0
    accuracy: float | None = None
    error: str = ""


Listener = Callable[[Told], None]


@dataclass
class _Worker:
    case: Case
    process: BaseProcess
    pipe: Connection


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(cases: Sequence[Case], folder: Path, workers: int | None = None, tell: Listener = print) -> list[Told]:
    """Run every case that has no result yet in `folder`; returns what became of each."""
    if workers is not None and workers < 1:
        raise InvalidInput(f"workers={workers} must be >= 1: leave it out to use every core")
    ended: dict[str, Told] = {}
    waiting = deque(_unfinished(cases, folder, ended))
    for told in ended.values():
        tell(told)
    tries = {case.label: 0 for case in waiting}
    with _stopping() as running:
        while waiting or running:
            while waiting and len(running) < (workers or cores()):
                case = waiting.popleft()
                tries[case.label] += 1
                running.append(_started(case, folder))
                tell(Told(case, "running"))
            for worker in list(running):
                outcome = _heard(worker, tell)
                if outcome is None:
                    continue
                running.remove(worker)
                if outcome.state == "failed" and not outcome.error and tries[worker.case.label] < TRIES:
                    waiting.append(worker.case)
                    continue
                ended[worker.case.label] = outcome
                tell(outcome)
            wait([thing for worker in running for thing in (worker.pipe, worker.process.sentinel)], timeout=1.0)
    return [ended[case.label] for case in cases]


def _unfinished(cases: Sequence[Case], folder: Path, ended: dict[str, Told]) -> Iterator[Case]:
    """Each case once; those with a result are noted as ended."""
    waiting = []
    for case in {case.label: case for case in cases}.values():
        row = store.find(folder, case.label)
        if row is None:
            waiting.append(case)
        else:
            ended[case.label] = Told(case, "finished", row["steps"], row["steps"], row["accuracy"])
    return iter(waiting)


def _started(case: Case, folder: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case.to_dict(), folder, sender), daemon=True)
    process.start()
    sender.close()
    return _Worker(case, process, receiver)


def _heard(worker: _Worker, tell: Listener) -> Told | None:
    """Pass on what a worker said; what became of its run, if that has ended."""
    alive = worker.process.is_alive()
    message: tuple[str, Any] = ("", None)
    try:
        while worker.pipe.poll():
            message = worker.pipe.recv()
            if message[0] == "running":
                tell(Told(worker.case, "running", *message[1]))
    except (EOFError, OSError):
        pass  # the worker has closed its end; its exit code tells the rest
    if message[0] in ("finished", "failed"):
        worker.process.join()
        steps, accuracy, error = message[1]
        return Told(worker.case, message[0], steps, steps, accuracy, error)
    return None if alive else Told(worker.case, "failed", error="")


def _work(plain: dict[str, Any], folder: Path, pipe: Connection) -> None:
    """In the worker: run one case with one thread, and report."""
    import torch

    from sordino.experiments.running import run

    torch.set_num_threads(1)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        row = run(Case.from_dict(plain), folder, lambda *point: pipe.send(("running", point)))
    except SordinoError as error:
        pipe.send(("failed", (0, None, " ".join(str(error).split()))))
        raise SystemExit(FAILED) from error
    pipe.send(("finished", (row["steps"], row["accuracy"], "")))


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(PARENT_DIED)


@contextmanager
def _stopping() -> Iterator[list[_Worker]]:
    """A list of workers that are stopped when the block ends, however it ends."""
    running: list[_Worker] = []
    try:
        yield running
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.join()
