"""Conformance: nothing depends on one record beyond what the ledger pays for.

>>> from sordino import recipes
>>> from sordino.audit import conformance
>>> conformance.check(recipes.dpsgd(batch_size=4, steps=2), steps=2).require_passed().passed
True

`check` records a recipe's run and replays it on neighbouring datasets with the same releases; `replay` does so for any
program that makes releases. `check_source` checks a source of noise and `check_event` the price of an event; `answers`
says what an event pays for, to be registered for events of your own. `build_examples` has a small recipe of every
mechanism of the library.
"""

from sordino.audit.conformance.checking import (
    build_examples,
    check,
    check_source,
    choose_neighbours,
    make_program,
)
from sordino.audit.conformance.payments import (
    Answer,
    Choice,
    Energy,
    Noised,
    Outputs,
    Unseen,
    Verdict,
    answers,
    check_event,
    check_prices,
    list_worst,
)
from sordino.audit.conformance.replaying import Conformance, ConformanceFailed, Neighbours, Program, replay
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
    "Program",
    "Tape",
    "Unseen",
    "Verdict",
    "answers",
    "build_examples",
    "check",
    "check_event",
    "check_prices",
    "check_source",
    "choose_neighbours",
    "list_worst",
    "make_program",
    "replay",
]
