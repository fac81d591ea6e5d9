"""`sordino.tune`: random search whose price includes the search.

The order matters. The number of trials and all settings are drawn from the secret source; they are sealed; the whole
search is charged as one event; then the first trial begins. A losing trial leaves nothing: its ledger, its model and
its score are discarded, its output goes nowhere, and no one learns that it ended. A search that was killed continues
with the same number and settings; the interrupted trial starts over, with fresh noise.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from sordino.accounting import plans
from sordino.accounting.budget import Budget
from sordino.accounting.events import Events, count_alike
from sordino.accounting.guarantee import CONDITION, UNPROTECTED, Guarantee
from sordino.accounting.ledger import ASSUMPTION, Ledger, collect_ledgers
from sordino.accounting.pricing import require_accountant
from sordino.accounting.selection import GEOMETRIC, Selection
from sordino.books import LEDGER, reopen, require_fresh
from sordino.chance import shield_chance
from sordino.errors import BudgetExhausted, InvalidInput, SordinoError, locate_error
from sordino.noise import Secure, Seeded, Source
from sordino.recipe import Recipe
from sordino.run import FIXED_IN_ADVANCE, FLOATING_POINT, HELD_OUT, ROUNDING_IS_SMALL, SEARCHED, assemble, weaken
from sordino.searching.costs import Cost, Way, plan_search
from sordino.searching.sealing import Seal, find_memory, hide_times
from sordino.searching.spaces import Space, Value, make_space
from sordino.searching.trials import WORST, Candidate, KeptRun, Rehearsed, Tried, attempt, silence
from sordino.vault.claims import DatasetBudget, RunClaim, require_untied

EXPECTED = 20.0
UNQUOTED = "which is not a guarantee for the winner: it was chosen because of these records"
SECRET = "nobody measured how long the search took, or otherwise learnt how many trials it made"
"""What a search by selection assumes."""
LEAST_SHARE = math.log(1e-18)
"""The law of K ends, beyond its mode, where a number of trials has this probability."""
Objective = Callable[[Candidate], Any]
Suggest = Callable[[Sequence[tuple[dict[str, Value], float]]], dict[str, Value]]


@dataclass(frozen=True)
class Winner:
    """The best trial of a search, the only thing that is released.

    `settings` and `score` are its own. `state` is what its objective returned; for a `Private` run, the model,
    optimizer and recipe. `guarantee` is that of the whole search. `alone` is what the winner would have cost without a
    search. Do not quote it as the winner's guarantee, because the winner was chosen for how well it fits these records.
    """

    settings: dict[str, Value]
    score: float
    state: Any
    guarantee: Guarantee
    cost: Cost
    space: Space
    seen: tuple[tuple[dict[str, Value], float], ...] = field(default=(), repr=False)

    @property
    def alone(self) -> float:
        return self.cost.alone

    @property
    def model(self) -> dict[str, Any]:
        """The weights, for `model.load_state_dict`, if the objective returned a `Private` run."""
        if not isinstance(self.state, KeptRun):
            raise InvalidInput("the objective returned no Private run: what it returned is winner.state")
        model: dict[str, Any] = self.state.state["model"]
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return what may be said about the search: all of it is public."""
        event = self.cost.event
        law = {"eta": event.eta, "gamma": event.gamma} if isinstance(event, Selection) else {}
        return {
            "settings": self.settings,
            "space": self.space.describe(),
            "paid_by": self.cost.way,
            "expected_trials": self.cost.trials,
            **law,
            "epsilon": self.guarantee.epsilon,
            "epsilon_of_one_trial": self.alone,
            "score": self.score,
            "score_noise": self.cost.score_noise,
            "note": ALONE,
        }


ALONE = (
    "epsilon_of_one_trial is not a guarantee for this model: it was chosen among others because of these records, and "
    "only the epsilon of the whole search covers that choice"
)


