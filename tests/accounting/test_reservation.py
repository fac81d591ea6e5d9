"""Charges written along with an earlier one: spent for every reader, each given a receipt once, lost at worst."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting.chain import UNUSED
from sordino.accounting.ledger import COPIED, Ledger
from sordino.errors import InvalidInput, LedgerError
from tests import forked
from tests.accounting.test_interrupts import interrupted

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
OTHER = GaussianDpEvent(3.0)


def ahead(count: int, event: DpEvent = STEP) -> Callable[[], Sequence[DpEvent]]:
    return lambda: [event] * count


def at(folder: Path) -> Path:
    return folder / "ledger.sqlite"


# -- what is spent ----------------------------------------------------------------------------------------------------


def test_a_reader_counts_the_reservation_as_spent_and_its_writer_what_it_gave_receipts_for(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger, Ledger.read(at(tmp_path)) as reader:
        assert ledger.charge(STEP, ahead=ahead(4)).sequence == 1
        assert (len(ledger), ledger.events(), ledger.reserved) == (1, [(STEP, 1)], 4)
        assert (len(reader), reader.events(), reader.reserved) == (5, [(STEP, 5)], 0)
        before = at(tmp_path).read_bytes()
        assert [ledger.charge(STEP, ahead=ahead(4)).sequence for _ in range(4)] == [2, 3, 4, 5]
        assert at(tmp_path).read_bytes() == before, "a reserved charge is no write"
        assert len(ledger) == len(reader) == 5
        assert [sequence for sequence, _ in ledger.history()] == [1, 2, 3, 4, 5]
        assert ledger.charge(STEP, ahead=ahead(4)).sequence == 6
        assert ledger.head().events == len(reader) == 10


def test_a_charge_that_is_not_the_next_one_leaves_the_rest_spent() -> None:
    with Ledger.in_memory() as ledger:
        ledger.charge(STEP, ahead=lambda: [STEP, OTHER, STEP])
        ledger.charge(STEP)
        assert ledger.events() == [(STEP, 2)]
        assert ledger.charge(STEP).sequence == 5
        assert ledger.events() == [(STEP, 4), (OTHER, 1)]
        assert (ledger.reserved, ledger.forfeits) == (0, 1)
        assert ledger.charge(OTHER).sequence == 6, "it was in the reservation once, but is no more"


def test_a_charge_with_a_note_is_written_with_its_note(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(2))
        assert ledger.charge(STEP, "the second").sequence == 4
        notes = ledger._connection.execute("SELECT note FROM charges").fetchall()
    assert notes == [("",), ("",), ("",), ("the second",)]


def test_the_version_of_a_ledger_tells_of_every_charge() -> None:
    with Ledger.in_memory() as ledger:
        seen = {ledger.version}
        for act in (lambda: ledger.charge(STEP, ahead=ahead(5)), *[lambda: ledger.charge(STEP)] * 3, ledger.forfeit):
            act()
            assert ledger.version not in seen
            seen.add(ledger.version)


# -- the end of a writer ----------------------------------------------------------------------------------------------


def test_a_writer_that_closes_gives_back_what_it_did_not_use_and_the_next_goes_on_there(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
        ledger.charge(STEP)
    with Ledger.read(at(tmp_path)) as reader:
        assert len(reader) == 5, "whoever reads it meanwhile counts too much, never too little"
        assert reader.declared(UNUSED) == ["3-5"]
    with Ledger.open(at(tmp_path)) as again:
        assert (len(again), again.reserved) == (2, 3)
        assert [again.charge(STEP).sequence for _ in range(4)] == [3, 4, 5, 6]
        again.fingerprint()
    with Ledger.open(at(tmp_path)) as third:
        assert (len(third), third.reserved) == (6, 0)


def test_what_was_given_back_is_taken_up_once(tmp_path: Path) -> None:
    """The second writer takes it up and is killed: the third cannot know what was drawn, so that all of it is spent."""
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
    run_and_kill(at(tmp_path), "assert ledger.reserved == 4; ledger.charge(STEP)")
    with Ledger.open(at(tmp_path)) as third:
        assert (len(third), third.reserved) == (5, 0)
        assert third.charge(STEP).sequence == 6


def test_a_row_after_what_was_given_back_ends_it(tmp_path: Path) -> None:
    """As where a writer without reservations, of an earlier version, has opened the file in between."""
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
    with Ledger.open(at(tmp_path)) as earlier:
        earlier._reserved.clear()
    with Ledger.open(at(tmp_path)) as ledger:
        assert (len(ledger), ledger.reserved) == (5, 0)


@pytest.mark.parametrize("text", ["0-5", "4-3", "2-4", "5-9", "2-5 ", "a-b", "-1-5", "2-" + "9" * 20])
def test_nonsense_is_not_taken_up(tmp_path: Path, text: str) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
        ledger.forfeit()
        with ledger._writing():
            ledger._chain.declare(UNUSED, text)
    with Ledger.open(at(tmp_path)) as again:
        assert (len(again), again.reserved) == (5, 0)


def test_nobody_can_declare_charges_unused(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP)
        with pytest.raises(InvalidInput, match="cannot be declared"):
            ledger.declare(UNUSED, "1-1")


def test_a_copy_does_not_take_up_what_the_original_may_use_too(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
    shutil.copy(at(tmp_path), tmp_path / "copy.sqlite")
    with Ledger.open(tmp_path / "copy.sqlite") as copy:
        assert (len(copy), copy.reserved) == (5, 0)
        assert copy.declared("assumption") == [COPIED]
    with Ledger.open(at(tmp_path)) as original:
        assert original.reserved == 4


def test_a_ledger_that_moves_from_memory_to_a_file_takes_its_reservation_along(tmp_path: Path) -> None:
    memory = Ledger.in_memory()
    memory.charge(STEP, ahead=ahead(4))
    with memory.copy_to(at(tmp_path)) as ledger, Ledger.read(at(tmp_path)) as reader:
        assert (len(ledger), len(reader), memory.reserved) == (1, 5, 0)
        assert ledger.charge(STEP).sequence == 2
        with pytest.raises(LedgerError):
            memory.charge(STEP)


def test_a_closed_ledger_gives_no_receipt(tmp_path: Path) -> None:
    for ledger in (Ledger.in_memory(), Ledger.create(at(tmp_path))):
        ledger.charge(STEP, ahead=ahead(4))
        ledger.close()
        assert not ledger.holds(STEP)
        with pytest.raises(LedgerError, match="cannot be used"):
            ledger.charge(STEP)
        with pytest.raises(LedgerError, match="cannot be used"):
            assert ledger.version


def test_signed_reservations_verify_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_LEDGER_KEY", "ab" * 32)
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
    with Ledger.open(at(tmp_path)) as again:
        assert again.charge(STEP).sequence == 2
    with Ledger.read(at(tmp_path)) as reader:
        assert reader.signature == "checked"
        reader.fingerprint()


# -- what goes wrong --------------------------------------------------------------------------------------------------


def run_and_kill(path: Path, code: str) -> None:
    """Open the ledger in a process of its own, run `code`, and kill the process."""
    program = f"""
