"""What one durable charge costs, by journal mode: `python benchmarks/ledger_cost.py [--charges N] [--rounds R]`.

Every mode charges a ledger of its own through `Ledger.charge`, the modes by turns, so that all see the same load of the
machine; printed are the median and the fastest tenth of all charges in milliseconds. Beside them stands a bare write
with fsync, the least that anything durable can cost here. The modes other than the one in use change the pragmas.
With `--blocks` the mode in use is timed alone, with so many charges reserved along with one: what each then costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting.ledger import Ledger

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
MODES = [
    ("WAL", "EXTRA", False),  # version 0.1
    ("WAL", "EXTRA", True),
    ("DELETE", "EXTRA", False),
    ("DELETE", "FULL", False),
    ("TRUNCATE", "FULL", False),
    ("PERSIST", "FULL", False),  # the one in use
]

BLOCKS = (1, 2, 4, 8, 16, 32, 65)


def bare_sync(directory: Path) -> Callable[[], None]:
    """Append 100 bytes and sync."""
    descriptor = os.open(directory / "bare", os.O_RDWR | os.O_CREAT)

    def write() -> None:
        os.write(descriptor, b"x" * 100)
        os.fsync(descriptor)

    return write


def charging(directory: Path, journal: str, synchronous: str, counter: bool) -> Callable[[], None]:
    """A charge in this mode, with a second file that counts along if asked for."""
    ledger = Ledger.create(directory / f"{journal}-{synchronous}-{counter}.sqlite")
    ledger._connection.execute(f"PRAGMA journal_mode = {journal}")
    ledger._connection.execute(f"PRAGMA synchronous = {synchronous}")
    beside = os.open(directory / f"{journal}-{synchronous}.count", os.O_RDWR | os.O_CREAT)

    def charge() -> None:
        receipt = ledger.charge(STEP)
        if counter:
            os.pwrite(beside, b"%020d" % receipt.sequence, 0)
            os.fsync(beside)

    return charge


def charging_in_blocks(directory: Path, block: int) -> Callable[[], None]:
    """So many charges, of which the first reserves the others."""
    ledger = Ledger.create(directory / f"block-{block}.sqlite")

    def charge() -> None:
        for _ in range(block):
            ledger.charge(STEP, ahead=lambda: [STEP] * (block - 1))

    return charge


def compare_blocks(directory: Path, rounds: int) -> None:
    """Print what a charge costs by the size of its block: time on the clock, and of the processor."""
    candidates = {block: charging_in_blocks(directory, block) for block in BLOCKS}
    walls: dict[int, list[float]] = {block: [] for block in BLOCKS}
    cpus: dict[int, list[float]] = {block: [] for block in BLOCKS}
    for _ in range(rounds):
        for block, act in candidates.items():
            wall, cpu = time.perf_counter(), time.process_time()
            act()
            walls[block].append(1e3 * (time.perf_counter() - wall) / block)
            cpus[block].append(1e3 * (time.process_time() - cpu) / block)
    for block in BLOCKS:
        wall, cpu = statistics.median(walls[block]), statistics.median(cpus[block])
        fast = statistics.quantiles(walls[block], n=10)[0]
        print(f"block of {block:3d}: median {wall:6.3f} ms, fastest tenth {fast:6.3f} ms, processor {cpu:6.3f} ms")


def main() -> None:
    """Charge in every mode and print what it took."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--charges", type=int, default=20, help="charges of each mode in a round")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--blocks", action="store_true", help="compare sizes of blocks instead")
    options.add_argument("--directory", help="on which disk; default: the temporary directory")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as made:
        place = Path(made)
        if chosen.blocks:
            compare_blocks(place, chosen.rounds)
            return
        candidates = {"bare write and fsync": bare_sync(place)}
        for journal, synchronous, counter in MODES:
            name = f"{journal} {synchronous}" + (" + synced counter" if counter else "")
            candidates[name] = charging(place, journal, synchronous, counter)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(chosen.rounds):
            for name, act in candidates.items():
                for _ in range(chosen.charges):
                    start = time.perf_counter()
                    act()
                    times[name].append(1e3 * (time.perf_counter() - start))
    for name, taken in times.items():
        fast = statistics.quantiles(taken, n=10)[0]
        print(f"{name:28s} median {statistics.median(taken):7.3f} ms   fastest tenth {fast:7.3f} ms")


if __name__ == "__main__":
    main()
