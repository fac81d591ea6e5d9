"""The fault tests in small: `make test-faults` runs the large ones, and docs/reliability.md states their figures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.tally import Book, Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL, fork and FIFOs are POSIX's"),
]

SMALL = {"kills": 6, "mutations": 20, "hostile": 4, "requests": 150, "interrupts": 5, "readers": 60}
ROWS = {
    "kills": "kills: ",
    "mutations": "mutations: ",
    "hostile": "commands on hostile folders",
    "requests": "hostile requests",
    "honest": "honest requests",
    "interrupts": "interrupted loops",
    "readers": "reads beside",
    "writers": "second writers",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Tally]:
    """All of them once, in a process of its own, which has one thread when it forks."""
    path = tmp_path_factory.mktemp("faults") / "rows.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    counts = [word for name, count in SMALL.items() for word in (f"--{name}", str(count))]
    command = [sys.executable, "-m", "tests.faults", "--workers", "1", "--write", str(path), *counts]
    done = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr[-3000:]}"
    found = Book.read(path)
    assert done.returncode == (1 if any(row.findings for row in found) else 0)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_found(rows: list[Tally], name: str) -> None:
    mine = [row for row in rows if row.name.startswith(ROWS[name])]
    assert sum(row.done for row in mine) >= SMALL.get(name, 6)
    findings = [f"{row.name}: {kind}: {what}" for row in mine for kind, what in row.findings]
    assert not findings, "\n\n".join(findings[:5])