def tune(
    objective: Objective,
    space: Space | Mapping[str, Any],
    budget: Budget,
    *,
    expected_trials: float = EXPECTED,
    eta: float = GEOMETRIC,
    like: Recipe | None = None,
    records: int | None = None,
    public_score: bool = False,
    disjoint: bool = False,
    way: Way | None = None,
    suggest: Suggest | None = None,
    run: str | Path | None = None,
    unit: str = "record",
    rows_per_unit: int | None = None,
    jobs: int = 1,
    seed: int | None = None,
    vault: DatasetBudget | None = None,
    rehearse: bool = True,
) -> Winner:
    """Return the best of a random number of trials, within a `budget` that covers the whole search.

    `objective(trial)` trains with the settings `trial["lr"]`, ..., gives ``trial.score(values)`` one value in [0, 1]
    for each held-out private record, and returns its `Private` run. Settings are drawn from `space` at random. The
    number of trials is secret; `expected_trials` is its mean, and `eta` its distribution: 1 is geometric; 0 is
    logarithmic, which is cheaper but makes a single trial four times as often.

    `like` is a recipe whose plan all trials follow, if the space has no batch size, length or schedule: then they get
    exactly the right noise. Without it, a trial may be anything that costs no more than one Gaussian release, which
    ``trial.calibrate(recipe, records=N)`` ensures. A recipe that chooses its noise as it goes, like DPIS, must be given
    here; a trial may then be any such recipe, within one filter.

    `public_score` declares the held-out records public: they are not protected. `disjoint` says that each record alone
    determines, for example by its hash, whether it is trained on or held out: then no record is in both parts, and the
    score costs nothing beyond the training.

    `way` is how the search is paid for: "selection" or "composition"; by default the cheaper one. `suggest(seen)`
    chooses settings from earlier ones and their scores: such a search has no proof as selection, and is paid for by
    composition. `unit` is what is protected. If that is not a record, private scores need `rows_per_unit`, the largest
    number of held-out records of one unit: it divides their values, so that a unit moves their sum by at most 1.

    `run` is a folder for the ledger; a search that was killed there continues when it is called again with the same
    arguments. `jobs` trials run at a time. `seed` makes everything repeatable, which protects no one. `vault` is the
    dataset's budget (`sordino.vault.open_budget`), in which the whole search is reserved before it begins; give `like`
    with it, unless every trial makes only Gaussian releases on all records.

    Guarantees: the whole search is charged before its first trial; nothing about a losing trial leaves.
    """
    found = make_space(space)
    if jobs < 1:
        raise InvalidInput(f"jobs={jobs} must be >= 1: it is how many trials run at a time")
    if rows_per_unit is not None and rows_per_unit < 1:
        raise InvalidInput(f"rows_per_unit={rows_per_unit} must be >= 1: the most held-out records that a unit has")
    if unit != "record" and not public_score and rows_per_unit is None:
        raise InvalidInput(
            f"rows_per_unit is missing: a {unit} with many held-out records moves a score by more than its noise is "
            "made for; give the most that one has, a public number"
        )
    if suggest is not None and way == "selection":
        raise InvalidInput(
            "suggest= makes settings because of scores, for which selection has no proof: leave out way, and the "
            "search is paid by composition"
        )
    if suggest is not None and jobs > 1:
        raise InvalidInput(f"jobs={jobs} and suggest= contradict each other: every suggestion waits for the last score")
    ways: tuple[Way, ...] = ("composition",) if suggest is not None else (way,) if way else ("selection", "composition")
    if like is not None:
        open_ended = like.sampler is None or like.steps is None or (like.records is None and records is not None)
        like = like.for_records(_require_records(records, budget)) if open_ended else like
    cost = plan_search(
        budget,
        trials=expected_trials,
        eta=eta,
        like=like,
        score=not public_score,
        ways=ways,
        slack=None if vault is None else 0.0,  # a dataset's budget adds up divergences, which know no slack
        disjoint=disjoint,
    )
    search = Search(
        objective,
        found,
        cost,
        like=like,
        unit=unit,
        rows_per_unit=rows_per_unit or 1,
        jobs=jobs,
        seed=seed,
        suggest=suggest,
        vault=vault,
    )
    if rehearse:
        search.rehearse()
    return search.run(None if run is None else Path(run))


