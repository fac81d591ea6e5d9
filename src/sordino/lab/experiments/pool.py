"""Many cases at once: as many processes as there are cores, one torch thread each, one run at a time.

If a process dies, only its run is affected: it is tried once more, from its last checkpoint. A run that fails would
fail again, so it is not repeated, and says why in one line. If this process dies, its workers notice and stop, so that
no run is worked on twice.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from sordino.errors import InvalidInput, SordinoError, locate_error
from sordino.lab import machine
from sordino.lab.experiments import results
from sordino.lab.experiments.cases import EVALUATIONS, Case
from sordino.lab.machine import cores

PARENT_DIED = 3
TRIES = 2


@dataclass(frozen=True)
class Told:
    """What is known about a run: "waiting", "running", "finished" or "failed", and how far it is."""

    case: Case
    state: str
    step: int = 0
    steps: int = 0
    accuracy: float | None = None
    error: str = ""


Listener = Callable[[Told], None]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    case: Case

    def take(self, case: Case) -> None:
        """Begin another run."""
        self.case = case
        self.pipe.send(case.to_dict())


def run_all(
    cases: Sequence[Case],
    folder: Path,
    workers: int | None = None,
    tell: Listener = print,
    evaluations: int = EVALUATIONS,
    *,
    keep: bool = False,
) -> list[Told]:
    """Run every case that has no result yet in `folder`; return how each one ended.

    `keep` keeps the checkpoints of finished runs.
    """
    if workers is not None and workers < 1:
        raise InvalidInput(f"workers={workers} must be >= 1: leave it out to use every core")
    ended: dict[str, Told] = {}
    waiting = deque(_list_unfinished(cases, folder, ended))
    for told in ended.values():
        tell(told)
    tries = {case.label: 0 for case in waiting}
    idle: list[_Worker] = []
    with _stop_at_end() as running:
        while waiting or running:
            while waiting and len(running) < (workers or cores()):
                case = waiting.popleft()
                tries[case.label] += 1
                worker = _find_free(idle) or _start(case, folder, evaluations, keep)
                worker.take(case)
                running.append(worker)
                tell(Told(case, "running"))
            for worker in list(running):
                outcome = _hear(worker, tell)
                if outcome is None:
                    continue
                running.remove(worker)
                if worker.process.is_alive():
                    idle.append(worker)
                if outcome.state == "failed" and not outcome.error and tries[outcome.case.label] < TRIES:
                    waiting.append(outcome.case)
                    continue
                ended[outcome.case.label] = outcome
                tell(outcome)
            wait([thing for worker in running for thing in (worker.pipe, worker.process.sentinel)], timeout=1.0)
        running += idle
    return [ended[case.label] for case in cases]


def _list_unfinished(cases: Sequence[Case], folder: Path, ended: dict[str, Told]) -> Iterator[Case]:
    """Each case once; those with a result are noted as ended."""
    waiting = []
    for case in {case.label: case for case in cases}.values():
        row = results.find(folder, case.label)
        if row is None:
            waiting.append(case)
        else:
            ended[case.label] = Told(case, "finished", row["steps"], row["steps"], row["accuracy"])
    return iter(waiting)


def _find_free(idle: list[_Worker]) -> _Worker | None:
    """Return a worker that is idle and alive."""
    while idle:
        worker = idle.pop()
        if worker.process.is_alive():
            return worker
    return None


def _start(case: Case, folder: Path, evaluations: int, keep: bool) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(folder, theirs, evaluations, keep), daemon=True)
    with machine.large_pages():
        process.start()
    theirs.close()
    return _Worker(process, ours, case)


def _hear(worker: _Worker, tell: Listener) -> Told | None:
    """Pass on a worker's message; return how its run ended, if it has."""
    alive = worker.process.is_alive()
    try:
        while worker.pipe.poll():
            state, told = worker.pipe.recv()
            if state == "doing":
                sys.stderr.write(f"{worker.case.label}: {told}\n")  # a live table lets lines of this process pass
            elif state == "running":
                tell(Told(worker.case, state, *told))
            else:
                steps, accuracy, error = told
                return Told(worker.case, state, steps, steps, accuracy, error)
    except (EOFError, OSError):
        alive = False  # the worker has closed its end: it is dead or dying
    return None if alive else Told(worker.case, "failed")


def _serve(folder: Path, pipe: Connection, evaluations: int, keep: bool) -> None:
    """In a worker: run one case after the other with one thread, and report."""
    import torch

    from sordino.lab.experiments.running import run

    torch.set_num_threads(1)
    machine.keep()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    _pass_on(pipe)
    while True:
        case = Case.from_dict(pipe.recv())
        try:
            row = run(case, folder, lambda *point: pipe.send(("running", point)), evaluations=evaluations, keep=keep)
        except Exception as error:  # noqa: BLE001 - whatever it was, other runs go on
            pipe.send(("failed", (0, None, explain(error))))
        else:
            pipe.send(("finished", (row["steps"], row["accuracy"], "")))


def _pass_on(pipe: Connection) -> None:
    """In a worker: let the parent, which has the screen, say what takes long before a run begins."""

    class Channel(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pipe.send(("doing", record.getMessage()))

    logger = logging.getLogger("sordino.lab.data.cache")
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library that this run loads may write every message to the screen
    logger.addHandler(Channel())


def explain(error: Exception) -> str:
    """Explain an error in one line. Refusals and system errors speak for themselves; for others, say what and where.

    Messages of other errors are not shown: shapes and sizes in them would tell how many records a draw had (law 7).
    """
    said = " ".join(str(error).split())
    if isinstance(error, SordinoError):
        return said
    kind = type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in said:
        return f"out of memory ({kind}): use fewer --workers, and run again to go on"
    if isinstance(error, OSError):
        return f"{kind}: {said}: correct this, or make room on the disk, and run again to go on"
    return f"{locate_error(error)}: correct the method's settings, or report this line if they are right"


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(PARENT_DIED)


@contextmanager
def _stop_at_end() -> Iterator[list[_Worker]]:
    """A list of workers that are stopped when the block ends, however it ends."""
    running: list[_Worker] = []
    try:
        yield running
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.join()
