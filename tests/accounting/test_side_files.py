"""The file alone holds what was charged: a killed run loses nothing with its side files, and no reader is fooled.

Writers here are forked, so that they start at once; each opens a ledger of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting import store
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks and SIGKILL are POSIX's")

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))


def _fork(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return child


def _killed(path: Path, after: int, delay: float) -> int:
    """A writer killed some time after it acknowledged so many charges; how many it acknowledged in all."""
    reading, writing = os.pipe()

    def write() -> None:
        with Ledger.open(path) as ledger:
            while True:
                os.write(writing, b"%09d" % ledger.charge(STEP).sequence)

    child = _fork(write)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        for _ in range(after):
            last = pipe.read(9)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        rest = pipe.read()
    os.waitpid(child, 0)
    return int(rest[-9:] if len(rest) >= 9 and len(rest) % 9 == 0 else last)


def _delete(side: Path, dice: random.Random) -> None:
    side.unlink()


def _truncate(side: Path, dice: random.Random) -> None:
    content = side.read_bytes()
    side.write_bytes(content[: dice.randrange(len(content) + 1)])


def _flip(side: Path, dice: random.Random) -> None:
    content = bytearray(side.read_bytes())
    if content:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    side.write_bytes(content)


@pytest.mark.parametrize("spoil", [_delete, _truncate, _flip])
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_what_becomes_of_the_side_files_lowers_no_count(
    tmp_path: Path, spoil: Callable[[Path, random.Random], None], kills: int
) -> None:
    path, dice = tmp_path / "ledger.sqlite", random.Random(spoil.__name__)
    Ledger.create(path).close()
    for kill in range(kills):
        acknowledged = _killed(path, dice.randrange(1, 12), dice.uniform(0, 0.01))
        alone = tmp_path / f"alone-{kill}.sqlite"
        shutil.copy(path, alone)  # as somebody does who copies the ledger and nothing else
        spoilt = tmp_path / f"spoilt-{kill}"
        shutil.copytree(tmp_path, spoilt, ignore=lambda *_: [p.name for p in tmp_path.iterdir() if "-" in p.stem])
        for side in tmp_path.glob("ledger.sqlite-*"):
            shutil.copy(side, spoilt)
            spoil(spoilt / side.name, dice)
        for file in (alone, spoilt / "ledger.sqlite"):
            for opening in (Ledger.read, Ledger.open):
                try:
                    with opening(file) as ledger:
                        assert acknowledged <= len(ledger) <= acknowledged + 1
                except LedgerError:
                    continue  # an error is an honest answer; a smaller number is not
        with Ledger.read(path) as reader:  # untouched, nothing may be wrong at all
            assert acknowledged <= len(reader) <= acknowledged + 1


def test_a_damaged_name_that_is_no_text_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path).close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE kinds", b"CREATE \xceABLE kinds"))
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger.read(path)


def test_the_check_above_would_notice_a_write_ahead_log(tmp_path: Path) -> None:
    """The twin: the same ledger in the journal mode of version 0.1 loses its newest rows with the side file."""
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger._connection.execute("PRAGMA journal_mode = WAL")
        for _ in range(5):
            ledger.charge(STEP)
        shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "alone.sqlite")
        with Ledger.read(tmp_path / "alone.sqlite") as alone:
            assert len(alone) < 5


def test_a_hot_journal_is_read_without_writing_anything(tmp_path: Path) -> None:
    """Killed in the middle of a commit: the file holds half of a row, the journal what was there before."""
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger.create(path) as ledger:
        ledger.charge(STEP)
        connection = ledger._connection
        connection.execute("PRAGMA cache_size = 1")  # so that pages go to the file before the commit
        connection.execute("BEGIN")
        connection.execute("INSERT INTO kinds(event) VALUES (?)", ("x" * 100_000,))
        shutil.copytree(path.parent, tmp_path / "copy")
        connection.execute("ROLLBACK")
    copy = tmp_path / "copy"
    assert (copy / "ledger.sqlite-journal").stat().st_size > 1000
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    for mode in (0o755, 0o555):
        copy.chmod(mode)
        with Ledger.read(copy / "ledger.sqlite") as reader:
            assert len(reader) == 1
            assert sum(count for _, count in reader.events()) == 1
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    copy.chmod(0o755)
    with Ledger.open(copy / "ledger.sqlite") as writer:
        assert writer.charge(STEP).sequence == 2


def test_a_journal_that_names_another_file_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    """SQLite deletes the file that such a journal names: a folder that somebody sent must not do that."""
    path, victim = tmp_path / "ledger.sqlite", tmp_path / "precious"
    Ledger.create(path).close()
    victim.write_text("x")
    path.with_name("ledger.sqlite-journal").write_bytes(b"\0" * 512 + os.fsencode(victim) + store._SUPER_JOURNAL)
    for opening in (Ledger.read, Ledger.open):
        with pytest.raises(LedgerError, match="names another file"):
            opening(path)
    assert victim.exists()


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_side_file_that_is_a_link_or_a_pipe_is_refused_and_not_read(tmp_path: Path, suffix: str) -> None:
    """A pipe would be waited for, and /dev/zero read until the memory is full."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path).close()
    beside = path.with_name(path.name + suffix)
    for make in (os.mkfifo, lambda at: at.symlink_to("/dev/zero"), lambda at: at.symlink_to("/nowhere"), Path.mkdir):
        make(beside)
        for opening in (Ledger.read, Ledger.open):
            with pytest.raises(LedgerError, match="not a plain file"):
                opening(path)
        beside.rmdir() if beside.is_dir() else beside.unlink()
    with Ledger.read(path) as ledger:
        assert len(ledger) == 0


