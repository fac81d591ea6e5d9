"""Programs in processes of their own that start in milliseconds: forked from a process that has imported the ledger.

A fresh interpreter takes two seconds of the processor to import what prices an event. A program may do here what it may
do there: be killed, change its user, fork, hold a lock.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

import sordino.accounting.ledger  # noqa: F401 - what every program would import


@dataclass(frozen=True)
class Program:
    """One that runs; what it prints can be read while it does."""

    pid: int
    stdout: TextIO

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code once it has ended, or minus the signal that ended it."""
        self.stdout.close()
        return _ask(wait=self.pid)


def start(code: str, *arguments: object) -> Program:
    """Run `code` with `arguments` in ``sys.argv``."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "out"
        os.mkfifo(pipe)
        child = _ask(code=code, arguments=list(map(str, arguments)), stdout=str(pipe))
        return Program(child, pipe.open())


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `code` to its end."""
    if not hasattr(os, "fork"):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        child = _ask(code=code, arguments=list(map(str, arguments)), stdout=str(out), stderr=str(errors))
        return subprocess.CompletedProcess(code, _ask(wait=child), out.read_text(), errors.read_text())


def _ask(**request: Any) -> int:
    server = _start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({**request, "environment": dict(os.environ)}) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _start_server() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", "from tests.forked import serve; serve()"]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # its input ends, and so does it
    return server


def serve() -> None:
    """Fork a child for every program that is asked for and answer with its number, or with how it ended."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _become(asked)
        print(answer, flush=True)


def _become(asked: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if name in asked:
                os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = ["-c", *asked["arguments"]]
        exec(compile(asked["code"], "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - whatever ended the program, its errors say so
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
