"""`sordino compare` and `sordino reproduce` from end to end; killed, they go on and repeat nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.errors import InvalidInput
from sordino.lab.experiments import papers
from sordino.lab.experiments.papers import PaperTable, paper_table
from sordino.lab.experiments.pool import Told, explain, run_all
from tests.lab.experiments.cases import small

DEADLINE = 600.0


def started(out: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """A comparison in a process of its own."""
    everything = ["compare", "--dataset", "digits", "--out", out, "--records", 400, "--workers", 1, *arguments]
    return subprocess.Popen([sys.executable, "-m", "sordino.cli", *map(str, everything)], stderr=subprocess.PIPE)


def results(out: Path) -> dict[str, int]:
    """The finished runs, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "results").glob("*.json")}


def compare_killed(out: Path, runs: int, *arguments: object) -> None:
    """Kill a comparison when some of its runs are finished, then let the same command finish the others."""
    process = started(out, *arguments)
    deadline = time.monotonic() + DEADLINE
    while not results(out):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()  # its workers hold the same pipe: this ends when they have noticed and stopped
    before = results(out)
    assert 0 < len(before) < runs
    again = started(out, *arguments)
    _, said = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, said
    after = results(out)
    assert len(after) == runs
    assert {name: after[name] for name in before} == before, "finished runs are not repeated"
    assert (out / "results.csv").read_text().count("\n") == runs + 1


@pytest.mark.slow
def test_a_killed_comparison_goes_on(tmp_path):
    compare_killed(tmp_path, 2, "--method", "dpsgd", "--method", "dpsur", "--epsilon", 3, "--seeds", 1, "--steps", 6)


@pytest.mark.slow
def test_two_methods_two_epsilons_two_seeds_killed_midway(tmp_path):
    chosen = ("--method", "dpsgd", "--method", "dpsur", "--epsilon", 1, "--epsilon", 3)
    compare_killed(tmp_path, 8, *chosen, "--seeds", 2, "--steps", 6)
    rows = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")]
    cells = {(row["method"], row["epsilon"], row["seed"]) for row in rows}
    assert cells == {(method, e, seed) for method in ("dpsgd", "dpsur") for e in (1.0, 3.0) for seed in (0, 1)}
    assert all(row["guarantee"]["epsilon"] <= row["epsilon"] for row in rows)


def stand_in() -> PaperTable:
    """A table about the digits, for the papers' own data are large."""
    variants = {"DPSGD": {"method": "dpsgd"}}
    return replace(
        paper_table("auto-s:table"), name="digits:table", variants=variants, printed={"digits": {"DPSGD": [50.0]}}
    )


