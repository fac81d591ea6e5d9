"""A server killed at random points and resumed: nothing is under-counted, no noise repeated, training completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.test_kill import check

KILLS = 8


def test_a_killed_server_under_counts_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.federated.victim", str(tmp_path), str(KILLS)]
    result = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    directories = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    for directory in directories:
        (directory / "killed").touch()  # the last may have come through unharmed
        check(directory)
    assert sum((d / "killed").read_text().count("\n") for d in directories) == KILLS
