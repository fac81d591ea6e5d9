"""Conformance: nothing depends on one record beyond what the ledger pays for.

>>> from sordino import recipes
>>> from sordino.audit import conformance
>>> conformance.check(recipes.dpsgd(batch_size=4, steps=2), steps=2).require_passed().passed
True

`check` records a recipe's run and replays it on neighbouring datasets with the same releases; `replay` does so for any
program that makes releases; `source` checks a source of noise, `priced` an event, and `answers` says what an event pays
for, to be registered for events of your own.
"""

from sordino.audit.conformance.checking import check, training, usual
from sordino.audit.conformance.payments import (
    Answer,
    Choice,
    Energy,
    Noised,
    Unseen,
    Verdict,
    answers,
)
from sordino.audit.conformance.prices import Outputs, priced, prices, worst
from sordino.audit.conformance.replaying import Conformance, ConformanceFailed, Neighbours, replay
from sordino.audit.conformance.sources import source
from sordino.audit.conformance.tape import Tape

__all__ = [
    "Answer",
    "Choice",
    "Conformance",
    "ConformanceFailed",
    "Energy",
    "Neighbours",
    "Noised",
    "Outputs",
    "Tape",
    "Unseen",
    "Verdict",
    "answers",
    "check",
    "priced",
    "prices",
    "replay",
    "source",
    "training",
    "usual",
    "worst",
]
