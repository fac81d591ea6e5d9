"""A real PostgreSQL server of the tests' own, on a free port of this machine; None where there is no such program."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("initdb", "postgres", "pg_ctl")
UNPRIVILEGED = "nobody"
"""PostgreSQL refuses to run as root: where the tests do, it runs as this user."""


class Server:
    """Started when made; `stop` ends it. Roles log in by name alone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="vault-"))
        self._as = ["setpriv", f"--reuid={UNPRIVILEGED}", "--clear-groups"] if os.geteuid() == 0 else []
        if self._as:
            shutil.chown(self.folder, UNPRIVILEGED)
        self.data, self.port = self.folder / "data", find_free_port()
        self._call("initdb", "-D", str(self.data), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C")
        self.start()

    def _call(self, *command: str) -> None:
        program = shutil.which(command[0])
        assert program is not None
        done = subprocess.run(
            [*self._as, program, *command[1:]], cwd="/", capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise OSError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder}"
        log = str(self.folder / "log")
        self._call("pg_ctl", "-D", str(self.data), "-l", log, "-w", "-t", "120", "-o", options, "start")

    def stop(self, how: str = "fast") -> None:
        self._call("pg_ctl", "-D", str(self.data), "-w", "-t", "120", "-m", how, "stop")

    def restart(self, how: str = "immediate") -> None:
        """As after a crash of the machine."""
        self.stop(how)
        self.start()

    def address(self, role: str = "postgres", database: str = "postgres") -> str:
        return f"postgresql://{role}@127.0.0.1:{self.port}/{database}"

    def remove(self) -> None:
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)


def find_free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def explain_absence() -> str:
    """Why there is no server here; empty if there can be one."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"PostgreSQL is not installed: no {missing[0]}"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "PostgreSQL refuses to run as root, and setpriv is missing"
    return ""


def wait_until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)
