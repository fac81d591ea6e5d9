"""An interrupt at any moment, and a fork: the ledger stays whole, and what was acknowledged is in it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting.ledger import Ledger
from tests import forked

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))


def interrupted(act: Callable[[], Any], moment: int, *again: int) -> bool:
    """Run `act`, but interrupt it at its bytecode number `moment` (and so many later); whether it got that far."""
    left = [moment, *again]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and left:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # or the interrupt may fall into what somebody has it call
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def _moments(ledger: Ledger, *again: int, stride: int = 1) -> int:
    """Interrupt a charge at every moment there is, going on after each, as a notebook's user would."""
    moment, acknowledged = 1, len(ledger)
    while interrupted(lambda: ledger.charge(STEP), moment, *again):
        assert acknowledged <= len(ledger) <= acknowledged + 1, f"moment {moment}"
        acknowledged = ledger.charge(STEP).sequence
        assert acknowledged == len(ledger)
        moment += stride
    ledger.fingerprint()
    return moment


def test_an_interrupt_at_every_bytecode_leaves_a_whole_ledger() -> None:
    with Ledger.in_memory() as ledger:
        assert _moments(ledger) > 300, "the whole of charge was gone through"
        assert sum(count for _, count in ledger.events()) == len(ledger)


@pytest.mark.parametrize("second", [1, 4, 20])
def test_a_second_interrupt_while_the_first_is_dealt_with_does_no_harm_either(second: int) -> None:
    with Ledger.in_memory() as ledger:
        assert _moments(ledger, second, stride=7) > 300


def test_a_file_survives_interrupts_and_what_it_holds_is_what_was_acknowledged(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        _moments(ledger, stride=23)
        held = len(ledger)
    with Ledger.open(tmp_path / "ledger.sqlite") as again:
        assert len(again) == held
        interrupted(lambda: again.declare("assumption", "a"), 200)
        again.declare("assumption", "a")
        assert again.declared("assumption") == ["a"]
        again.fingerprint()


@pytest.mark.skipif(os.name != "posix", reason="signals and forks are POSIX's")
def test_a_real_ctrl_c_in_a_loop_that_goes_on(tmp_path: Path) -> None:
    """The notebook of the report: 25 loops, each interrupted by a signal at some moment and gone on with."""
    code = f"""
import random, signal
from dp_accounting import GaussianDpEvent
from sordino.accounting.ledger import Ledger
signal.signal(signal.SIGALRM, signal.default_int_handler)
dice = random.Random(5)
ledger = Ledger.create({str(tmp_path / "ledger.sqlite")!r})
acknowledged = interrupts = 0
while interrupts < 25:
    signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.001, 0.02))
    try:
        while True:
            acknowledged = ledger.charge(GaussianDpEvent(1.0)).sequence
    except KeyboardInterrupt:
        interrupts += 1
        assert acknowledged <= len(ledger) <= acknowledged + 1
        acknowledged = len(ledger)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
ledger.close()
print(acknowledged, len(Ledger.open({str(tmp_path / "ledger.sqlite")!r})))
"""
    done = forked.run(code)
    assert done.returncode == 0, done.stderr
    acknowledged, held = map(int, done.stdout.split())
    assert acknowledged == held


@pytest.mark.skipif(os.name != "posix", reason="forks are POSIX's")
def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    code = f"""
import os, sys
from dp_accounting import GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError
ledger = Ledger.create({str(tmp_path / "ledger.sqlite")!r})
ledger.charge(GaussianDpEvent(1.0))
if (child := os.fork()) == 0:
    for write in (lambda: ledger.charge(GaussianDpEvent(2.0)), lambda: ledger.declare("assumption", "x")):
        try:
            write()
        except LedgerError as error:
            print(error, flush=True)
    ledger.close()
    sys.exit(0)
os.waitpid(child, 0)
ledger.charge(GaussianDpEvent(1.0))
try:
    Ledger.open({str(tmp_path / "ledger.sqlite")!r})
except LedgerError as error:
    print(error)
"""
    done = forked.run(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().split("\n")
    assert len(lines) == 3
    assert all("which forked this one" in line for line in lines[:2])
    assert "being written" in lines[2], "the child's end did not free the parent's lock"
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.events() == [(GaussianDpEvent(1.0), 2)]
        assert ledger.declared("assumption") == []


@pytest.mark.skipif(os.name != "posix", reason="forks are POSIX's")
def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As the workers of a loader do when the training is killed."""
    code = f"""
import os, time
from sordino.accounting.ledger import Ledger
ledger = Ledger.create({str(tmp_path / "ledger.sqlite")!r})
begun, begin = os.pipe()
if os.fork() == 0:
    os.write(begin, b".")
    time.sleep(20)
os.read(begun, 1)
os.kill(os.getpid(), 9)
"""
    assert forked.run(code).returncode == -9
    Ledger.open(tmp_path / "ledger.sqlite").close()


def test_what_an_interrupt_left_half_written_is_not_counted_and_enters_no_checkpoint() -> None:
    """A traceback may keep the interrupted transaction alive, as a notebook's does."""
    with Ledger.in_memory() as ledger:
        ledger.charge(STEP)
        kept = ledger._writing()
        kept.__enter__()
        ledger._chain.charge("{}", "")
        assert ledger.head().events == len(ledger) == 1
        assert ledger.charge(STEP).sequence == 2
        ledger.fingerprint()