@pytest.mark.slow
def test_a_table_is_reproduced(tmp_path, monkeypatch):
    tables = {"digits:table": stand_in()}
    monkeypatch.setattr(papers, "paper_tables", lambda: tables)
    command = ["reproduce", "digits:table", "--quick", "--records", "400", "--steps", "5", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, [*command, "--workers", "2"])
    assert said.exit_code == 0, said.output
    path = tmp_path / "digits-table-quick-records400-steps5.md"
    assert path.read_text().startswith("SHORTENED to 400 records and 5 steps for a try")
    assert not (tmp_path / "digits-table.md").exists(), "a try does not take the place of the table"
    (line,) = [line for line in path.read_text().splitlines() if "| DPSGD" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["digits", "DPSGD", "3", "50"]
    assert all(cell.endswith(" (1)") and 0 < float(cell.removesuffix(" (1)")) <= 100 for cell in cells[4:])
    path.unlink()
    shown = CliRunner().invoke(app, [*command, "--show"])
    assert line in shown.output
    assert not path.exists(), "showing writes nothing"


def test_showing_seconds_measures_none(tmp_path, monkeypatch):
    from sordino.lab.experiments import reproducing

    printed = {"digits": {"DPSGD": [9.0]}}
    variants = {"DPSGD": {"method": "dpsgd", "recipe": {"noise_multiplier": 1.0}}}
    table = replace(paper_table("jl:table2"), name="digits:seconds", variants=variants, printed=printed)
    monkeypatch.setattr(papers, "paper_tables", lambda: {"digits:seconds": table})
    monkeypatch.setattr("sordino.cli.options.PAPER_TABLES", ("digits:seconds",))
    monkeypatch.setattr(reproducing, "time_epoch", lambda case: 7.0)
    command = ["reproduce", "digits:seconds", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, [*command, "--show"])
    assert "| digits | DPSGD | 9 |  |" in shown.output
    assert not list(tmp_path.iterdir())
    said = CliRunner().invoke(app, command)
    assert "| digits | DPSGD | 9 | 7.0 |" in said.output
    kept = (tmp_path / "digits-seconds.md").read_bytes()
    CliRunner().invoke(app, [*command, "--records", "300"])
    assert (tmp_path / "digits-seconds.md").read_bytes() == kept
    assert (tmp_path / "digits-seconds-records300.md").exists()


def test_what_a_table_leaves_out_is_said(tmp_path):
    left_out = "figures without privacy are left out"
    for name, said in (("dpsur:table2", True), ("auto-s:table", False), ("dpsur:table3", False)):
        shown = CliRunner().invoke(app, ["reproduce", name, "--show", "--out", str(tmp_path)])
        assert (left_out in shown.output) is said
    assert "black box, non-private | ∞ | 0.582" in shown.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["compare"], "dataset is missing"),
        (["compare", "--dataset", "nix"], "not configured"),
        (["compare", "--dataset", "digits", "--method", "nix"], "choose one of"),
        (["compare", "--dataset", "digits", "--seeds", "0"], "seeds"),
        (["compare", "--dataset", "digits", "--accounting", "hoped"], "accounting"),
        (["compare", "--dataset", "digits", "--workers", "0"], "workers"),
        (["compare", "--config", "nowhere.toml"], "cannot read"),
        (["compare", "--settings", "nowhere.toml"], "cannot read"),
        (["reproduce"], "table is missing"),
        (["reproduce", "nix:table1"], "choose one of"),
        (["reproduce", "dpsur:table2", "--dataset", "digits"], "it has mnist"),
        (["reproduce", "dpsur:table2", "--seeds", "0"], "seeds"),
        (["reproduce", "dpsur:table2", "--seeds", "2", "--quick"], "quick is one seed"),
        (["reproduce", "dpsur:table2", "--steps", "0"], "steps"),
        (["reproduce", "dpsur:table3", "--workers", "2"], "workers=2 has no effect on dpsur:table3"),
        (["reproduce", "jl:table2", "--seeds", "2"], "seeds=2 has no effect on jl:table2"),
        (["reproduce", "jl:table2", "--steps", "5"], "steps=5 has no effect on jl:table2"),
    ],
)
def test_refusals_are_one_line(arguments, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert word in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is begun"


def test_a_plan_may_be_a_file(tmp_path):
    (tmp_path / "plan.toml").write_text(
        'dataset = "digits"\nmethods = ["dpsgd"]\nepsilons = [1.0]\nseeds = 1\ncolour = 1\n'
    )
    said = CliRunner().invoke(app, ["compare", "--config", str(tmp_path / "plan.toml")])
    assert "colour" in said.output + said.stderr
    from sordino.cli.compare import Comparison, list_cases, read_comparison

    (tmp_path / "plan.toml").write_text('dataset = "digits"\nmethods = ["dpsgd"]\nepsilons = [1.0]\nseeds = 2\n')
    plan = read_comparison(tmp_path / "plan.toml")
    assert plan == Comparison("digits", ("dpsgd",), (1.0,), 2)
    assert [(case.method, case.epsilon, case.seed) for case in list_cases(plan)] == [
        ("dpsgd", 1.0, 0),
        ("dpsgd", 1.0, 1),
    ]
    both = list_cases(replace(plan, accounting="both"))
    assert [case.accounting for case in both] == ["proven", "published", "proven", "published"]


PATCHES = {"kind": "patches", "filters": 2, "side": 3, "grid": 2}


def outcome(folder: Path, **changes: object) -> tuple[Told, list[str]]:
    """What became of one small run in a worker, and the states that were told."""
    states: list[str] = []
    (told,) = run_all([small(**changes)], folder, 1, lambda told: states.append(told.state))
    return told, states


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_one_line_and_not_tried_twice(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.delenv("SORDINO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told, states = outcome(tmp_path / "out", features=PATCHES)
    assert states == ["running", "failed"], "it would fail again in the same way"
    assert re.search(r"^cache folder .*file/sordino/patches cannot be written .*: .* set SORDINO_CACHE", told.error)
    assert "\n" not in told.error


@pytest.mark.parametrize("where", ["results", pytest.param("runs", marks=pytest.mark.slow)])
def test_a_folder_of_results_that_cannot_be_written_is_one_line(tmp_path, where):
    (tmp_path / where).write_text("not a folder")
    told, states = outcome(tmp_path)
    assert states[-1] == "failed"
    assert states.count("failed") == 1
    assert str(tmp_path / where) in told.error
    assert "run again to go on" in told.error


@pytest.mark.slow
def test_long_work_before_a_run_is_announced_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    for run in (0, 1):
        told, _ = outcome(tmp_path / str(run), features=PATCHES, model={"name": "linear", "features": 16})
        assert told.state == "finished", told.error
        said = capsys.readouterr()
        assert ("computing features of patches of 300 records, once" in said.err) == (run == 0)
        assert said.out == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left", "/x"), r"^OSError: \[Errno 28\] No space left: '/x': .*run again to go on$"),
        (MemoryError(), r"^out of memory .*: use fewer --workers, and run again to go on$"),
        (
            RuntimeError("can't allocate memory:\n you tried to allocate 8123 bytes"),
            r"^out of memory .*fewer --workers",
        ),
        (KeyError("nix"), r"^KeyError in test_compare\.py:\d+: correct the method's settings, or report"),
        (RuntimeError("shape '[8123, 10]' is invalid"), r"^RuntimeError in test_compare\.py:\d+: correct"),
        (InvalidInput("records=0 must be\n >= 1"), r"^records=0 must be >= 1$"),
    ],
)
def test_every_failure_is_one_line_with_its_cause_and_a_way_out(error, line):
    with pytest.raises(type(error)) as caught:
        raise error
    said = explain(caught.value)
    assert re.search(line, said)
    assert "\n" not in said
    assert "8123" not in said, "a shape tells how many records the draw had"


@pytest.mark.slow
def test_a_worker_that_dies_is_tried_again_and_takes_nobody_along(tmp_path):
    victims = []

    def tell(told):
        if told.state == "running" and told.step and not victims:
            victims.append(told.case.label)
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
            if children.exists():
                mine = [int(child) for child in children.read_text().split()]
                spawned = [pid for pid in mine if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                os.kill(spawned[-1], signal.SIGKILL)

    outcomes = run_all([small(), small(epsilon=-1.0)], tmp_path, 1, tell)
    assert [told.state for told in outcomes] == ["finished", "failed"]
    assert "epsilon=-1.0 must be" in outcomes[1].error
