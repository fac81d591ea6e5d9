"""How much memory a table takes on its way from a file to a model, as a multiple of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MOST, FIXED = 4.0, 24 << 20
"""Times the file, and bytes of the buffers that reading any file of some size takes."""
_PROGRAM = """
import json, sys
from pathlib import Path
from sordino.tables.files import read_table
from sordino.tables.training import Wishes, prepare_table, train_table

def read(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) * 1024

def train(path):
    return train_table(prepare_table(read_table(Path(path)), Wishes(target="outcome", epsilon=1.0, seed=0)))

train(sys.argv[1])  # what libraries take at their first use is no part of a table
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
before = read("VmRSS")
held = train(sys.argv[2])
print(json.dumps({"taken": read("VmHWM") - before, "width": held.learned.encoder.width}))
"""


def write(path: Path, records: int) -> Path:
    """Ten columns: numbers of their own, repeated numbers, words."""
    source = np.random.default_rng(records)
    numbers = [np.char.mod("%.3f", source.normal(100, 30, records)) for _ in range(4)]
    counts = [source.integers(0, 90, records).astype(str) for _ in range(3)]
    towns = np.array(["Bern", "Rome", "Oslo", "Genoa"])
    words = [towns[source.integers(0, 4, records)] for _ in range(2)]
    outcome = np.where(numbers[0].astype(float) > 100, "yes", "no")
    names = ",".join([*(f"x{place}" for place in range(9)), "outcome"])
    rows = np.stack([*numbers, *counts, *words, outcome], 1)
    path.write_text("\n".join([names, *(",".join(row) for row in rows.tolist())]) + "\n")
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells how much a process took")
def test_a_table_takes_no_more_than_four_times_its_file(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small.csv", 3_000), write(tmp_path / "large.csv", 150_000)
    told = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(small), str(large)], check=True, capture_output=True, text=True
    )
    found = json.loads(told.stdout)
    assert found["width"] > 50
    assert found["taken"] <= MOST * large.stat().st_size + FIXED, found["taken"] / large.stat().st_size
