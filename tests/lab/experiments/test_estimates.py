"""How long a comparison takes is said before it starts, by the runs that came with Sordino; they are shown, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.cli.compare import foretell
from sordino.lab.experiments import results
from sordino.lab.experiments.cases import Case, catalogue
from sordino.lab.experiments.estimates import START, estimate_seconds


@pytest.fixture
def case() -> Case:
    return catalogue()["mnist", "best"].case(3.0)


def test_by_the_method_at_its_epsilon_and_by_the_length_of_a_try(case: Case) -> None:
    whole = {
        "dataset": "mnist",
        "method": "best",
        "epsilon": 3.0,
        "seconds": 80.0,
        "steps": 200,
        "case": case.to_dict(),
    }
    shipped = [whole, {**whole, "epsilon": 1.0, "seconds": 20.0}, {**whole, "method": "other"}]
    assert estimate_seconds(case, shipped) == START + 80.0
    assert estimate_seconds(replace(case, epsilon=9.0), shipped) == START + 50.0
    assert estimate_seconds(replace(case, dataset="digits"), shipped) is None
    short = case.shortened(800, 10)
    share = 10 * short.recipe["batch_size"] / (200 * case.recipe["batch_size"])
    assert estimate_seconds(short, shipped) == pytest.approx(START + 80.0 * share)


def test_it_is_said_before_anything_runs(case: Case, tmp_path: Path) -> None:
    said = foretell([case, replace(case, seed=1)], tmp_path, 2)
    assert said.startswith("2 runs, 2 at a time: about ")
    results.write(tmp_path, {"label": case.label})
    assert foretell([case], tmp_path, 2) == "1 run, 1 of them finished already, 1 at a time"
    assert "known once the first is finished" in foretell([replace(case, dataset="mine", method="mine")], tmp_path, 1)


def test_a_short_run_is_another_run_and_says_so(case: Case) -> None:
    assert not case.short
    assert case.shortened(800, 10).short
    assert case.shortened(800, 10).label != case.label
    assert Case.from_dict({k: v for k, v in case.to_dict().items() if k != "short"}).label == case.label


def test_shipped_runs_are_shown_without_running_anything(tmp_path: Path) -> None:
    assert len(results.read_shipped()) > 100
    shown = CliRunner().invoke(
        app, ["reproduce", "dpsur:table2", "--dataset", "fashion-mnist", "--show", "--out", str(tmp_path / "none")]
    )
    assert shown.exit_code == 0, shown.stderr
    rows = [line for line in shown.stdout.splitlines() if line.startswith("| fashion-mnist")]
    assert any(line.split("|")[-2].strip() for line in rows), "ours, proven"
    assert not (tmp_path / "none").exists()
