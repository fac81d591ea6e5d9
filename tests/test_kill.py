"""Killed with SIGKILL at random points and resumed: nothing is under-counted, no noise repeated, training completes.

The killing is done by `tests.victim`, a process of its own that forks a trainer, kills it, and forks the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sordino.accounting.ledger import Ledger
from tests.helpers import budgeted

KILLS = 20


def test_killed_anywhere_nothing_is_under_counted(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.victim", str(tmp_path), str(KILLS)]
    result = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rounds = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    assert sum((r / "killed").read_text().count("\n") for r in rounds) == KILLS
    for directory in rounds:
        check(directory)


def check(directory: Path) -> None:
    assert (directory / "done").exists(), "training completes in the end"
    for line in (directory / "killed").read_text().splitlines():
        drawn, recorded = map(int, line.split())
        assert recorded >= drawn, "at a kill, noise had been drawn that the ledger did not know"
    check_draws(directory, steps=60)


def check_draws(directory: Path, steps: int) -> None:
    """Hold what was drawn in the end against the ledger and the budget."""
    made = [line.split() for line in (directory / "draws.log").read_text().splitlines()]
    ledger = Ledger.read(directory / "run" / "ledger.sqlite")
    assert len(ledger) >= len(made) > 0
    assert len({value for _, value, _ in made}) == len(made), "noise was repeated"
    assert len({sequence for sequence, _, _ in made}) == len(made), "two draws on one receipt"
    recipe = budgeted(steps=steps)
    assert recipe.budget is not None
    assert recipe.budget.allows(ledger.events())
    assert {float(std) for _, _, std in made} == {recipe.noise_multiplier}, "the noise drawn is the noise recorded"
