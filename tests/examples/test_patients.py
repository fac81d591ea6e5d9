"""The example table is what its script makes: invented, and of the size the README says."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_table_is_what_the_script_writes(tmp_path: Path) -> None:
    made = tmp_path / "patients.csv"
    runpy.run_path(str(EXAMPLES / "make_patients.py"))["main"](made)
    assert made.read_bytes() == (EXAMPLES / "patients.csv").read_bytes()
    assert len(made.read_text().splitlines()) == 3001
