"""A private run whose processes are killed with SIGKILL at random points, and start again together.

Under ``torchrun --max-restarts`` torch's agent starts them again. Started by itself this program forks two ranks and
does the same, without the seconds that each start takes: all ranks end when one does, and all start afresh.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from sordino import Recipe
from sordino.accounting.ledger import Ledger
from sordino.distributed import join
from tests.helpers import budgeted, private
from tests.victim import Logging, lines

STEPS = 60


@cache
def recipe() -> Recipe:
    return budgeted(steps=STEPS)


def train(directory: Path, kills: int) -> None:
    """What a user writes, with a noise source that leaves a line per draw and somebody who kills."""
    torch.set_num_threads(1)
    join("gloo")
    note_kill(directory)
    threat = Threat(directory) if lines(directory / "killed") < kills else None
    run = private(recipe(), source=Logging(directory / "draws.log"), seed=None, validate=False)
    run.resume(directory / "run")
    for step in run.steps():
        if threat is not None:
            threat.comes_closer()
        if step.number % 3 == 0:
            run.save()
    run.save()
    run.close()
    if dist.get_rank() == 0:
        (directory / "done").write_text(f"{run.position} {dist.get_world_size()}")
    dist.barrier()


def note_kill(directory: Path) -> None:
    """After a restart, write down who was killed, what had been drawn until then, and what the ledger knew of it."""
    pending = directory / "pending"
    if dist.get_rank() == 0 and pending.exists():
        path = directory / "run" / "ledger.sqlite"
        recorded = 0
        if path.exists():
            with Ledger.read(path) as ledger:
                recorded = len(ledger)
        with (directory / "killed").open("a") as file:
            file.write(f"{pending.read_text()} {lines(directory / 'draws.log')} {recorded}\n")
        pending.unlink()
    dist.barrier()


class Threat:
    """Kills one rank, chosen by chance, some milliseconds after some step, or while it starts."""

    def __init__(self, directory: Path) -> None:
        chance = random.Random(lines(directory / "killed") + 7)
        self._directory = directory
        self._victim, self._steps, self._wait = chance.randrange(2), chance.randrange(7), chance.random()
        if self._steps == 0:
            self._start(self._wait)

    def comes_closer(self) -> None:
        self._steps -= 1
        if self._steps == 0:
            self._start(self._wait / 50)

    def _start(self, wait: float) -> None:
        if dist.get_rank() == self._victim:
            timer = threading.Timer(wait, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        if not (self._directory / "done").exists():
            (self._directory / "pending").write_text(str(self._victim))
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(directory: Path, kills: int, port: int) -> bool:
    """Fork two ranks and wait until they are done, or until one ends, which ends the other; whether they are done."""
    children = [fork(directory, kills, rank, port) for rank in range(2)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return (directory / "done").exists()


def fork(directory: Path, kills: int, rank: int, port: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            train(directory, kills)
            status = 0
        finally:
            os._exit(status)
    return child


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(directory: Path, kills: int) -> None:
    """Start the two ranks until they are done; what they import and price is at hand when they are forked."""
    private(recipe(), validate=False).step()
    for _ in range(kills + 2):
        if attempt(directory, kills, free_port()):
            return


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), int(sys.argv[2])
    (train if "TORCHELASTIC_RUN_ID" in os.environ else main)(*arguments)
