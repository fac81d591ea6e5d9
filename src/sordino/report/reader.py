"""Reads runs in a separate process: a hostile folder can slow down or end only that, and is named as the cause.

The folder of a run may hold anything: an endless view of the ledger, or events that take gigabytes to price. None of
this can be interrupted from within, so a reader that is late is killed, and the next run gets a new one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from sordino.errors import SordinoError
from sordino.report.facts import Facts, gather

MOST_MEMORY = 8 * 2**30
_READY = b"+"

Reply = Facts | str
"""The facts of a run, or why there are none."""


class Reader:
    """Reads one run after another, each within `deadline` seconds."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._asked: queue.Queue[tuple[Path, bool, Future[Reply]]] = queue.Queue()
        threading.Thread(target=self._answer_all, daemon=True).start()
        atexit.register(self.stop)

    def ask(self, path: Path, *, brief: bool) -> Future[Reply]:
        """Return the facts of a run once they are known, or why there are none."""
        future: Future[Reply] = Future()
        self._asked.put((path, brief, future))
        return future

    def warm_up(self) -> None:
        """Wait until the first process is ready; a later one, after a kill, starts while others are answered."""
        if self._process is None:
            with self._starting:
                self._ready()

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answer_all(self) -> None:
        while True:
            path, brief, future = self._asked.get()
            try:
                future.set_result(self._read(path, brief))
            except BaseException as error:  # noqa: BLE001  # the asking process must not wait for ever
                future.set_exception(error)

    def _read(self, path: Path, brief: bool) -> Reply:
        with self._starting:
            process, late = self._ready(), threading.Event()
        assert process.stdin is not None
        assert process.stdout is not None

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.deadline, end)
        timer.daemon = True
        timer.start()
        try:
            pickle.dump((path, brief, self.deadline), process.stdin)
            process.stdin.flush()
            reply: Reply = pickle.load(process.stdout)
            return reply
        except (EOFError, OSError, pickle.UnpicklingError):
            process.kill()
            if late.is_set():
                return f"this run could not be read within {self.deadline:g} seconds: no run of Sordino takes so long"
            return "this run ended the process that read it: it is not a run of Sordino"
        finally:
            timer.cancel()

    def _ready(self) -> subprocess.Popen[bytes]:
        """Start a process that waits for questions; its imports do not count as reading."""
        if self._process is None or self._process.poll() is not None:
            # -P: a module in the current folder must not be imported.
            command = [sys.executable, "-P", "-m", "sordino.report.reader"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]  # typeshed lists them one by one
            assert self._process.stdout is not None
            if self._process.stdout.read(1) != _READY:
                raise SordinoError("the process that reads runs does not start: check the installation")
        return self._process


@cache
def start_for_lists() -> Reader:
    """Start the one reader for lists, which price every run once."""
    return Reader(20.0)


@cache
def start_for_pages() -> Reader:
    """Start the one reader for pages of one run, so that they do not wait for the list."""
    return Reader(60.0)


def read(path: Path, *, brief: bool) -> Reply:
    """Read the facts of a run, or say why there are none; a folder can hold anything."""
    try:
        return gather(path, brief=brief)
    except SordinoError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other runs must be shown
        return f"this run cannot be read: {type(error).__name__}"


def answer(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Reply until nobody asks any more."""
    _limit_memory()
    answers.write(_READY)
    answers.flush()
    while True:
        try:
            path, brief, deadline = pickle.load(questions)
        except EOFError:
            return
        _give_up_after(deadline)
        pickle.dump(read(path, brief=brief), answers)
        answers.flush()


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # not on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))


def _give_up_after(seconds: float) -> None:
    """End this process if the one that should kill it was killed first."""
    if hasattr(signal, "alarm"):
        signal.alarm(round(seconds) + 5)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as own:
        os.dup2(2, 1)  # nothing printed may come between the answers
        answer(sys.stdin.buffer, own)