# -- readers beside a writer --------------------------------------------------------------------------------------


def test_reading_beside_a_writer_raises_no_false_alarm_and_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path).close()
    reads, counts = 25, [0]

    def write() -> None:
        with Ledger.open(path) as ledger:
            while not (tmp_path / "stop").exists():
                ledger.charge(STEP)
                ledger.declare("assumption", f"{len(ledger)}")

    child = _fork(write)
    try:
        # On a busy machine all these reads may come before the writer's first line.
        while len(counts) <= reads or not counts[-1]:
            with Ledger.read(path) as ledger, ledger.snapshot():
                counts.append(len(ledger))
                assert sum(count for _, count in ledger.events()) == counts[-1]
                assert len(ledger.declared("assumption")) in (counts[-1], counts[-1] - 1)
                ledger.fingerprint()
    finally:
        (tmp_path / "stop").touch()
        os.waitpid(child, 0)
    assert counts == sorted(counts)
    assert counts[-1] > 0, "the writer went on meanwhile"


def test_a_reader_in_the_middle_of_its_question_delays_a_writer_but_does_not_fail_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path) as writer:
        writer.charge(STEP)

        def ask() -> None:
            with Ledger.read(path) as reader, reader.snapshot():
                reader.events()
                (tmp_path / "asking").touch()
                time.sleep(0.5)

        child = _fork(ask)
        while not (tmp_path / "asking").exists():
            time.sleep(0.01)
        assert writer.charge(STEP).sequence == 2
        os.waitpid(child, 0)


# -- one writer -----------------------------------------------------------------------------------------------------


def _second_writer(path: Path) -> str:
    """What another process is told that wants to write."""
    told = path.with_name("told")

    def write() -> None:
        try:
            Ledger.open(path).charge(STEP)
            told.write_text("accepted")
        except LedgerError as error:
            told.write_text(str(error))

    os.waitpid(_fork(write), 0)
    return told.read_text()


def test_the_lock_survives_a_copy_of_the_folder_by_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger.create(path) as ledger:
        shutil.copytree(path.parent, tmp_path / "copy")
        assert "being written" in _second_writer(path)
        assert ledger.charge(STEP).sequence == 1


@pytest.mark.skipif(sys.platform != "linux", reason="locks of open files are Linux's")
def test_the_lock_survives_the_deletion_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path) as ledger:
        path.with_name("ledger.sqlite.lock").unlink()
        assert "being written" in _second_writer(path)
        shutil.copy(path, tmp_path / "elsewhere")
        assert "being written" in _second_writer(path)
        assert ledger.charge(STEP).sequence == 1
    with Ledger.open(path) as ledger:
        assert len(ledger) == 1


