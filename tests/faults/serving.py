"""`sordino serve` in a process of its own, as a user starts it: one for many questions, since it starts slowly."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.faults.child import die_with_parent

PENDING = "is being priced"
START = 300.0
LATE = 25.0
"""Seconds for one page, also while the process that reads runs starts anew."""


@dataclass
class Target:
    """A running server, as its first line of output tells of it."""

    process: subprocess.Popen[str]
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def connect(self, timeout: float) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def honest(self, path: str = "") -> bytes:
        lines = f"GET /{self.token}/{path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n"
        return lines.encode()

    def get(self, path: str = "", timeout: float = LATE) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            text: str = answer.read().decode()
        return text

    def row(self, name: str, patience: float) -> str | None:
        """The row of a run in the list once it is priced; None if it is not listed.

        Give every folder a name of its own: the server keeps for some seconds what it read under a name.
        """
        end = time.monotonic() + patience
        while True:
            rows = [row for row in self.get().split("<tr>") if f">{name}<" in row]
            if not rows or PENDING not in rows[0]:
                return rows[0] if rows else None
            if time.monotonic() > end:
                raise TimeoutError(f"not done after {patience:g} s")
            time.sleep(0.02)

    def page(self, row: str, timeout: float = LATE) -> str:
        """The page that a row of the list leads to."""
        found = re.search(r'href="(run/[0-9a-f]{16})"', row)
        assert found is not None, row
        return self.get(found[1], timeout)


@contextmanager
def serving(runs: Path, errors: Path, **variables: str) -> Iterator[Target]:
    """`sordino serve` on `runs`, started in that folder."""
    modules = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
    environment = {**os.environ, **variables, "PYTHONPATH": modules}
    words = [sys.executable, "-m", "sordino.cli", "serve", str(runs), "--json"]
    with errors.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=runs,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # this process has one thread
        )
    assert process.stdout is not None
    try:
        address = urlsplit(json.loads(process.stdout.readline())["url"])
        assert address.port is not None
        target = Target(process, address.port, address.path.strip("/"))
        target.get(timeout=START)  # that its reader starts is not what is timed
        yield target
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
