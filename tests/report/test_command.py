"""`sordino report` on a run that `sordino train` made, and the errors of both pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sordino.cli import app
from sordino.errors import InvalidInput
from sordino.report import comparison
from sordino.report.facts import gather
from sordino.report.run_page import render_run
from tests.runs import OUTCOME, history, make_run

ATTACK = "</script><script>window.pwned=1</script><img src=x onerror=alert(1)>"


def sordino(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_from_training_to_a_page(tmp_path: Path):
    run, printed = tmp_path / "run", tmp_path / "outcome.json"
    trained = sordino("train", "--steps", 8, "--epsilon", 3, "--run", run, "--non-private-twin", "--json")
    assert trained.exit_code == 0, trained.stderr
    printed.write_text(trained.stdout)
    shown = sordino("report", run, "--outcome", printed, "--json")
    assert shown.exit_code == 0, shown.stderr
    said, outcome = json.loads(shown.stdout), json.loads(trained.stdout)
    for key in ("epsilon", "delta", "basis", "held_out_accuracy", "twin_accuracy", "steps", "total"):
        assert said[key] == outcome[key], key
    assert set(outcome["assumptions"]) <= set(said["assumptions"])
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Its twin without privacy" in page
    assert 'id="accuracy"' in page
    assert said["ledger"] in page
    words = sordino("report", run, "-o", tmp_path / "page.html")
    assert words.stdout.startswith(f"{tmp_path / 'page.html'}: ε = 3.00 at δ = 1e-05 for every training record, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["run", "--audit", "no.json"], "no.json does not exist"),
        (["run", "-o", "no/such/page.html"], "cannot write no/such/page.html: No such file or directory"),
        (["run", "-o", "page.pdf"], "page.pdf names a PDF, and no PDF is asked for: add --pdf"),
        (["run", "--delta", "2"], "delta=2.0 must be in (0, 1)"),
    ],
)
def test_errors_are_one_line(tmp_path, recipe, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, recipe, events=3)
    result = sordino("report", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_hostile_comparison_stays_text(tmp_path):
    curve = [{"step": step, "accuracy": 0.5} for step in (1, 2)]
    row = {"epsilon": 1, "seed": ATTACK, "accuracy": 0.5, "basis": ATTACK, "curve": curve}
    rows = [{**row, "dataset": ATTACK, "method": ATTACK + str(k), "noise": [1, 2]} for k in range(2)]
    comparison(rows, tmp_path / "page.html", title=ATTACK)
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page
    # The page's own script and one block of data for each of its two charts: at one ε there are bars.
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 3
    assert page.count("pwned") > 10


def test_a_hostile_run_stays_text(tmp_path, recipe):
    outcome = {**OUTCOME, "assumptions": [ATTACK]}
    run = make_run(
        tmp_path, recipe, header={"unit": ATTACK}, files={"outcome.json": outcome, "history.jsonl": history()}
    )
    page = render_run(gather(run))
    assert "<img" not in page
    # Its own script, the data of four charts, and the seal.
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script>", page)) == 6


ROW = {"dataset": "d", "method": "m", "epsilon": 1.0, "seed": 0, "accuracy": 0.5}


@pytest.mark.parametrize(
    "bad",
    [
        {"accuracy": float("nan")},
        {"accuracy": None},
        {"epsilon": 0},
        {"epsilon": "much"},
        {"curve": [{"step": 1}]},
        {"curve": 3},
        {"noise": ["x"]},
    ],
)
def test_results_that_cannot_be_used_are_refused(tmp_path, bad):
    with pytest.raises(InvalidInput, match="cannot be used"):
        comparison([ROW, {**ROW, **bad}], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_comparison_of_little(tmp_path):
    comparison([ROW], tmp_path / "one.html")
    comparison([{**ROW, "epsilon": None}], tmp_path / "none.html")
    comparison([ROW, {**ROW, "epsilon": 2.0}], tmp_path / "two.html")
    assert "Accuracy against" in (tmp_path / "two.html").read_text()
    assert "Accuracy against" not in (tmp_path / "one.html").read_text(), "one ε is no axis"
    assert '<svg class="bar"' in (tmp_path / "one.html").read_text()
    assert "Accuracy against" not in (tmp_path / "none.html").read_text()
    with pytest.raises(InvalidInput, match="at least one run"):
        comparison([], tmp_path / "empty.html")
