"""A federated server that is killed at random points: `tests.victim` with rounds in place of steps."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from sordino.federated import InProcessGrid
from tests import victim
from tests.federated.common import line, sending, strategy
from tests.helpers import budgeted


def train(directory: Path) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = sending(lambda place: {"weight": torch.ones(1, 1)})
    source = victim.Logging(directory / "draws.log")
    with strategy(budgeted(steps=60), line(), source=source, seed=None, run=directory / "run", resume=True) as run:
        run.start(InProcessGrid(app, 64))
    (directory / "done").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    victim.train = train
    victim.main(Path(sys.argv[1]), int(sys.argv[2]))
