"""Work in a forked process under a watchdog, and the command line as a function in it.

The parent has everything imported and priced already, so that a process costs milliseconds. A child that hangs is
killed, one that crashes says so, and nothing that it did to its memory stays.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from typer.testing import CliRunner

from sordino.accounting.ledger import COPIED
from sordino.cli import app

PATIENCE = 60.0
"""Seconds that a child may take: hundreds of times what it needs on an idle machine."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its value, or that it hung, or why it crashed."""

    value: Any = None
    hung: bool = False
    crash: str = ""


def fork(work: Callable[[], Any], errors: Path | None = None) -> int:
    """Start `work` in a child whose exit code is 0 if it returned; what it says on stderr goes to `errors`."""
    child = os.fork()
    if child == 0:
        _live(work, errors)
    return child


def _live(work: Callable[[], Any], errors: Path | None) -> NoReturn:
    status = 1
    try:
        die_with_parent()
        target = os.open(errors or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.enable(2)
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, the parent is told, and nobody else cleans up
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()  # type: ignore[union-attr]
    finally:
        os._exit(status)


def die_with_parent() -> None:
    """Who kills the parent, by a time limit or Ctrl-C, has killed all its children: on Linux the kernel sees to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run(work: Callable[[], Any], patience: float = PATIENCE) -> Ended:
    """Do `work` in a child and bring back what it returns, as JSON has it."""
    receiving, sending = os.pipe()

    def tell() -> None:
        os.close(receiving)
        try:
            said = {"value": work()}
        except BaseException:  # noqa: BLE001  # it is what is looked for
            said = {"crash": traceback.format_exc()}
        with os.fdopen(sending, "w") as pipe:
            json.dump(said, pipe)

    child = fork(tell)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        text = _all_of(pipe.fileno(), time.monotonic() + patience)
    if text is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if text is None:
        return Ended(hung=True)
    if not text:
        return Ended(crash=f"the process ended with status {status}")
    said = json.loads(text)
    return Ended(said.get("value"), crash=said.get("crash", ""))


def _all_of(descriptor: int, end: float) -> bytes | None:
    parts = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


@dataclass(frozen=True)
class Said:
    """What a command said: exit code, output, complaints, and the traceback if it let one escape."""

    code: int
    out: str
    err: str
    traceback: str = ""

    @property
    def json(self) -> dict[str, Any]:
        """The one object that `--json` prints."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def complaint(self) -> str:
        """Its error, without progress, cautions and the notice that a copy is continued: all here are copies."""
        lines = [line for line in self.err.splitlines() if not line.startswith(("caution: ", "{"))]
        lines = [line for line in lines if not (line.startswith("ledger ") and line.endswith(COPIED))]
        return "\n".join(lines)

    @property
    def refused_well(self) -> bool:
        """Whether this is an error as promised: an exit code, and one line."""
        return self.code not in (0, None) and self.complaint.startswith("error: ") and "\n" not in self.complaint


def sordino(*arguments: object) -> Said:
    """`sordino("report", run, "--json")` in this process, as a user would have typed it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    escaped = result.exception is not None and not isinstance(result.exception, SystemExit)
    text = "".join(traceback.format_exception(result.exception)) if escaped else ""
    if not text and "Traceback (most recent call last)" in result.stderr:
        text = result.stderr
    return Said(result.exit_code, result.stdout, result.stderr, text)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` here if the block takes longer: a hang is then told of, and what came before is not lost."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
