"""From what the user typed to a trained model: the one path of `train` and `demo`."""

from __future__ import annotations

from sordino.cli import session, training
from sordino.cli.choosing import Flags, choose
from sordino.cli.common import caution
from sordino.cli.twin import train_twin
from sordino.data import LOADERS


def launch(flags: Flags) -> None:
    """Train, save and report."""
    config, data = choose(flags)
    begun = session.begin(config, data, flags.run)
    try:
        outcome = training.run(begun)
        twin = None
        if flags.non_private_twin and not outcome.interrupted:
            if config.data.source not in LOADERS:
                caution("the twin and its accuracy are not private: show them to nobody who may not see the records")
            twin = train_twin(begun)
    finally:
        begun.private.close()
    training.report(outcome, as_json=flags.json, twin_accuracy=twin)
