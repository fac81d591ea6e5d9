"""From what the user typed to a trained model: the one path of `train` and `demo`."""

from __future__ import annotations

from sordino.cli import announcing, describing, session, sources, training
from sordino.cli.choosing import Flags, choose, read_sheet
from sordino.cli.common import caution, console
from sordino.cli.twin import train_twin


def launch(flags: Flags) -> None:
    """Train, save and report."""
    if flags.draft_schema is not None:
        _draft(flags)
        return
    chosen = choose(flags)
    begun = session.begin(chosen, flags.run, lambda: None if flags.json else announcing.plan(chosen))
    try:
        if not flags.json:
            announcing.start(begun)
        outcome = training.run(begun, as_json=flags.json)
        twin = None
        if flags.non_private_twin and not outcome.interrupted:
            if not sources.is_benchmark(begun.config.data.source):
                caution("the twin and its accuracy are not private: show them to nobody who may not see the records")
            twin = train_twin(begun)
            outcome = outcome.assuming("the accuracy of the non-private twin, which was shown, is not covered")
    finally:
        begun.private.close()
    training.report(outcome, as_json=flags.json, twin_accuracy=twin)


def _draft(flags: Flags) -> None:
    assert flags.draft_schema is not None
    sheet = read_sheet(flags)
    describing.draft(sheet.train, sheet.target, flags.draft_schema)
    console().print(f"Wrote {flags.draft_schema}. Make it say what is public, then: --schema {flags.draft_schema}")