import os, signal
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.ledger import Ledger
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
ledger = Ledger.open({str(path)!r})
{code}
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = forked.run(program)
    assert done.returncode == -9, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize("used", [0, 2, 4])
def test_a_killed_writer_leaves_its_reservation_spent(tmp_path: Path, used: int) -> None:
    Ledger.create(at(tmp_path)).close()
    run_and_kill(at(tmp_path), f"for _ in range({1 + used}): ledger.charge(STEP, ahead=lambda: [STEP] * 4)")
    with Ledger.read(at(tmp_path)) as reader:
        assert len(reader) == 5
    with Ledger.open(at(tmp_path)) as ledger:
        assert (len(ledger), ledger.reserved) == (5, 0)
        assert ledger.charge(STEP).sequence == 6, "no number is given twice"


@pytest.mark.skipif(os.name != "posix", reason="forks are POSIX's")
def test_a_forked_child_gets_no_receipt_and_counts_everything_as_spent(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
        child = os.fork()
        if child == 0:
            try:
                right = len(ledger) == 5 and not ledger.holds(STEP)
                ledger.charge(STEP)
            except LedgerError as error:
                os._exit(0 if right and "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert ledger.charge(STEP).sequence == 2


def test_another_thread_gets_no_receipt(tmp_path: Path) -> None:
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP, ahead=ahead(4))
        said: list[str] = []

        def charge() -> None:
            try:
                ledger.charge(STEP)
            except LedgerError as error:
                said.append(str(error))

        thread = threading.Thread(target=charge)
        thread.start()
        thread.join()
        assert "another thread" in said[0]
        assert ledger.reserved == 4


def test_a_second_writer_is_refused_and_a_full_disk_reserves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="limits of the size of files are POSIX's")
    with Ledger.create(at(tmp_path)) as ledger:
        ledger.charge(STEP)
        with pytest.raises(LedgerError, match="being written"):
            Ledger.open(at(tmp_path))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(LedgerError, match="cannot be used"):
                ledger.charge(STEP, ahead=ahead(60))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (len(ledger), ledger.reserved, ledger.head().events) == (1, 0, 1)
        assert ledger.charge(STEP, ahead=ahead(60)).sequence == 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            assert ledger.charge(STEP).sequence == 3, "what is reserved is on disk already"
            ledger.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Ledger.open(at(tmp_path)) as again:
        assert (len(again), again.reserved) == (62, 0), "what could not be given back is spent"


@pytest.mark.parametrize("reserved", [0, 2], ids=["while it is written", "while a receipt is given"])
def test_an_interrupt_at_every_bytecode_gives_no_charge_away(reserved: int) -> None:
    moment = 1
    with Ledger.in_memory() as ledger:
        while True:
            ledger.forfeit()
            last = ledger.charge(STEP, ahead=ahead(reserved)).sequence
            came = interrupted(lambda: ledger.charge(STEP, ahead=ahead(3)), moment)
            spent, end = len(ledger), ledger.head().events
            assert last <= spent <= end
            assert spent + ledger.reserved == end
            following = ledger.charge(STEP, ahead=ahead(3)).sequence
            assert spent < following <= end + 1, "no receipt is given twice"
            assert ledger.events() == [(STEP, following)]
            if not came:
                break
            moment += 2 if reserved else 7
        ledger.fingerprint()
    assert moment > (300 if not reserved else 30), "the whole of charge was gone through"


def test_an_interrupt_at_every_bytecode_of_close_gives_back_all_or_nothing(tmp_path: Path) -> None:
    moment, given = 1, set()
    Ledger.create(at(tmp_path)).close()
    while True:
        ledger = Ledger.open(at(tmp_path))
        ledger.forfeit()
        last = ledger.charge(STEP, ahead=ahead(3)).sequence
        came = interrupted(ledger.close, moment)
        assert not ledger.holds(STEP) or ledger.reserved == 3, "a part of it cannot be used and given back"
        if ledger.reserved:
            assert ledger.charge(STEP).sequence == last + 1
            last += 1
        ledger.close()
        with Ledger.open(at(tmp_path)) as again:
            assert len(again) in (last, again.head().events)
            given.add(again.reserved)
        if not came:
            break
        moment += 31
    assert given >= {0, 3}
