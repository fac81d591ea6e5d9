"""Tables of another kind: seconds per epoch, and membership attacks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sordino.experiments import catalogue
from sordino.experiments.attacking import attacked
from sordino.experiments.papers import paper_table
from sordino.experiments.timing import seconds_per_epoch, timed
from tests.experiments.cases import small


def test_an_epoch_takes_as_many_steps_as_it_has_draws(monkeypatch):
    clock = iter(range(0, 100, 6))
    monkeypatch.setattr("sordino.experiments.timing.time.perf_counter", lambda: next(clock))
    case = small(recipe={"name": "dpsgd", "batch_size": 100, "noise_multiplier": 1.0})
    assert seconds_per_epoch(case, steps=2) == 6 / 2 * 3, "six seconds for two steps, three draws of 100 of 300"


def test_the_papers_seconds_stand_beside_ours():
    variants = {"DP-SGD": {"method": "dpsgd", "recipe": {"noise_multiplier": 1.0}}}
    printed = {"digits": {"DP-SGD": [float("inf")]}}
    table = replace(paper_table("jl:table5"), variants=variants, printed=printed)
    text = timed(table, table.cells(["digits"]), catalogue(), records=300)
    (line,) = [line for line in text.splitlines() if "DP-SGD |" in line]
    assert line.startswith("| digits | DP-SGD | out of memory | ")


@pytest.mark.slow
def test_attacks_are_made_once_and_kept(tmp_path):
    printed = {"digits": {"black box, DPSUR": [0.5], "white box, DPSUR": [0.5]}}
    table = replace(paper_table("dpsur:table3"), epsilons=(3.0,), printed=printed)
    cells = table.cells(["digits"])
    assert "| 0.500 |  |  |" in attacked(table, cells, catalogue(), tmp_path, show=True), "nothing is run"
    text = attacked(table, cells, catalogue(), tmp_path, records=600, steps=3)
    files = sorted((tmp_path / "attacks").glob("*.json"))
    assert len(files) == 2, "one target by accounting, both attacks on it"
    assert all(0 <= json.loads(path.read_text())["white box"] <= 1 for path in files)
    assert text == attacked(table, cells, catalogue(), tmp_path, records=600, steps=3, show=True)
