"""The ledger: append-only, one writer, readers at any time, and one line for whatever can be wrong with a file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting import store
from sordino.accounting.events import to_json
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.ledger import Ledger, Receipt
from sordino.errors import InvalidInput, LedgerError
from tests import forked

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
OTHER = ComposedDpEvent([GaussianDpEvent(3.0), PoissonSampledDpEvent(0.5, ProjectedGaussian(2.0, 30))])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def _filled(path: Path, charges: int = 5) -> Path:
    with Ledger.create(path, header={"recipe": "abc"}) as ledger:
        for index in range(charges):
            ledger.charge(OTHER if index == 2 else STEP, note=f"step {index}")
            if index == 2:
                ledger.declare("assumption", "the moon is round")
    return path


def _tamper(path: Path, *statements: str) -> None:
    """Edit the file as somebody would who knows SQLite and the schema but not the chain."""
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, definition in triggers:
        connection.execute(definition)
    connection.close()


# -- charging and reading ---------------------------------------------------------------------------------------------


def test_receipts_count_from_one_and_events_are_aggregated_in_order_of_appearance(path: Path) -> None:
    with Ledger.create(path) as ledger:
        assert len(ledger) == 0
        assert ledger.events() == []
        assert [ledger.charge(event) for event in (STEP, OTHER, STEP)] == [
            Receipt(1, STEP),
            Receipt(2, OTHER),
            Receipt(3, STEP),
        ]
        assert len(ledger) == 3
        assert ledger.events() == [(STEP, 2), (OTHER, 1)]
        assert list(ledger.history()) == [(1, STEP), (2, OTHER), (3, STEP)]


def test_reopening_shows_everything(path: Path) -> None:
    with Ledger.open(_filled(path)) as ledger:
        assert ledger.events() == [(STEP, 4), (OTHER, 1)]
        assert ledger.charge(STEP).sequence == 6
    with Ledger.read(path) as ledger:
        assert len(ledger) == 6


def test_another_thread_is_told_to_make_its_own_run(path: Path) -> None:
    with Ledger.create(path) as ledger, ThreadPoolExecutor(1) as threads:
        with pytest.raises(LedgerError, match="opened in another thread: make the run"):
            threads.submit(ledger.charge, GaussianDpEvent(1.0)).result()
        assert ledger.events() == []


def test_header_holds_what_was_given(path: Path) -> None:
    with Ledger.create(path, run_id="abc", header={"unit": "user", "recipe": "123"}) as ledger:
        assert ledger.run_id == "abc"
    with Ledger.read(path) as ledger:
        assert dict(ledger.header) | {"created": ""} == {
            "run_id": "abc",
            "unit": "user",
            "recipe": "123",
            "format": store.FORMAT,
            "created": "",
        }


def test_runs_without_a_name_get_one_of_their_own() -> None:
    with Ledger.in_memory() as one, Ledger.in_memory() as other:
        assert one.run_id != other.run_id
        assert len(one.run_id) == 32


def test_an_event_that_cannot_be_written_is_refused_and_leaves_no_row(path: Path) -> None:
    with Ledger.create(path) as ledger:
        with pytest.raises(InvalidInput):
            ledger.charge(GaussianDpEvent(float("nan")))
        assert len(ledger) == 0


def test_aggregation_is_quick_for_long_runs() -> None:
    with Ledger.in_memory() as ledger:
        rows = [(number + 1, 1 + number % 3, "", b"", b"") for number in range(100_000)]
        for event in (STEP, OTHER, GaussianDpEvent(1.0)):
            ledger._connection.execute("INSERT INTO kinds(event) VALUES (?)", (to_json(event),))
        ledger._connection.executemany("INSERT INTO charges VALUES (?, ?, ?, ?, ?)", rows)
        start = time.process_time()
        events = ledger.events()
        assert time.process_time() - start < 0.2
        assert [count for _, count in events] == [33_334, 33_333, 33_333]


# -- one writer, many readers -----------------------------------------------------------------------------------------


def test_readers_follow_a_writer(path: Path) -> None:
    with Ledger.create(path) as writer, Ledger.read(path) as reader:
        for count in range(1, 4):
            writer.charge(STEP)
            assert len(reader) == count
            assert reader.events() == [(STEP, count)]
        assert reader.fingerprint() == writer.fingerprint()
        with pytest.raises(LedgerError, match="open for reading"):
            reader.charge(STEP)
        assert len(writer) == 3


def test_a_reader_in_another_process_follows_too(path: Path) -> None:
    with Ledger.create(path) as writer:
        writer.charge(STEP)
        code = f"from sordino.accounting.ledger import Ledger; print(len(Ledger.read({str(path)!r})))"
        assert forked.run(code).stdout == "1\n"
        assert writer.charge(STEP).sequence == 2


def test_a_second_writer_is_refused_until_the_first_has_closed(path: Path) -> None:
    first = Ledger.create(path)
    for _ in range(2):
        with pytest.raises(LedgerError, match="being written") as caught:
            Ledger.open(path)
        assert "\n" not in str(caught.value)
    code = f"from sordino.accounting.ledger import Ledger; Ledger.open({str(path)!r})"
    refused = forked.run(code)
    assert "being written" in refused.stderr
    assert first.charge(STEP).sequence == 1
    first.close()
    with Ledger.open(path) as second:
        assert second.charge(STEP).sequence == 2


def test_every_opening_as_a_writer_has_its_own_number(path: Path) -> None:
    numbers = []
    with Ledger.create(path) as ledger:
        numbers.append(ledger.incarnation)
    for _ in range(3):
        with Ledger.open(path) as ledger:
            numbers.append(ledger.incarnation)
        with Ledger.read(path) as reader:
            assert reader.incarnation == numbers[-1]
    assert numbers == [1, 2, 3, 4]
    with Ledger.read(path) as reader:
        assert [number for number, _ in reader.incarnations] == numbers


# -- copying ----------------------------------------------------------------------------------------------------------


def test_copying_moves_the_run_to_a_file(path: Path) -> None:
    memory = Ledger.in_memory(run_id="r", header={"recipe": "abc"})
    memory.charge(STEP)
    incarnation = memory.incarnation
    copied = memory.copy_to(path)
    assert (copied.run_id, copied.events(), copied.path) == ("r", [(STEP, 1)], path)
    assert copied.incarnation > incarnation
    assert copied.charge(STEP).sequence == 2
    with pytest.raises(LedgerError):
        memory.charge(STEP)
    with pytest.raises(LedgerError, match="being written"):
        Ledger.open(path)
    with pytest.raises(LedgerError, match="exists already"):
        copied.copy_to(path)
    copied.close()
    with Ledger.open(path) as ledger:
        assert len(ledger) == 2


# -- append-only ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["header", "kinds", "charges", "declarations"])
def test_rows_can_neither_be_changed_nor_deleted(path: Path, table: str) -> None:
    connection = sqlite3.connect(_filled(path))
    column = connection.execute(f"SELECT name FROM pragma_table_info('{table}') LIMIT 1").fetchone()[0]
    for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = {column}"):
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM charges WHERE sequence = 3",
        "DELETE FROM charges WHERE sequence = 5",
        "DELETE FROM charges",
        "UPDATE charges SET kind = 2 WHERE sequence = 1",
        "UPDATE charges SET note = 'x' WHERE sequence = 1",
        "UPDATE declarations SET text = '2001-01-01T00:00Z'",
        "UPDATE declarations SET after = 4 WHERE number = 2",
        "DELETE FROM declarations WHERE number = 2",
        "INSERT INTO declarations SELECT 3, after, kind, text, chain, signature FROM declarations WHERE number = 2",
        "UPDATE charges SET sequence = 9 WHERE sequence = 5",
        "UPDATE charges SET chain = x'00' WHERE sequence = 5",
        "UPDATE kinds SET event = replace(event, '1.1', '9.9')",
        "DELETE FROM kinds WHERE kind = 2",
        "UPDATE header SET value = 'def' WHERE key = 'recipe'",
        "INSERT INTO charges SELECT 6, kind, note, chain, signature FROM charges WHERE sequence = 5",
    ],
)
@pytest.mark.parametrize("opening", [Ledger.open, Ledger.read])
def test_tampering_shows_on_opening(path: Path, statement: str, opening: Callable[[Path], Ledger]) -> None:
    _tamper(_filled(path), statement)
    with pytest.raises(LedgerError, match=r"was changed|lost rows") as caught:
        opening(path)
    assert "\n" not in str(caught.value)


def test_untouched_files_pass_the_same_check(path: Path) -> None:
    """The twin of the test above: taking the triggers off and putting them back is not mistaken for tampering."""
    _tamper(_filled(path))
    with Ledger.open(path) as ledger:
        assert len(ledger) == 5


def test_fingerprints_tell_histories_apart() -> None:
    def fingerprint(*events: DpEvent) -> str:
        with Ledger.in_memory(run_id="same") as ledger:
            for event in events:
                ledger.charge(event)
            return ledger.fingerprint()

    assert len({fingerprint(), fingerprint(STEP), fingerprint(STEP, STEP), fingerprint(OTHER)}) == 4


# -- declarations -----------------------------------------------------------------------------------------------------


def test_declarations_are_kept_in_order_once_and_by_kind(path: Path) -> None:
    with Ledger.create(path) as ledger:
        ledger.declare("assumption", "b")
        ledger.charge(STEP)
        ledger.declare("plan", "[]")
        ledger.declare("assumption", "a")
        before = ledger.fingerprint()
        ledger.declare("assumption", "b")
        assert ledger.fingerprint() == before
        ledger.charge(STEP)
    with Ledger.read(path) as reader:
        assert reader.declared("assumption") == ["b", "a"]
        assert reader.declared("plan") == ["[]"]
        assert reader.declared("nothing") == []
        assert len(reader) == 2
        with pytest.raises(LedgerError, match="open for reading"):
            reader.declare("assumption", "c")


def test_declarations_are_part_of_the_fingerprint_and_of_their_place() -> None:
    def fingerprint(*lines: str) -> str:
        with Ledger.in_memory(run_id="same") as ledger:
            for line in lines:
                ledger.charge(STEP) if line == "charge" else ledger.declare("assumption", line)
            return ledger.fingerprint()

    orders = [
        ("charge",),
        ("x", "charge"),
        ("charge", "x"),
        ("charge", "y"),
        ("charge", "x", "y"),
        ("charge", "y", "x"),
    ]
    assert len({fingerprint(*order) for order in orders}) == len(orders)


@pytest.mark.parametrize(("kind", "text"), [("opening", "x"), ("origin", "x"), ("", "x"), ("assumption", "")])
def test_what_cannot_be_declared(kind: str, text: str) -> None:
    with Ledger.in_memory() as ledger, pytest.raises(InvalidInput, match="cannot be declared"):
        ledger.declare(kind, text)


def test_declarations_move_to_a_file(path: Path) -> None:
    memory = Ledger.in_memory()
    memory.declare("assumption", "a")
    with memory.copy_to(path) as ledger:
        assert ledger.declared("assumption") == ["a"]
