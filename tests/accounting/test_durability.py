"""Killed with SIGKILL at any point, the ledger holds all it acknowledged, blocks nobody and repeats no number."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from sordino.accounting.ledger import Ledger
from tests import forked

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")

WRITER = """
import os, sys
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
os.write(1, f"i{ledger.incarnation}\\n".encode())
while True:
    receipt = ledger.charge(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0 + len(ledger) % 7)))
    os.write(1, f"{receipt.sequence}\\n".encode())
"""


def _killed_writer(path: Path, charges: int) -> tuple[int, int]:
    """Start a writer, kill it once it has acknowledged `charges` charges; its incarnation and last acknowledgement."""
    writer = forked.start(WRITER, path)
    incarnation = int(writer.stdout.readline()[1:])
    last = 0
    for _ in range(charges):
        last = int(writer.stdout.readline())
    writer.kill()
    for line in writer.stdout:
        if line.endswith("\n"):
            last = int(line)
    assert writer.wait() == -signal.SIGKILL
    return incarnation, last


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_nothing_and_blocks_nobody(tmp_path: Path, kills: int) -> None:
    path, dice = tmp_path / "ledger.sqlite", random.Random(20)
    Ledger.create(path).close()
    incarnations = [1]
    for _ in range(kills):
        incarnation, acknowledged = _killed_writer(path, dice.randrange(1, 40))
        with Ledger.read(path) as reader:  # before anybody has cleaned up
            assert acknowledged <= len(reader) <= acknowledged + 1
        incarnations.append(incarnation)
        with Ledger.open(path) as ledger:  # verifies the chain, takes the dead writer's lock
            incarnations.append(ledger.incarnation)
            assert acknowledged <= len(ledger) <= acknowledged + 1
            assert sum(count for _, count in ledger.events()) == len(ledger)
    assert incarnations == list(range(1, 2 * kills + 2))


def test_the_check_would_notice_a_writer_that_is_not_durable(tmp_path: Path) -> None:
    """The twin: a ledger that acknowledges before it has written is caught by the same comparison."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path).close()
    hasty = WRITER.replace(
        "ledger = Ledger.open(sys.argv[1])",
        "ledger = Ledger.open(sys.argv[1])\nledger._connection.execute('BEGIN')\n"
        "from contextlib import nullcontext\nfrom sordino.accounting import store\n"
        "store.transaction = lambda *_: nullcontext()\nstore.leave = lambda _: None",
    )
    writer = forked.start(hasty, path)
    lines = [writer.stdout.readline() for _ in range(11)]
    writer.kill()
    writer.wait()
    with Ledger.read(path) as reader:
        assert int(lines[-1]) > len(reader)
