"""Trains a small private run in forked processes that are killed at random points, until it is done; then another.

Every Gaussian that is drawn is written to draws.log before it is used, so that the ledger can be held against it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from sordino.accounting.ledger import Ledger, Receipt
from sordino.noise import Secure
from tests.helpers import budgeted, private


class Logging(Secure):
    """Secure noise that leaves a line per draw, as the noise itself would leave a trace in a released model."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        noise = super().gaussian(receipt, size, std)
        os.write(self._file, f"{receipt.sequence} {noise[0].item()!r} {std!r}\n".encode())
        return noise


def train(directory: Path) -> None:
    fresh = not (directory / "run" / "ledger.sqlite").exists()
    options = {"source": Logging(directory / "draws.log"), "validate": False}
    run = private(budgeted(steps=60), run=directory / "run" if fresh else None, **options)
    if not fresh:
        run.load(directory / "run")
    for step in run.steps():
        if step.number % 3 == 0:
            run.save()
    run.save()
    (directory / "done").touch()


def fork(directory: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            train(directory)
        finally:
            os._exit(0 if (directory / "done").exists() else 1)
    return child


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def kill_once(directory: Path) -> bool:
    """Fork a trainer, let it make some draws, kill it; returns whether it was still alive to be killed."""
    log, already = directory / "draws.log", lines(directory / "draws.log")
    child = fork(directory)
    while lines(log) <= already and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    time.sleep(random.random() * 0.05)
    try:
        os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):
        return False
    if killed:
        with (directory / "killed").open("a") as file:
            file.write(f"{lines(log)} {len(Ledger.read(directory / 'run' / 'ledger.sqlite'))}\n")
    return killed


def main(root: Path, kills: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as warm:  # import and price everything once, so that the forks start at once
        train(Path(warm))
    number = 0
    while kills:
        directory = root / f"round-{number}"
        directory.mkdir(exist_ok=True)
        kills -= kill_once(directory)
        number += (directory / "done").exists()
    if not (directory / "done").exists():
        os.waitpid(fork(directory), 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
