"""Runs that are killed or interrupted: nothing spent is forgotten, and they can be gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sordino.accounting import Ledger
from sordino.cli.launch import stop_on_signal
from sordino.errors import LedgerError
from sordino.report.facts import gather

STEPS = 150


def start(small: list[object], run: Path, *more: object) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    arguments = [*small[:-1], STEPS, "--epsilon", 3, "--run", run, "--save-every", 5, "--json", *more]
    command = [sys.executable, "-m", "sordino.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_events(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Until the ledger holds `count` events, read while it is being written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            with Ledger.read(run / "ledger.sqlite") as ledger:
                if len(ledger) >= count:
                    return
        except LedgerError:
            pass  # not created yet
        time.sleep(0.01)
    raise AssertionError(f"{run} did not reach {count} events")


def test_killed_run_is_resumed_within_its_budget(sordino, small, tmp_path):
    run = tmp_path / "run"
    process = start(small, run)
    wait_for_events(process, run, 13)
    process.send_signal(signal.SIGSTOP)
    assert sordino("resume", run).exit_code == 2, "two writers on one run must be refused"
    process.kill()
    process.communicate()
    with Ledger.read(run / "ledger.sqlite") as ledger:
        before = len(ledger)
    assert 13 <= before < STEPS
    result = sordino("resume", run, "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert ledger.incarnation >= 2
        lost = len(ledger) - said["steps"]
    assert 0 <= lost <= 5, "at most the work since the last checkpoint is paid for twice"
    assert said["status"] == ("finished" if lost == 0 else "budget spent")
    assert 2.9 < said["epsilon"] <= 3


def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_130(sordino, small, tmp_path):
    run = tmp_path / "run"
    process = start(small, run)
    wait_for_events(process, run, 10)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = json.loads(output)
    assert said["status"] == "interrupted"
    assert 0 < said["epsilon"] < 3
    result = sordino("resume", run, "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["status"], said["steps"]) == ("finished", STEPS), "a clean interruption loses nothing"
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == STEPS


def test_interrupted_run_says_how_to_resume(sordino, small, tmp_path, monkeypatch):
    from sordino.private import Private

    saved = Private.step

    def step_then_signal(self):
        taken = saved(self)
        if taken.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return taken

    monkeypatch.setattr(Private, "step", step_then_signal)
    result = sordino(*small, "--epsilon", 3, "--run", tmp_path / "run")
    assert result.exit_code == 130
    assert "Interrupted after 2 of 6 steps; the model is saved. ε 3.00 is that of the whole plan" in result.stdout
    assert f"Go on with: sordino resume {tmp_path / 'run'}" in result.stdout
    assert "differential privacy for every" in result.stdout
    priced = sordino("account", tmp_path / "run", "--json")
    told = json.loads(priced.stdout)
    assert told["epsilon"]["pld"]["epsilon"] > 2.9, "the headline is that of the plan"
    assert 0 < told["epsilon_if_stopped_in_advance"]["pld"] < 2.5, "that of the prefix has a condition"
    assert "2 of 6 events are spent" in told["notes"][0]
    words = sordino("account", tmp_path / "run").stdout
    assert "ε if stopped in advance" in words
    assert "depended on nothing that was released" in " ".join(words.split())
    facts = gather(tmp_path / "run")
    assert facts.guarantee.epsilon == told["epsilon"]["pld"]["epsilon"]
    assert any("2 of 6 events are spent" in line for line in facts.guarantee.assumptions)


def test_signals_are_given_back():
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # Python runs the handler between two of its own instructions

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a background
    try:
        with stop_on_signal() as stop:
            assert not stop.requested
            interrupt()
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_finished_run_stays_finished(sordino, small, tmp_path):
    assert sordino(*small, "--epsilon", 3, "--run", tmp_path / "run").exit_code == 0
    first, second = (json.loads(sordino("resume", tmp_path / "run", "--json").stdout) for _ in range(2))
    assert first["steps"] == second["steps"] == 6
    assert first["epsilon"] == second["epsilon"] <= 3


def test_changed_data_are_refused(sordino, small, csv_file, tmp_path):
    assert sordino(*small, "--epsilon", 3, "--run", tmp_path / "run").exit_code == 0
    csv_file.write_text("\n".join(csv_file.read_text().splitlines()[:-5]))
    result = sordino("resume", tmp_path / "run")
    assert result.exit_code == 2
    assert "has 55 training records, not 60" in result.stderr
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) == 6


def test_other_recipe_is_refused(sordino, small, tmp_path):
    run = tmp_path / "run"
    assert sordino(*small, "--epsilon", 3, "--run", run).exit_code == 0
    config = run / "config.toml"
    config.write_text(config.read_text().replace("clip = 1.0", "clip = 2.0"))
    result = sordino("resume", run)
    assert result.exit_code == 2
    assert "load it with the recipe it was made with" in result.stderr


def test_ctrl_c_before_the_first_step_is_one_line_and_130(sordino, small, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sordino.cli.launch.choose", interrupted)
    result = sordino(*small, "--epsilon", 3, "--run", tmp_path / "run")
    assert result.exit_code == 130
    assert result.stderr.startswith("error: interrupted at once")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
