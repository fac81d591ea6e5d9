"""What can be wrong with a ledger's file or disk: each a refusal in one line, and nothing lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError
from tests import forked

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def _filled(path: Path, charges: int = 5) -> Path:
    with Ledger.create(path, header={"recipe": "abc"}) as ledger:
        for index in range(charges):
            ledger.charge(STEP, note=f"step {index}")
    return path


def _tamper(path: Path, *statements: str) -> None:
    """Edit the file as somebody would who knows SQLite but not the chain."""
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, definition in triggers:
        if "DROP TABLE" not in "".join(statements):
            connection.execute(definition)
    connection.close()


def _not_there(path: Path) -> None:
    return None


def _directory(path: Path) -> None:
    path.mkdir()


def _noise(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def _empty(path: Path) -> None:
    path.touch()


def _other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t(x)")
    connection.commit()
    connection.close()


def _other_format(path: Path) -> None:
    _tamper(_filled(path), "UPDATE header SET value = '99' WHERE key = 'format'")


def _no_table(path: Path) -> None:
    _tamper(_filled(path), "DROP TABLE declarations")


def _torn(path: Path) -> None:
    _filled(path, 400)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _overwritten(path: Path) -> None:
    _filled(path, 400)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 3000] = bytes(3000)
    path.write_bytes(content)


def _foreign_event(path: Path) -> None:
    _filled(path, 0)
    _tamper(path, """INSERT INTO kinds(event) VALUES ('{"event":"os.system","fields":{}}')""")


@pytest.mark.parametrize("opening", [Ledger.open, Ledger.read])
@pytest.mark.parametrize(
    "spoil",
    [_not_there, _directory, _noise, _empty, _other_database, _other_format, _no_table, _torn, _overwritten],
)
def test_unusable_files_are_refused_in_one_line(
    path: Path, spoil: Callable[[Path], None], opening: Callable[[Path], Ledger]
) -> None:
    spoil(path)
    with pytest.raises(LedgerError) as caught:
        opening(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    spoiled_again = path.is_file() and not path.with_name(path.name + "-shm").exists()
    if spoiled_again:  # a refused opening holds no lock
        with pytest.raises(LedgerError) as again:
            Ledger.open(path)
        assert "being written" not in str(again.value)


def test_a_ledger_is_never_overwritten(path: Path) -> None:
    before = _filled(path).read_bytes()
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(path)
    assert path.read_bytes() == before


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger.create(tmp_path / "no" / "ledger.sqlite")


@pytest.fixture
def read_only_run() -> Iterator[Path]:
    """A finished run in a directory that anybody may look into and nobody may write."""
    directory = Path(tempfile.mkdtemp())
    path = _filled(directory / "ledger.sqlite")
    path.with_name(path.name + ".lock").unlink()
    path.chmod(0o444)
    directory.chmod(0o555)
    yield path
    directory.chmod(0o755)
    shutil.rmtree(directory)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_finished_runs_can_be_read_where_nothing_can_be_written(read_only_run: Path) -> None:
    code = f"""
import os
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError
if os.getuid() == 0:
    os.setuid(65534)
print(len(Ledger.read({str(read_only_run)!r})))
try:
    Ledger.open({str(read_only_run)!r})
except LedgerError as error:
    print(error)
"""
    done = forked.run(code)
    assert done.returncode == 0, done.stderr
    count, refusal = done.stdout.strip().split("\n")
    assert count == "5"
    assert "cannot be used" in refusal


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")
def test_a_full_disk_refuses_the_charge_and_keeps_the_rest(path: Path) -> None:
    code = f"""
import resource
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError
ledger = Ledger.create({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    for index in range(10_000):
        receipt = ledger.charge(GaussianDpEvent(1.0 + index), note="x" * 100)
except LedgerError as error:
    print(receipt.sequence, len(ledger), error)
"""
    done = forked.run(code)
    assert done.returncode == 0, done.stderr
    acknowledged, held, message = done.stdout.strip().split(" ", 2)
    assert acknowledged == held
    assert "cannot be used" in message
    assert "\n" not in message
    with Ledger.open(path) as ledger:
        assert len(ledger) == int(acknowledged)


def test_unreadable_events_name_the_ledger(path: Path) -> None:
    _foreign_event(path)
    with Ledger.open(path) as ledger:
        ledger._connection.execute("INSERT INTO charges VALUES (1, 1, '', x'', x'')")
        with pytest.raises(LedgerError, match="unreadable event"):
            ledger.events()


def test_copies_of_a_directory_stay_readable(path: Path, tmp_path: Path) -> None:
    _filled(path)
    (tmp_path / "copy").mkdir()
    shutil.copy(path, tmp_path / "copy" / "ledger.sqlite")
    with Ledger.open(tmp_path / "copy" / "ledger.sqlite") as ledger:
        assert len(ledger) == 5
