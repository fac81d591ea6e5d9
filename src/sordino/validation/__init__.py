"""Finds out, before anything is spent and by behaviour, what is wrong with a model, loss or dataset.

Per-example privacy needs every example's loss, and so its gradient, to be a function of that example, the parameters
and public state alone. No list of layer types decides this: the probe changes one example and watches the others.

Guarantees: before the first draw, at most four records are looked at. Afterwards the model, its buffers, gradients and
flags and all generators of random numbers are bit for bit what they were. A finding is about model and loss, never
about one bad record. Limits: the probe misses mixing that shows on none of the probed records, and state outside the
model; real draws are checked too (`sordino.validation.watching`). The model is probed with its current train/eval
flags: check again after changing them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sordino.accounting.ledger import Ledger
from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients.engine import Objective
from sordino.parts import Always, Selector
from sordino.proposals import Proposer
from sordino.validation.examination import CROWD, Examination, Fetch
from sordino.validation.probing import ProbeFailed, Prober, preserve_model, preserve_randomness
from sordino.validation.randomness import Randomness
from sordino.validation.trial import Finding

__all__ = ["CROWD", "Finding", "check", "check_ledger", "check_length", "check_optimizer", "require_valid"]


SLOW = 3.0
"""After this many seconds, a user who waits for the probe is told so."""

WAITING = (
    "sordino: probing whether model and loss mix examples, before the first step and briefly at steps 1, 2, 4, 8, ...; "
    "nothing is spent yet\n"
)

NO_COMPLEX = "keep its real and imaginary parts in a real one, and use torch.view_as_complex"


def check(
    objective: Objective, parameters: list[nn.Parameter], fetch: Fetch, records: int, crowd: int = CROWD
) -> list[Finding]:
    """Return all findings of a behavioural probe on a few records; an empty list if nothing is wrong.

    `crowd` is how many examples are run at once, by repeating the few records, to see whether a large batch mixes them.
    """
    return _examine(objective, parameters, fetch, records, crowd)[0]


def _examine(
    objective: Objective, parameters: list[nn.Parameter], fetch: Fetch, records: int, crowd: int
) -> tuple[list[Finding], Randomness | None]:
    """Return the findings, and which random numbers the loss drew for the few records."""
    names = {id(p): name for name, p in objective.named_parameters()}
    if not parameters:
        return [
            Finding("parameters", "model", "model has no trainable parameter: set requires_grad=True on some")
        ], None
    if any(is_lazy(tensor) for tensor in (*objective.parameters(), *objective.buffers())):
        message = "model has lazy layers without a shape: run it once on a batch first"
        return [Finding("parameters", "model", message)], None
    if complex_ones := [names.get(id(p), "a parameter") for p in parameters if p.is_complex()]:
        message = f"parameter {complex_ones[0].removeprefix('model.')} is complex: {NO_COMPLEX}"
        return [Finding("parameters", "model", message)], None
    if any(id(p) not in names for p in parameters):
        message = "optimizer holds a parameter that the model does not own: build it from model.parameters()"
        return [Finding("parameters", "optimizer", message)], None
    try:
        with preserve_randomness(objective) as seed, preserve_model(objective) as pristine:
            prober = Prober(pristine, [names[id(p)] for p in parameters], seed, spare=objective)
            examination = Examination(prober, fetch, records, crowd)
            return list(dict.fromkeys(examination.find())), examination.first.randomness
    except ProbeFailed as failure:
        return [Finding.of(failure)], None


def require_valid(
    objective: Objective, parameters: list[nn.Parameter], fetch: Fetch, records: int, crowd: int = CROWD
) -> Randomness:
    """Refuse a model, loss or collate function that `check` objects to; tell a user who waits long why.

    Returns which random numbers the loss drew. What follows from them must be said before the first draw: if it were
    said after a draw, it could tell something about who was in it.
    """
    with tell_if_slow():
        findings, randomness = _examine(objective, parameters, fetch, records, crowd)
    for finding in findings:
        raise UnsupportedModel(finding.message) from finding.cause
    assert randomness is not None
    return randomness


@contextmanager
def tell_if_slow(seconds: float = SLOW) -> Iterator[None]:
    """Print one line to a terminal or a notebook if the block takes longer than so many seconds."""
    looked_at = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    timer = Timer(seconds, lambda: sys.stderr.write(WAITING))
    timer.daemon = True
    if looked_at:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_length(count: int, declared: int | None, unit: str = "record") -> None:
    """Refuse a declared number of records that is clearly wrong; it is public and need not be exact."""
    declared = declared or count
    if abs(count - declared) > max(10, declared // 100):
        raise InvalidInput(
            f"dataset has {count} {unit}s, but the recipe was calibrated for {declared}: calibrate with records={count}"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, selection: Selector | None = None) -> None:
    """Require an optimizer that holds trainable parameters of this model and asks for one gradient per step.

    A `selection` that compares models must see the one to be returned.
    """
    keeps = selection is None or isinstance(selection, Always)
    if not keeps and isinstance(optimizer, Proposer) and optimizer.holds_two:
        raise InvalidInput(
            f"optimizer {type(optimizer).__name__} trains on another model than the one it gives out, and "
            f"selection={type(selection).__name__} tests the former: keep every proposal, or use the inner optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("LBFGS evaluates the loss several times per step, each a release: use SGD, Adam or another")
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := sum(id(p) not in names for p in held):
        raise InvalidInput(
            f"{strangers} of the optimizer's {len(held)} parameters are not in the model: "
            "build the optimizer from model.parameters() after the model is final"
        )
    if complex_ones := [names[id(p)] for p in held if p.is_complex() and p.requires_grad]:
        raise UnsupportedModel(f"parameter {complex_ones[0]} is complex: {NO_COMPLEX}")
    if not any(p.requires_grad for p in held):
        raise InvalidInput(f"none of the optimizer's {len(held)} parameters is trainable: unfreeze some")


def check_ledger(basis: str, ledger: Ledger | None, unit: str = "record") -> None:
    """Refuse to share a ledger with published accounting, which leaves out attempts.

    Nor can releases that protect records be priced with releases that protect their owners: the total would protect
    neither.
    """
    if ledger is not None and (theirs := ledger.header.get("unit", "record")) != unit:
        raise InvalidInput(
            f"ledger= protects every {theirs}, not every {unit}: give one that was made with "
            f'header={{"unit": "{unit}"}}, and make its releases by {unit}, too'
        )
    if ledger is not None and "published" in (basis, ledger.header.get("basis")):
        raise InvalidInput(
            "ledger= cannot be shared with accounting='published', which does not charge what it rejects: "
            "leave ledger= out, or use proven accounting for both"
        )