def test_a_writer_that_was_overtaken_may_not_go_on(tmp_path: Path) -> None:
    """Where a file system has no locks, the opening in the ledger itself decides: the later one holds."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path) as first:
        first.charge(STEP)
        assert first._lock is not None
        first._lock.close()
        with Ledger.open(path) as second:
            with pytest.raises(LedgerError, match="another writer meanwhile"):
                first.charge(STEP)
            assert second.charge(STEP).sequence == 2


# -- copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_that_is_gone_on_with_says_so_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    with Ledger.create(path) as ledger:
        ledger.charge(STEP)
    shutil.copy(path, copy)
    for _ in range(2):
        with Ledger.open(copy) as ledger:
            assert [line for line in ledger.declared("assumption") if "from a copy" in line] != []
            assert len(ledger.declared("assumption")) == 1
    assert "must not be continued" in caplog.text
    with Ledger.open(path) as original:
        assert original.declared("assumption") == []
    moved = path.rename(tmp_path / "moved.sqlite")
    with Ledger.open(moved) as ledger:
        assert ledger.declared("assumption") == [], "moved is not copied"


# -- what somebody put into the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER swallow BEFORE INSERT ON charges BEGIN SELECT RAISE(IGNORE); END",
        "CREATE TRIGGER more AFTER INSERT ON charges BEGIN DELETE FROM kinds; END",
        "CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "CREATE INDEX quick ON charges(kind)",
        "CREATE TABLE other(x)",
        "DROP TRIGGER no_DELETE_charges",
        "ALTER TABLE kinds ADD COLUMN more TEXT",
    ],
)
def test_a_file_with_anything_that_is_not_ours_is_refused(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path).close()
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    for opening in (Ledger.read, Ledger.open):
        with pytest.raises(LedgerError, match="is not as Sordino makes it"):
            opening(path)


def test_a_trigger_added_while_the_ledger_is_open_cannot_swallow_a_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path) as ledger:
        for table, write in (
            ("charges", lambda: ledger.charge(STEP)),
            ("declarations", lambda: ledger.declare("assumption", "x")),
        ):
            write()
            connection = sqlite3.connect(path)
            connection.execute(f"CREATE TRIGGER swallow BEFORE INSERT ON {table} BEGIN SELECT RAISE(IGNORE); END")
            connection.commit()
            connection.close()
            with pytest.raises(LedgerError, match="swallows rows"):
                ledger.charge(STEP) if table == "charges" else ledger.declare("assumption", "y")
            connection = sqlite3.connect(path)
            connection.execute("DROP TRIGGER swallow")
            connection.commit()
            connection.close()
        assert len(ledger) == 1


def test_a_ledger_is_readable_where_its_owner_alone_may_write(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path) as ledger:
        ledger.charge(STEP)
        path.chmod(stat.S_IRUSR)
        with Ledger.read(path) as reader:  # beside the writer
            assert len(reader) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and links")
@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pipe_or_a_link_beside_the_ledger_is_refused_unopened(tmp_path: Path, suffix: str, kind: str) -> None:
    path, side, victim = tmp_path / "ledger.sqlite", tmp_path / f"ledger.sqlite{suffix}", tmp_path / "victim"
    with Ledger.create(path) as ledger:
        ledger.charge(GaussianDpEvent(1.0))
    victim.write_bytes(b"mine")
    os.mkfifo(side) if kind == "pipe" else side.symlink_to(victim)
    signal.alarm(20)  # opening a pipe waits for ever
    try:
        for opened in (Ledger.read, Ledger.open):
            with pytest.raises(LedgerError, match="not a plain file"):
                opened(path)
    finally:
        signal.alarm(0)
    assert victim.read_bytes() == b"mine"


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_the_lock_is_not_made_through_a_link(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "ledger.sqlite", tmp_path / "elsewhere"
    Ledger.create(path).close()
    path.with_name("ledger.sqlite.lock").unlink()
    path.with_name("ledger.sqlite.lock").symlink_to(elsewhere)
    with pytest.raises(LedgerError):
        Ledger.open(path)
    assert not elsewhere.exists()
