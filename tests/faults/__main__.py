"""`python -m tests.faults`: break everything that can break, and count what went wrong. Exit code 1 if anything did.

``make test-faults`` runs the counts that docs/reliability.md states. Everything is seeded; times at which signals
arrive are not, so two runs break at different places.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # forks and thread pools do not go together: before torch is imported

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from tests.faults import child, folders, hostile, interrupts, kills, mutations, readers, requests
from tests.faults.tally import Book, stop_after

Suite = Callable[[Path, int, int], Book]
SUITES: dict[str, tuple[Suite, int, bool]] = {
    # what it does, how often by default, and whether the work can be divided among processes
    # (in this order: the longest that cannot be divided first, and the one that can be cut anywhere last)
    "hostile": (hostile.run, len(hostile.FOLDERS), False),
    "kills": (kills.run, 500, True),
    "requests": (requests.run, 5000, False),
    "readers": (readers.run, 2000, False),
    "interrupts": (interrupts.run, 200, True),
    "mutations": (mutations.run, 2000, True),
}


def divide(counts: dict[str, int], workers: int) -> list[tuple[str, int, int]]:
    """Jobs (suite, how often, number of the part), the long ones in as many parts as there are processes."""
    jobs = []
    for name, count in counts.items():
        parts = workers if SUITES[name][2] and count >= 4 * workers else 1
        shares = [count // parts + (part < count % parts) for part in range(parts)]
        jobs += [(name, share, part) for part, share in enumerate(shares) if share]
    return jobs


def work(name: str, count: int, part: int, seed: int, place: Path) -> None:
    """One job, in a process of its own; its rows go to a file."""
    folder = place / f"{name}-{part}"
    folder.mkdir()
    book = SUITES[name][0](folder, count, seed + part)
    book.write(place / f"{name}-{part}.json")


def run(counts: dict[str, int], seed: int, workers: int, place: Path) -> Book:
    """All jobs, at most `workers` at a time; a job that dies is an error of this program."""
    if any(counts.get(name) for name in ("mutations", "hostile", "requests")):
        folders.warm()
    jobs, began = divide(counts, workers), time.monotonic()
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            running[child.fork(lambda job=job: work(*job, seed, place), place / "errors")] = job
        pid, status = os.wait()
        name, count, part = running.pop(pid)
        print(f"{name}: {count} done after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if status:
            raise SystemExit(f"{name}, part {part}: {(place / 'errors').read_text()[-3000:]}")
    book = Book()
    for name, _, part in jobs:
        book.add(Book.read(place / f"{name}-{part}.json"))
    return book


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for name, (_, count, _) in SUITES.items():
        parser.add_argument(f"--{name}", type=int, default=None, help=f"how often (default {count})")
    parser.add_argument("--only", action="store_true", help="run nothing but what is named")
    parser.add_argument("--write", type=Path, help="keep all rows and findings in this file")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long; the table states what was done")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files, and run nothing")
    parser.add_argument("--bound", type=float, default=requests.BOUND, help="seconds for an honest request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--findings", type=int, default=30, help="how many findings to print")
    options = parser.parse_args()
    if options.table:
        book = Book()
        for path in options.table:
            book.add(Book.read(path))
        tell(book, options.findings)
    given = {name: getattr(options, name) for name in SUITES}
    counts = {
        name: (0 if options.only else SUITES[name][1]) if count is None else count for name, count in given.items()
    }
    torch.set_num_threads(1)
    requests.BOUND = options.bound
    began = time.monotonic()
    if options.minutes is not None:
        stop_after(60 * options.minutes)
    with tempfile.TemporaryDirectory(prefix="sordino-faults-") as place:
        book = run({name: count for name, count in counts.items() if count}, options.seed, options.workers, Path(place))
    if options.write is not None:
        book.write(options.write)
    print(f"{(time.monotonic() - began) / 60:.0f} minutes", file=sys.stderr)
    tell(book, options.findings)


def tell(book: Book, most: int) -> NoReturn:
    """Print the table and what was found, and end."""
    print(book.table())
    for row in book.rows.values():
        for note in row.notes:
            print(f"{row.name}: {note}")
    for name, kind, what in book.findings[:most]:
        print(f"\n{kind}: {name}\n  {what[-900:]}")
    sys.exit(1 if book.findings else 0)


if __name__ == "__main__":
    main()
