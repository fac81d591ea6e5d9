"""Ranks killed with SIGKILL at random points: the run finishes, and nothing that was drawn is missing in the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import killed
from tests.test_kill import check_draws

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["--monitor-interval=0.05"]


def launch(*command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(command, env=environment, timeout=3000, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


def check(directory: Path, kills: int) -> None:
    position, size = map(int, (directory / "done").read_text().split())
    assert size == 2
    assert 0 < position <= killed.STEPS
    victims = []
    for line in (directory / "killed").read_text().splitlines():
        victim, drawn, recorded = map(int, line.split())
        assert recorded >= drawn, "at a kill, noise had been drawn that the ledger did not know"
        victims.append(victim)
    assert len(victims) == kills
    assert kills < 4 or set(victims) == {0, 1}, "both the leader and the other rank were killed"
    check_draws(directory, killed.STEPS)


def test_killed_anywhere_the_run_finishes_and_nothing_is_under_counted(tmp_path: Path) -> None:
    launch(sys.executable, "-m", killed.__name__, str(tmp_path), "4")
    check(tmp_path, 4)


@pytest.mark.slow
def test_ten_kills_under_torchrun(tmp_path: Path) -> None:
    launch(*TORCHRUN, "--max-restarts=11", str(killed.__file__), str(tmp_path), "10")
    check(tmp_path, 10)
