"""Many processes on one budget, killed at random, for a while: nothing overdrawn, nothing lost; and how fast it is.

python -m benchmarks.vault.hammer --place vault.sqlite --processes 8 --seconds 60
python -m benchmarks.vault.hammer --place postgresql://postgres@127.0.0.1:5432/postgres --processes 32 --seconds 60

Each process makes runs with ledgers of their own, reserves, draws and settles; every so often one is killed, by
SIGKILL, wherever it is, and another takes its place. At the end the ledgers are compared with what the vault holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sordino import Budget
from sordino.accounting import plans
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent, add_up, count_alike
from sordino.accounting.ledger import Ledger
from sordino.errors import BudgetExhausted, LedgerError, VaultError
from sordino.vault import DatasetBudget, Vault, open_vault, settle

EVENT = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.5))
NAME = "hammered"


def work(place: str, name: str, folder: Path, seed: int) -> None:
    """Make one small run after the other, until killed."""
    chance, vault = random.Random(seed), None
    while True:
        try:
            vault = vault or open_vault(place)
            make_run(vault, name, folder, chance)
        except VaultError:  # the server is being started again
            time.sleep(0.5)


def make_run(vault: Vault, name: str, folder: Path, chance: random.Random) -> None:
    """Reserve, draw and settle, or forget to."""
    path, steps = folder / f"{uuid.uuid4().hex}.sqlite", chance.randint(1, 8)
    with Ledger.create(path) as ledger:
        plans.declare(ledger, plans.Plan(((EVENT, steps),)))
        claim = DatasetBudget(vault, name).claim()
        try:
            claim.cover(ledger)
        except BudgetExhausted:
            time.sleep(chance.uniform(0.0, 0.05))
            return
        for _ in range(chance.randint(0, steps)):
            claim.require(ledger, EVENT)
            ledger.charge(EVENT)
            claim.note(ledger, EVENT)
        if chance.random() < 0.9:  # others forget it
            claim.settle(ledger)


def hammer(
    place: str,
    processes: int,
    seconds: float,
    *,
    epsilon: float = 3.0,
    kills_per_second: float = 2.0,
    disturb: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Do it, and say what came out; `disturb` is called once, in the middle."""
    name = f"{NAME} {uuid.uuid4().hex[:8]}"
    vault = open_vault(place, create=True)
    vault.create(name, Budget(epsilon, 1e-6))
    context = multiprocessing.get_context("forkserver")  # imports once, for all that are killed and begun again
    context.set_forkserver_preload([__name__])
    chance, kills, disturbed = random.Random(0), 0, disturb is None
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)

        def start(number: int) -> BaseProcess:
            process = context.Process(target=work, args=(place, name, folder, number), daemon=True)
            process.start()
            return process

        crowd = [start(number) for number in range(processes)]
        while len(list(folder.glob("*.sqlite"))) < processes:
            time.sleep(0.05)  # importing is not what is measured
        began, first = time.monotonic(), len(vault.history(name))
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(1 / kills_per_second)
            victim = chance.randrange(processes)
            crowd[victim].kill()
            crowd[victim].join()
            kills += 1
            crowd[victim] = start(processes + kills)
            if not disturbed and passed > seconds / 2 and disturb is not None:
                disturbed = True
                disturb()
        for process in crowd:
            process.kill()
            process.join()
        return _compare(place, name, folder) | {
            "processes": processes,
            "seconds": round(time.monotonic() - began, 1),
            "kills": kills,
            "entries_per_second": round((len(vault.history(name)) - first) / (time.monotonic() - began), 1),
        }


def _compare(place: str, name: str, folder: Path) -> dict[str, Any]:
    """What the vault holds beside what the ledgers hold, before and after the dead are settled."""
    vault = open_vault(place)
    state, runs = vault.state(name), 0
    drawn: dict[str, int] = {}
    overdrafts = 0 if state.rule.allows(state.held) else 1
    lost = 0
    for path in sorted(folder.glob("*.sqlite")):
        try:
            ledger = Ledger.open(path)
        except LedgerError:
            continue  # killed before there was a ledger
        with ledger:
            found = count_alike(ledger.events())
            drawn, runs = add_up(drawn, found), runs + 1
            held = state.runs[ledger.run_id].held if ledger.run_id in state.runs else {}
            lost += sum(max(0, count - held.get(text, 0)) for text, count in found.items())
            if ledger.run_id in state.runs and state.runs[ledger.run_id].status == "reserved":
                settle(DatasetBudget(vault, name), ledger)
    after = vault.state(name)
    return {
        "runs": runs,
        "overdrafts": overdrafts,
        "lost_events": lost,
        "drawn": sum(drawn.values()),
        "held_after_settling": sum(after.held.values()),
        "equal": {text: n for text, n in drawn.items() if n} == {text: n for text, n in after.held.items() if n},
        "used": round(after.rule.cost(after.held) / (after.rule.limit or 1), 3),
        "verdict": vault.verify(name),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", required=True)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    found = hammer(given.place, given.processes, given.seconds)
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["overdrafts"] == found["lost_events"] == 0 and found["equal"] else 1)


if __name__ == "__main__":
    main()
