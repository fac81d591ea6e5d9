"""The fault tests in small: `make test-faults` runs the large ones, and docs/reliability.md states their figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.tally import Book, Tally

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL, fork and FIFOs are POSIX's")

SMALL = {"kills": 2, "mutations": 3, "hostile": 2, "interrupts": 2, "readers": 20}
ROWS = {
    "kills": "kills: ",
    "mutations": "mutations: ",
    "hostile": "commands on hostile folders",
    "interrupts": "interrupted loops",
    "readers": "reads beside",
    "writers": "second writers",
}


def do(place: Path, counts: dict[str, int]) -> list[Tally]:
    """All of them once, in a process of its own, which has one thread when it forks."""
    path = place / "rows.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    words = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    # Other tests run beside this one, on every core: what is late here by some seconds is no hang.
    limits = ["--only", "--workers", "1", "--bound", "60"]
    command = [sys.executable, "-m", "tests.faults", *limits, "--write", str(path), *words]
    done = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr[-3000:]}"
    found = Book.read(path)
    assert done.returncode == (1 if any(row.findings for row in found) else 0)
    return found


def check(rows: list[Tally], least: int) -> None:
    assert sum(row.done for row in rows) >= least
    findings = [f"{row.name}: {kind}: {what}" for row in rows for kind, what in row.findings]
    assert not findings, "\n\n".join(findings[:5])


@pytest.mark.slow
def test_nothing_is_found(tmp_path: Path) -> None:
    """One test: what it sets up takes most of the time, and must not be done by several workers."""
    rows = do(tmp_path, SMALL)
    for name, beginning in ROWS.items():
        # Folders are asked about by five commands each; of second writers there is one for each trick.
        least = {"hostile": 10, "writers": 6}.get(name) or SMALL[name]
        check([row for row in rows if row.name.startswith(beginning)], least)


@pytest.mark.slow
def test_a_server_under_siege_answers(tmp_path: Path) -> None:
    """The server's own tests have the fast versions."""
    check(do(tmp_path, {"requests": 200}), 400)