def _require_records(records: int | None, budget: Budget) -> int:
    if records is None:
        raise InvalidInput("records is missing: tune(..., like=recipe, records=N), a public number")
    if budget.delta >= 1 / records:
        raise InvalidInput(f"delta={budget.delta:g} must be < 1/records = {1 / records:g}: use {0.1 / records:.0e}")
    return records


@dataclass
class _Secret:
    """What must survive a kill but no one may see: all settings, the finished trials, and the best of them."""

    settings: list[dict[str, Value]]
    done: set[int]
    space: dict[str, str]
    best: Tried | None = None
    seeds: list[int | None] = field(default_factory=list)
    seen: list[tuple[dict[str, Value], float]] = field(default_factory=list)


class Search:
    """A search that is planned and paid for; `run` starts or continues it."""

    def __init__(
        self,
        objective: Objective,
        space: Space,
        cost: Cost,
        *,
        like: Recipe | None = None,
        unit: str = "record",
        rows_per_unit: int = 1,
        jobs: int = 1,
        seed: int | None = None,
        suggest: Suggest | None = None,
        assumptions: tuple[str, ...] = (ROUNDING_IS_SMALL,),
        vault: DatasetBudget | None = None,
    ) -> None:
        self.objective, self.space, self.cost, self.like = objective, space, cost, like
        self.unit, self.jobs, self.seed, self.suggest = unit, jobs, seed, suggest
        self.assumptions, self.rows_per_unit = assumptions, rows_per_unit
        self._claim = None if vault is None else self._claim_from(vault)
        self._noises: dict[str, float] = {}

    def rehearse(self) -> None:
        """Run the objective until it asks for noise, so that a mistake in it costs nothing."""
        trial = self._make_trial(self.space.draw(Secure().uniform), None, rehearsing=True)
        try:
            with silence(), shield_chance(None), collect_ledgers(trial.ledger):
                self.objective(trial)
        except Rehearsed:
            pass
        except SordinoError:
            raise
        except Exception as error:
            raise InvalidInput(f"the objective fails before its first release: {locate_error(error)}") from error

    def run(self, folder: Path | None = None, ledger: Ledger | None = None) -> Winner:
        """Make all trials, and release the best; `ledger` may be one that is already open for this search."""
        seal = None if folder is None else Seal(folder, find_memory())
        book = ledger or self.open_books(folder)
        try:
            winner = self._run(book, seal)
        finally:
            if ledger is None:
                self.close_books(book)
        if folder is not None and ledger is None:
            hide_times(folder)
        return winner

    def open_books(self, folder: Path | None) -> Ledger:
        """Open the ledger of a new search, or of one that was killed, and declare its plan.

        The dataset's own budget is asked here: the plan is complete, and nothing is charged yet.
        """
        self.preview(folder)
        events: Events = [*self.cost.beside, (self.cost.event, 1)]
        ledger = self._open_ledger(folder)
        try:
            if self._claim is None:
                require_untied(ledger)
            if not ledger.declared(plans.KIND):
                plans.declare(ledger, plans.Plan(tuple(events), len(ledger), self.name, 0, self.cost.budget))
            elif plans.declared(ledger)[-1].events != tuple(events):
                raise InvalidInput(
                    f"{folder} holds another search, or one within another budget: choose another folder"
                )
            if self._claim is not None:
                self._claim.cover(ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def preview(self, folder: Path | None) -> None:
        """Refuse a new search that the dataset's own budget has no room for, before there is a folder."""
        if self._claim is not None and (folder is None or not (folder / LEDGER).exists()):
            self._claim.preview([*self.cost.beside, (self.cost.event, 1)], self.cost.budget.adjacency)

    def close_books(self, ledger: Ledger) -> None:
        """Free the ledger; anything reserved for the search but never charged returns to the dataset's budget."""
        if self._claim is not None:
            self._claim.settle(ledger)
        ledger.close()

    def _settle_early(self, ledger: Ledger) -> None:
        """Settle with the dataset's budget now if all is charged: a later entry would tell how long the search took."""
        planned = count_alike([run for plan in plans.declared(ledger) for run in plan.events])
        if self._claim is not None and count_alike(ledger.events()) == planned:
            self._claim.settle(ledger)

    def _claim_from(self, vault: DatasetBudget) -> RunClaim:
        basis = weaken("proven", require_accountant(self.cost.budget.accountant).basis)
        return vault.claim(unit=self.unit, basis=basis, repeatable=self.seed is not None)

    @property
    def name(self) -> str:
        return "search"

    def _open_ledger(self, folder: Path | None) -> Ledger:
        budget = self.cost.budget
        header = {
            "unit": self.unit,
            "adjacency": budget.adjacency,
            "basis": weaken("proven", require_accountant(budget.accountant).basis),
        }
        if folder is None:
            return Ledger.in_memory(header=header)
        if (folder / LEDGER).exists():
            return reopen(folder)
        require_fresh(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"cannot create run directory {folder}: {error.strerror}") from None
        return Ledger.create(folder / LEDGER, header=header)

    # -- trials -------------------------------------------------------------------------------------------------

    def _run(self, ledger: Ledger, seal: Seal | None) -> Winner:
        source: Source = Secure() if self.seed is None else Seeded(self.seed, ledger.incarnation, 0, 3)
        paid = any(event == self.cost.event for event, _ in ledger.events())
        if paid and not seal:
            raise BudgetExhausted(
                f"{ledger.path} has paid for this search already, and its sealed state is gone: it is over, or was "
                "lost; start a new one elsewhere, which costs its epsilon again"
            )
        if seal:
            secret: _Secret = pickle.loads(seal.read())
            if secret.space != self.space.describe():
                raise InvalidInput(
                    f"{ledger.path} holds a search of another space: give that space to continue it, or another folder"
                )
        else:
            secret = self._draw(source)
            self._keep(secret, seal)  # first: a search that is paid for but has no state could not continue
        self._declare(ledger, source)
        if not paid:
            ledger.charge(self.cost.event, "search")
            self._settle_early(ledger)
        if self.suggest is not None:
            self._try_one_by_one(secret, seal, source)
        elif self.jobs == 1:
            for number in range(len(secret.settings)):
                if number not in secret.done:
                    trial = self._make_trial(secret.settings[number], secret.seeds[number])
                    self._take(secret, number, attempt(self.objective, trial), seal)
        else:
            self._try_many(secret, seal)
        winner = self._announce(secret, ledger)
        if seal is not None:
            seal.destroy()
        return winner

    def _draw(self, source: Source) -> _Secret:
        """Draw the number of trials and the settings of each: by chance alone, before the first trial."""
        count = draw_count(self.cost, source)
        settings = [self.space.draw(source.uniform) for _ in range(count if self.suggest is None else 0)]
        seeds = [None if self.seed is None else self.seed * 1_000_003 + 1 + number for number in range(count)]
        return _Secret(settings, set(), seeds=list(seeds), space=self.space.describe())

    def _make_trial(self, settings: dict[str, Value], seed: int | None, *, rehearsing: bool = False) -> Candidate:
        return Candidate(
            settings,
            self.cost,
            like=self.like,
            unit=self.unit,
            rows_per_unit=self.rows_per_unit,
            seed=seed,
            noises=self._noises,
            rehearsing=rehearsing,
        )

    def _take(self, secret: _Secret, number: int, outcome: Tried, seal: Seal | None) -> None:
        """Keep the better of two trials, and forget the other."""
        secret.done.add(number)
        if self.cost.way == "composition":  # all of them are paid for
            secret.seen.append((outcome.settings, outcome.score))
        if outcome.beats(secret.best):
            secret.best = outcome
        self._keep(secret, seal)

    def _keep(self, secret: _Secret, seal: Seal | None) -> None:
        if seal is not None:
            try:
                seal.write(pickle.dumps(secret))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise InvalidInput(
                    f"what the objective returns cannot be kept on disk ({type(error).__name__}): return the Private "
                    "run or plain data, or leave out run="
                ) from None

    def _try_one_by_one(self, secret: _Secret, seal: Seal | None, source: Source) -> None:
        assert self.suggest is not None
        for number in range(len(secret.done), len(secret.seeds)):
            settings = self.suggest(tuple(secret.seen)) if secret.seen else self.space.draw(source.uniform)
            self._take(secret, number, attempt(self.objective, self._make_trial(settings, secret.seeds[number])), seal)

    def _try_many(self, secret: _Secret, seal: Seal | None) -> None:
        """Run each trial in its own process; when that ends, everything it knew is gone."""
        forks = "fork" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        waiting = [number for number in range(len(secret.settings)) if number not in secret.done]
        running: dict[Connection, tuple[int, Any]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    number = waiting.pop(0)
                    mine, theirs = context.Pipe(duplex=False)
                    parts = (theirs, self, secret.settings[number], secret.seeds[number])
                    process = context.Process(target=_work, args=parts, daemon=True)
                    process.start()
                    theirs.close()
                    running[mine] = (number, process)
                for pipe in wait(list(running)):
                    assert isinstance(pipe, Connection)
                    number, process = running.pop(pipe)
                    try:
                        outcome: Tried = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        tie = float(Secure().uniform(1)[0])
                        outcome = Tried(secret.settings[number], WORST, tie, failure="a trial's process died")
                    pipe.close()
                    process.join()
                    self._take(secret, number, outcome, seal)
        finally:
            for pipe, (_, process) in running.items():
                process.terminate()
                process.join()
                pipe.close()

    # -- the end ------------------------------------------------------------------------------------------------

    def _declare(self, ledger: Ledger, source: Source) -> None:
        words = "; ".join(f"{name}: {law}" for name, law in self.space.describe().items())
        alone = f"one trial alone would cost {self.cost.alone:.3g}, {UNQUOTED}"
        said = [source.assumption, f"{SEARCHED} ({words}); {alone}", FLOATING_POINT, *self.assumptions]
        for text in [*said, *([SECRET] if self.cost.way == "selection" else [])]:
            ledger.declare(ASSUMPTION, text)
        if self.cost.score_noise is None:
            ledger.declare(UNPROTECTED, HELD_OUT)

    def _announce(self, secret: _Secret, ledger: Ledger) -> Winner:
        best = secret.best
        assert best is not None
        if best.failure:
            raise InvalidInput(f"no trial finished, and the search is spent; the last error of one: {best.failure}")
        for kind, text in best.said:
            if text != FIXED_IN_ADVANCE:
                ledger.declare(kind, text)  # a line that the search says too is not repeated
        return Winner(
            *(best.settings, best.score, best.result, self.guarantee(ledger), self.cost, self.space, tuple(secret.seen))
        )

    def guarantee(self, ledger: Ledger) -> Guarantee:
        """Return what the whole search promises: a pure function of the ledger."""
        bill, budget = plans.bill_ledger(ledger), self.cost.budget
        return assemble(
            bill,
            delta=budget.delta,
            accountant=budget.accountant,
            adjacency=budget.adjacency,
            unit=self.unit,
            basis="proven",
            assumptions=(*ledger.declared(ASSUMPTION), *bill.notes),
            unprotected=ledger.declared(UNPROTECTED),
            conditions=ledger.declared(CONDITION),
        )


def draw_count(cost: Cost, source: Source) -> int:
    """Draw K by the law that was charged: P[K = 1] = f'(0), and P[k+1]/P[k] = (1−γ)(k+η)/(k+1)."""
    event = cost.event
    if not isinstance(event, Selection):
        return math.ceil(cost.trials)
    eta, gamma = event.eta, event.gamma
    chance, count = float(source.uniform(1)[0]), 1
    scale = -eta * math.log(gamma)  # γ^(−η) is e^scale
    first = math.log(eta) - scale - math.log(-math.expm1(-scale)) if scale > 0 else -math.log(-math.log(gamma))
    share = math.log1p(-gamma) + first  # in logs: if η is large, it starts below what a number can hold
    reached, growth = math.exp(share), 1.0
    while reached < chance and (growth >= 1 or share > LEAST_SHARE):
        growth = (1 - gamma) * (count + eta) / (count + 1)
        share += math.log(growth)
        count += 1
        reached += math.exp(share)
    return count


def _work(pipe: Connection, search: Search, settings: dict[str, Value], seed: int | None) -> None:
    """Run in a separate process: everything that it prints goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(attempt(search.objective, search._make_trial(settings, seed))))
    pipe.close()
