"""One trial of a search: its settings, what it may spend, its score, and what is kept of it."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sordino.accounting import plans
from sordino.accounting.events import Events, GaussianDpEvent, count_alike, spell_out, tally, unroll
from sordino.accounting.guarantee import CONDITION, UNPROTECTED
from sordino.accounting.ledger import ASSUMPTION, Ledger, collect_ledgers
from sordino.accounting.pricing import require_accountant
from sordino.chance import shield_chance
from sordino.errors import InvalidInput, LedgerError, SordinoError, locate_error
from sordino.noise import Secure, Seeded, Source, add_noise
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.run import FLOATING_POINT, list_assumptions, weaken
from sordino.searching.costs import Cost, chooses_noise, fit_filter
from sordino.searching.spaces import Value

WORST = -math.inf


class Rehearsed(Exception):
    """A rehearsal reached its end: the point where noise would be chosen or a score be given."""


class Candidate:
    """What an objective receives: the settings of its trial, and the only ways to add noise and to score it.

    `trial["lr"]` is a setting. `calibrate` gives a recipe the noise that was charged for, and `score` says how good the
    result is. Charge your own releases to `ledger`. `seed` is a number for other random choices; it is None if chance
    is secret.
    """

    def __init__(
        self,
        settings: dict[str, Value],
        cost: Cost,
        *,
        like: Recipe | None = None,
        unit: str = "record",
        rows_per_unit: int = 1,
        seed: int | None = None,
        noises: dict[str, float] | None = None,
        rehearsing: bool = False,
    ) -> None:
        self.settings, self.cost, self.unit, self.seed = settings, cost, unit, seed
        self.ledger = Ledger.in_memory()
        self.source: Source = Secure() if seed is None else Seeded(seed, 1, 0, 1)
        self._rows_per_unit = rows_per_unit
        self._like, self._rehearsing = like, rehearsing
        self._noises = {} if noises is None else noises
        self.scored: float | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self.settings:
            raise InvalidInput(f"the space has no setting {name!r}: it has {', '.join(self.settings)}")
        return self.settings[name]

    def calibrate(self, recipe: Recipe, *, records: int | None = None) -> Recipe:
        """Return `recipe` with the noise at which this trial costs what was charged for every trial."""
        count = records or (self._like.records if self._like is not None else None)
        if count is None:
            raise InvalidInput("records is missing: trial.calibrate(recipe, records=N), a public number")
        ready, start = replace(recipe.for_records(count), budget=None), self.cost.training_noise
        if chooses_noise(ready, self.cost.budget):
            return self._keep_within_filter(ready)

        def make(noise: float) -> Events:
            return replace(ready, noise_multiplier=noise).plan()

        if tally([*make(start), *self.cost.score_event]) == tally([(self.cost.reference, 1)]):
            noise = start
        else:
            name = repr(tally(make(1.0)))  # only public numbers, which many trials share
            if name not in self._noises:
                self._noises[name] = self.cost.calibrate(make, start)
            noise = self._noises[name]
        if self._rehearsing:
            raise Rehearsed
        return replace(ready, noise_multiplier=noise)

    def _keep_within_filter(self, recipe: Recipe) -> Recipe:
        if self.cost.filter is None:
            raise InvalidInput(
                f"recipe {recipe.name!r} chooses its noise as it goes, which the search has not charged for: give "
                "tune such a recipe as like="
            )
        ready = fit_filter(recipe, self.cost.filter, self.cost.budget.delta)
        assert ready is not None
        if self._rehearsing:
            raise Rehearsed
        return ready

    def score(self, values: Any) -> None:
        """Score this trial by the sum of `values`, one for each held-out record of the same private data, plus noise.

        A value is in [0, 1], such as 1 if the prediction is right; more is better. Values outside are clipped, and a
        value that is not a number counts as 0. If a unit has several records, their sum is divided by the largest
        number that one may have, `rows_per_unit`. The noise was charged for with the trial; a trial is scored once.
        """
        if self._rehearsing:
            raise Rehearsed
        if self.cost.score_noise is None:
            raise InvalidInput("scores were declared public: use trial.score_publicly(number)")
        self._require_unscored()
        given = torch.as_tensor(np.asarray(values, np.float64)).flatten()
        total = torch.nan_to_num(given, nan=0.0).clamp(0.0, 1.0).sum().reshape(1) / self._rows_per_unit
        receipt = self.ledger.charge(GaussianDpEvent(self.cost.score_noise), "score")
        self.scored = float(add_noise(self.source, receipt, total, self.cost.score_noise)[0])

    def score_publicly(self, value: float) -> None:
        """Score this trial by a number that was measured on a public held-out set; more is better."""
        if self._rehearsing:
            raise Rehearsed
        if self.cost.score_noise is not None:
            raise InvalidInput(
                "the score is private: give trial.score one value for each record, or declare public_score=True if the "
                "held-out records are not secret"
            )
        self._require_unscored()
        self.scored = float(value) if not math.isnan(float(value)) else WORST

    def _require_unscored(self) -> None:
        if self.scored is not None:
            raise InvalidInput("this trial has its score already: a second one is not paid for")


@dataclass(frozen=True)
class Tried:
    """Everything that a trial leaves behind; it is thrown away unless the trial wins.

    `said` are the lines, each with its kind, that every guarantee about the trial must state.
    """

    settings: dict[str, Value]
    score: float
    tie: float
    result: Any = None
    failure: str = ""
    said: tuple[tuple[str, str], ...] = ()

    def beats(self, other: Tried | None) -> bool:
        return other is None or (self.score, self.tie) > (other.score, other.tie)


@dataclass(frozen=True)
class KeptRun:
    """What is kept of a `Private` run that an objective returned."""

    recipe: Recipe
    state: dict[str, Any]
    position: int


def attempt(objective: Callable[[Candidate], Any], candidate: Candidate) -> Tried:
    """Run one trial silently. A trial that fails, or that costs more than was charged, gets the worst score."""
    tie, opened = float(candidate.source.uniform(1)[0]), [candidate.ledger]
    try:
        with silence(), shield_chance(candidate.seed), collect_ledgers(candidate.ledger) as opened:
            result = objective(candidate)
            ledgers = _find_charged(result, opened)
            events = [pair for ledger in ledgers for pair in _bill(ledger)]
            _require_announced(ledgers, candidate.cost)
            said = tuple(line for ledger in ledgers for line in _examine(ledger, candidate))
            if isinstance(result, Private):
                said += tuple(
                    (ASSUMPTION, text) for text in list_assumptions(result.run.recipe, FLOATING_POINT, result.run.unit)
                )
            kept = _keep(result)
        if candidate.scored is None:
            raise InvalidInput("the objective gave no score: call trial.score(values) before it returns")
        if not candidate.cost.covers_trial(events):
            raise InvalidInput(
                "the objective released more than was charged for a trial, or kept its charges to itself: use "
                "trial.calibrate(recipe) for one run, and return it or charge trial.ledger; every run of a trial counts"
            )
        return Tried(candidate.settings, candidate.scored, tie, kept, said=said)
    except SordinoError as error:
        return Tried(candidate.settings, WORST, tie, failure=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was, it is a trial that came to nothing
        return Tried(candidate.settings, WORST, tie, failure=locate_error(error))
    finally:
        for ledger in opened:
            ledger.close()


def _find_charged(result: Any, opened: list[Ledger]) -> list[Ledger]:
    """Find every ledger that a trial charged, whatever the objective returned, and the ledger of the returned run."""
    found = [ledger for ledger in opened if ledger.charged]
    own = result.run.ledger if isinstance(result, Private) else None
    return found if own is None or any(ledger is own for ledger in found) else [*found, own]


def _require_announced(ledgers: list[Ledger], cost: Cost) -> None:
    """Refuse releases that may have been chosen because of earlier ones, if their sum would then prove nothing.

    Releases made one by one may have depended on earlier ones. Pricing them afterwards is valid under a filter, and if
    all of them are Gaussian answers on all records, whose sum of 1/σ² is also a filter (docs/proofs/filter.md).
    Anything else must be in a plan that was in its ledger before anything of the trial was charged.
    """
    odd = [ledger for ledger in ledgers if not _are_gaussian(ledger.events())]
    if cost.filter is not None or not odd:
        return
    first = [plan for plan in plans.declared(odd[0]) if plan.after == 0]
    planned = count_alike([run for plan in first for run in plan.events])
    made = count_alike(odd[0].events())
    rest = {text: count - planned.get(text, 0) for text, count in made.items() if count > planned.get(text, 0)}
    beside = [run for ledger in ledgers if ledger is not odd[0] for run in ledger.events()]
    if len(odd) > 1 or not _are_gaussian(spell_out(rest)) or tally(beside) not in (tally([]), tally(cost.score_event)):
        raise InvalidInput(
            "the objective released more than was charged for a trial in one plan: what it made beside a sampled "
            "training may depend on that; make one run for each trial, or charge it to the run's own plan"
        )


def _are_gaussian(events: Events) -> bool:
    return all(isinstance(part, GaussianDpEvent) for event, count in events for part, _ in unroll(event, count))


def _bill(ledger: Ledger) -> Events:
    try:
        return plans.bill_ledger(ledger).events
    except LedgerError as error:
        raise InvalidInput(
            f"a ledger of the trial cannot be counted ({error}): close no run that was charged in a trial"
        ) from None


def _examine(ledger: Ledger, candidate: Candidate) -> list[tuple[str, str]]:
    """Read what a trial's ledger says about itself, which the search must say too; refuse what it cannot say."""
    header, budget = ledger.header, candidate.cost.budget
    promised = weaken("proven", require_accountant(budget.accountant).basis)
    if (unit := header.get("unit", candidate.unit)) != candidate.unit:
        raise InvalidInput(f"the trial's run protects every {unit}, the search every {candidate.unit}: give tune unit=")
    basis = header.get("basis", promised)
    if basis not in (promised, "proven"):
        raise InvalidInput(f"the trial's run is {basis}, the search would be called {promised}: use a proven recipe")
    told = {plan.budget.adjacency for plan in plans.declared(ledger) if plan.budget is not None}
    if other := next(iter(told - {budget.adjacency}), None):
        raise InvalidInput(f"the trial's run has {other} adjacency, the search {budget.adjacency}: use one of them")
    said = [(kind, text) for kind in (ASSUMPTION, CONDITION, UNPROTECTED) for text in ledger.declared(kind)]
    seeded = [(kind, text) for kind, text in said if kind == ASSUMPTION and "SEEDED" in text]
    if seeded and candidate.seed is None:
        raise InvalidInput("the trial's run is SEEDED, the search is not: use seed=trial.seed, or leave the seed out")
    return [line for line in said if line not in seeded]


def _keep(result: Any) -> Any:
    if not isinstance(result, Private):
        return result
    kept = KeptRun(result.bench.recipe, result.state_dict(), result.position)
    result.close()
    return kept


@contextmanager
def silence() -> Iterator[None]:
    """Discard everything that a trial prints, logs or warns about, even from code that is not Python."""
    before = logging.root.manager.disable
    logging.disable(sys.maxsize)  # levels have no end
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            open(os.devnull, "w") as nowhere,  # noqa: PTH123
            _close_outputs(nowhere.fileno()),
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            yield
    finally:
        logging.disable(before)


@contextmanager
def _close_outputs(nowhere: int) -> Iterator[None]:
    """Lead the process's own outputs `nowhere`, if it has any."""
    _flush()
    kept: dict[int, int] = {}
    try:
        for output in (1, 2):
            with suppress(OSError):
                kept[output] = os.dup(output)
                os.dup2(nowhere, output)
        yield
    finally:
        _flush()  # a trial's output that C or Python still hold goes nowhere too
        for output, copy in kept.items():
            os.dup2(copy, output)
            os.close(copy)


def _flush() -> None:
    """Flush the outputs of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
