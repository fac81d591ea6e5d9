"""A run on a table that is killed while its ranges and classes are released: nothing is forgotten, and it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from sordino.accounting import Ledger
from sordino.accounting.pricing import epsilon
from sordino.cli.session import PREPARATION

RECORDS = 1500
RELEASES = 4
"""Kinds and ranges, means, deviations, names of the classes."""
KILLER = textwrap.dedent("""
    import os, sys
    from sordino.accounting.ledger import Ledger
    from sordino.cli import main
    from sordino.cli import config

    events, moment = int(sys.argv.pop(1)), sys.argv.pop(1)
    charge, write = Ledger.charge, config.Config.write

    def charged(self, event, *more, **named):
        receipt = charge(self, event, *more, **named)
        if moment == "charged" and len(self) == events:
            os._exit(9)  # as SIGKILL would: nothing is closed, nothing is tidied up
        return receipt

    def written(self, directory, *name):
        if moment == "before config" and not name:
            os._exit(9)
        write(self, directory, *name)
        if moment == "after config" and not name:
            os._exit(9)

    Ledger.charge, config.Config.write = charged, written
    main()
""")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    source = np.random.default_rng(0)
    x = source.normal(50, 15, (RECORDS, 2))
    path = tmp_path / "table.csv"
    lines = [f"{a:.1f},{b:.1f},{('no', 'yes')[int(a > b)]}" for a, b in x]
    path.write_text("\n".join(["age,dose,outcome", *lines]))
    return path


def arguments(table: Path, run: Path) -> list[object]:
    chosen = ["--epsilon", 6, "--steps", 8, "--batch-size", 64, "--held-out", 0]
    return ["train", "--data", table, "--target", "outcome", *chosen, "--run", run, "--json"]


def kill(table: Path, run: Path, events: int, moment: str = "charged", command: list[object] | None = None) -> None:
    words = [sys.executable, "-c", KILLER, events, moment, *(command or arguments(table, run))]
    ran = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 9, (ran.stdout, ran.stderr)


def spent(run: Path) -> int:
    with Ledger.read(run / "ledger.sqlite") as ledger:
        return len(ledger)


def finish(sordino, run: Path) -> dict:
    result = sordino("resume", run, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("events", "moment"),
    [
        pytest.param(1, "charged", marks=pytest.mark.slow),
        pytest.param(RELEASES, "charged", marks=pytest.mark.slow),
        pytest.param(0, "before config", marks=pytest.mark.slow),
        pytest.param(0, "after config", marks=pytest.mark.slow),
    ],
)
def test_killed_in_its_preparation_it_is_gone_on_with(sordino, table: Path, tmp_path: Path, events, moment) -> None:
    run = tmp_path / "run"
    kill(table, run, events, moment)
    before = spent(run)
    assert before == (events or RELEASES)
    whole = moment == "after config"
    assert (run / "config.toml").exists() == whole
    assert {PREPARATION, "recipe.toml"} <= {path.name for path in run.iterdir()}
    assert str(table) in (run / PREPARATION).read_text()
    again = sordino(*arguments(table, run))
    assert again.exit_code == 2
    assert f"sordino resume {run}" in again.stderr
    if not whole:
        refused = sordino("audit", run)
        assert refused.exit_code == 2
        assert "not prepared yet" in refused.stderr
    assert spent(run) == before, "looking costs nothing"
    said = finish(sordino, run)
    assert not (run / PREPARATION).exists()
    assert spent(run) == before + (0 if whole else RELEASES) + said["steps"]
    assert said["epsilon"] <= 6
    with Ledger.read(run / "ledger.sqlite") as ledger:
        priced = epsilon(ledger.events(), said["delta"])
    assert priced <= said["epsilon"], "what was released before the kill is in the price"
    assert whole or not before or said["epsilon"] == 6, "how often it began anew may have followed from what was seen"
    assert said["status"] == "finished" or not whole, "only what was paid for twice may cost steps"


@pytest.mark.slow
def test_preparing_again_and_again_ends_at_the_budget(sordino, table: Path, tmp_path: Path) -> None:
    """Each attempt is charged; when another one would exceed the budget it is refused, and nothing more is spent."""
    run = tmp_path / "run"
    kill(table, run, RELEASES)
    with Ledger.open(run / "ledger.sqlite") as ledger:
        for event, count in ledger.events() * 12:
            for _ in range(count):
                ledger.charge(event)
    before = spent(run)
    result = sordino("resume", run)
    assert result.exit_code == 2
    assert "another one would exceed epsilon=6" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert spent(run) == before
    (run / PREPARATION).unlink()  # as version 0.1 left it
    result = sordino("resume", run)
    assert result.exit_code == 2
    assert "`sordino account` says what this one spent" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("events", range(1, RELEASES + 1))
def test_killed_at_every_release_and_once_more(sordino, table: Path, tmp_path: Path, events: int) -> None:
    run = tmp_path / "run"
    kill(table, run, events)
    kill(table, run, events + 2, command=["resume", run])
    assert spent(run) == events + 2
    said = finish(sordino, run)
    assert said["epsilon"] <= 6
    assert spent(run) == events + 2 + RELEASES + said["steps"]
