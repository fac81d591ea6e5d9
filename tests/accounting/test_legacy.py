"""Ledgers that version 0.1 wrote: real files of it, finished and killed, are read, gone on with, and checked."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger-0.1"
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
FINGERPRINTS = {
    "finished": "e36fac3b8803fe89eb752753c77fc8ddde2e067f710c0dbe2bb0b0817bc3c18c",
    "killed": "b4c04ad3af345ba4a86629792a88dd9927af0d888223e2c3e5ba618927b62dd7",
}
EVENTS = {
    "finished": [(STEP, 3), (PoissonSampledDpEvent(0.5, ProjectedGaussian(2.0, 30)), 1)],
    "killed": [(STEP, 4)],  # all of them in the write-ahead log alone
}


@pytest.fixture(params=["finished", "killed"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def test_an_old_ledger_is_read_with_all_of_its_rows_and_stays_as_it_was(run: Path) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert ledger.run_id == "golden"
        assert ledger.events() == EVENTS[run.name]
        assert FINGERPRINTS[run.name] in ledger.declared("origin")[0]
        assert ledger.incarnation == {"finished": 2, "killed": 1}[run.name]
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_an_old_ledger_is_gone_on_with_in_the_format_of_today(run: Path) -> None:
    path = run / "ledger.sqlite"
    with Ledger.read(path) as ledger:
        incarnation = ledger.incarnation
    with Ledger.open(path) as ledger:
        assert ledger.events() == EVENTS[run.name]
        assert ledger.incarnation == incarnation + 1
        assert ledger.charge(STEP).sequence == 5
    with Ledger.open(path) as again:
        assert len(again) == 5
        assert again.header["format"] == "2"
    assert not path.with_name("ledger.sqlite-wal").exists()


def test_no_time_of_a_charge_is_left_in_the_file(run: Path) -> None:
    milliseconds = re.compile(rb"\d\d:\d\d:\d\d\.\d\d\d")
    path = run / "ledger.sqlite"
    assert any(milliseconds.search(file.read_bytes()) for file in run.iterdir())
    Ledger.open(path).close()
    assert not any(milliseconds.search(file.read_bytes()) for file in run.iterdir())


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM charges WHERE sequence = 4",
        "UPDATE charges SET time = '2001' WHERE sequence = 1",
        "UPDATE kinds SET event = replace(event, '1.1', '9.9')",
        "UPDATE header SET value = 'def' WHERE key = 'recipe'",
        "UPDATE charges SET note = x'00' WHERE sequence = 2",
        "CREATE VIEW more AS SELECT 1",
    ],
)
def test_tampering_with_an_old_ledger_shows(tmp_path: Path, statement: str) -> None:
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run")) / "ledger.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(statement)
    for _, definition in triggers:
        connection.execute(definition)
    connection.close()
    for opening in (Ledger.read, Ledger.open):
        with pytest.raises(LedgerError, match=r"was changed|lost rows"):
            opening(path)
