"""Private: a recipe bound to a model, an optimizer, a dataset and a per-example loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sordino import books, checkpoint, saving, validation
from sordino.accounting import plans
from sordino.accounting.allowance import Allowance, Planned, Runs, Unlimited
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger
from sordino.accounting.pricing import required_accountant
from sordino.claims import CONDITION, UNPROTECTED, conditions_of, guarantee_of, weaker
from sordino.distributed import agreement, reflected, sharding, team_of
from sordino.errors import BudgetExhausted, InvalidInput, LedgerError
from sordino.gradients import Objective
from sordino.gradients.engine import Loss
from sordino.loops import UserLoop
from sordino.noise import Secure, Seeded, Source
from sordino.parts import evaluating
from sordino.recipe import Recipe
from sordino.records import Collate, Records
from sordino.step import Bench
from sordino.validation.binding import check_ledger, check_length, check_optimizer
from sordino.validation.watching import Watch

_log = logging.getLogger("sordino")


@dataclass(frozen=True)
class Step:
    """What may be said of a step in public: which one it was."""

    number: int
    steps: int


class Private:
    """Trains `model` with `optimizer` on `dataset` by `recipe`, and says what that reveals.

    `loss(model, batch)` returns one loss per example. `run` names a directory in which every event is recorded
    durably before its release exists; without it the ledger stays in memory until `save`. `ledger` is one that already
    holds releases about these records, such as the statistics they were normalised by. `seed` makes noise and
    sampling repeatable for experiments, which the guarantee then says. `engine` and `microbatch` are performance knobs
    that change no numbers. `validate=False` skips the probe of model and loss, and the guarantee says so. Under
    ``torchrun`` all processes of `group`, by default all there are, take each step together (`sordino.distributed`).

    Nothing wraps the model and nothing subclasses the optimizer; `close` takes the optimizer's hooks off again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        loss: Loss,
        recipe: Recipe,
        *,
        run: str | Path | None = None,
        ledger: Ledger | None = None,
        collate: Collate | None = None,
        seed: int | None = None,
        source: Source | None = None,
        engine: str = "auto",
        microbatch: int | None = None,
        validate: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        if microbatch is not None and microbatch < 1:
            raise InvalidInput(f"microbatch={microbatch} must be >= 1: it is how many examples are processed at once")
        recipe.terms(0)  # refuses a recipe that is not calibrated
        records = Records(dataset, collate)
        check_length(records.count, recipe.records)
        check_optimizer(model, optimizer)
        check_ledger(recipe.basis, ledger)
        objective = Objective(model, loss)
        self.position, self._announced = 0, False
        self._given_source, self._seed, self._engine = source, seed, engine
        self._validated = validate
        self.bench = Bench(
            recipe=recipe,
            objective=objective,
            optimizer=optimizer,
            records=records,
            engine=recipe.norms.engine(engine, source or Secure()),
            microbatch=microbatch,
            source=source or Secure(),
            ledger=Ledger.in_memory(header=_header(recipe)) if ledger is None else ledger,
            allowance=Unlimited(),
            team=team_of(group),
            watch=Watch(recipe.selection.evaluates) if validate else None,
        )
        recipe.selection.check(self.bench)
        agreement.require(self.bench, ledger, validate)
        self._probed: set[tuple[bool, ...]] = set()
        self._probe()
        self.run: Path | None = None
        if run is not None:
            self._keep_in(Path(run))
        self._bind()
        self._loop = UserLoop(self.bench, self._next_position, self._advance, self._probe)

    # -- training -----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Take the recipe's steps one by one; ends after the last, or before the first that the budget cannot pay."""
        while self._next_position() is not None:
            try:
                yield self.step()
            except BudgetExhausted as ended:
                _log.info("%s", ended)
                return

    def step(self) -> Step:
        """Take the next step, or raise `BudgetExhausted` before anything happens."""
        if not self.bench.recipe.amplifies:
            name = type(self.bench.recipe.sampler).__name__
            raise InvalidInput(
                f"sampler={name}() draws no batches: pass your loader to private.loader(yours), "
                "or leave sampler out to have Poisson draws and be priced with amplification"
            )
        if self._next_position() is None:
            raise BudgetExhausted(f"all {self.total} steps of the recipe are taken: calibrate a longer one for more")
        sharding.settle(self.bench.objective)
        if self._loop.take(self.position) or self.bench.recipe.selection.counts_attempts:
            self._advance()
        return Step(self.position, self.total)

    def loader(
        self, foreign: Iterable[Any] | None = None, *, num_workers: int = 0, microbatch: int | None = None
    ) -> Iterator[Any]:
        """Batches for a loop of your own, one per draw (or in parts of `microbatch`), drawn by the recipe's sampler.

        An empty draw is dealt with inside: there is no batch for it. `foreign` is a loader of your own, for recipes
        with ``sampler=Foreign()``.
        """
        if sharding.is_sharded(self.bench.objective):
            raise InvalidInput(
                "a sharded model cannot run in a loop of your own: processes with parts of different sizes would wait "
                "for one another in its forward passes; use private.steps()"
            )
        return self._loop.batches(foreign, num_workers, microbatch)

    def backward(self, losses: Tensor) -> None:
        """In place of ``losses.mean().backward()``: a vector with one loss per example of the loader's last batch."""
        self._loop.backward(losses)

    @property
    def total(self) -> int:
        """How many steps the recipe has."""
        steps = self.bench.recipe.steps
        assert steps is not None
        return steps

    def _next_position(self) -> int | None:
        self._probe()
        return self.position if self.position < self.total else None

    def _probe(self) -> None:
        """Refuse a model that mixes examples: at the start, and again when it changes between train and eval."""
        self._probe_as_it_is()
        if self.bench.recipe.selection.evaluates:
            with evaluating(self.bench.objective.model):
                self._probe_as_it_is()

    def _probe_as_it_is(self) -> None:
        objective, records = self.bench.objective, self.bench.records
        modes = tuple(module.training for module in objective.model.modules())
        if self._validated and modes not in self._probed:
            fetch = records.remembering(self.bench.device)
            crowd = min(self.bench.microbatch or validation.CROWD, validation.CROWD)
            validation.require_valid(objective, self.bench.parameters(), fetch, records.count, crowd)
            self._probed.add(modes)

    def _advance(self) -> None:
        self.position += 1

    # -- what it costs ------------------------------------------------------------------------------------------

    def guarantee(
        self,
        delta: float | None = None,
        accountant: str | None = None,
        *,
        stopped: Literal["after looking", "in advance"] = "after looking",
    ) -> Guarantee:
        """What is promised: a pure function of the ledger.

        It is the price of the whole plan, of what is spent and what is left: whoever looks at a model and stops then
        has chosen among all the models of the plan. ``stopped="in advance"`` gives the smaller price of what was spent
        so far. It holds only if the moment of stopping depended on nothing that the run released.
        """
        if stopped not in ("after looking", "in advance"):
            raise InvalidInput(f"stopped={stopped!r} must be 'after looking' or 'in advance'")
        more = self._more() + self._loop.assumptions
        return guarantee_of(self.bench, delta, accountant, more, in_advance=stopped == "in advance")

    def declare(self, kind: str, text: str) -> None:
        """Add a line to the ledger that every guarantee about it has to state.

        ``"assumption"`` is what it rests on, ``"unprotected"`` names records that it does not cover, such as "the
        held-out records", ``"condition"`` is what must hold of a part of your own.
        """
        self.bench.team.lead(lambda: self.bench.ledger.declare(kind, text))
        if not self.bench.team.leads:
            self.bench.ledger.declare(kind, text)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, run: str | Path | None = None, extra: dict[str, Any] | None = None) -> Path:
        """Store model, optimizer, position and ledger in the run's directory; `extra` holds plain state of your own."""
        if run is not None and self.run is not None and Path(run) != self.run:
            raise InvalidInput(f"this run is recorded in {self.run}, not in {run}: call save() without a directory")
        if self.run is None:
            if run is None:
                raise InvalidInput("save needs a directory: private.save('run/')")
            self._keep_in(Path(run))
        assert self.run is not None
        directory, state = self.run, saving.state_of(self.bench, self.position, extra or {})
        self.bench.team.lead(lambda: checkpoint.write(directory, self.position, state))
        return self.run

    def load(self, run: str | Path) -> dict[str, Any]:
        """Go on with a saved or killed run: its ledger in full, its newest whole checkpoint; returns its `extra`.

        Work that was charged after the checkpoint is lost but stays paid for; the noise stream starts afresh.
        """
        if spent := len(self.bench.ledger):
            raise LedgerError(
                f"{spent} events were charged to another ledger before load: they would be forgotten; "
                "load right after building, without ledger= (the run's own ledger holds what came before it)"
            )
        directory = Path(run)
        extra: dict[str, Any] = {}
        with saving.reopened(self.bench, directory) as state:
            if state is not None:
                saving.restore(self.bench, state)
                self.position, extra = state["position"], state["extra"]
        self.run = directory
        self._bind(resumed=True)
        return extra

    def resume(self, run: str | Path) -> dict[str, Any]:
        """`load` the run in this directory, or begin it there: for a program that may be killed and started again."""
        directory = Path(run)
        if self.bench.team.lead((directory / books.LEDGER).exists):
            return self.load(directory)
        self._keep_in(directory)
        self._bind(resumed=True)  # its plan went along to the directory
        return {}

    def _keep_in(self, directory: Path) -> None:
        self.bench.team.lead(lambda: saving.begin(self.bench, directory))
        self.run = directory

    def _bind(self, resumed: bool = False) -> None:
        """Spend on the bench's ledger from now on, with fresh noise and what is left of the budget; announce the plan.

        The plan is on the ledger before its first event, so that no reader of the ledger can price less than it.
        """
        bench = self.bench
        bench.ledger = reflected(bench.team, bench.ledger)
        self._announced = resumed
        bench.source = bench.team.shared(self._fresh_source)
        bench.engine = bench.recipe.norms.engine(self._engine, bench.source)
        bench.team.lead(self._declare)
        if not bench.team.leads:
            self._declare()  # in a copy in memory, so that all ranks give the same answer
        bench.team.lead(self._renew_allowance)
        for kind, text in bench.team.lead(lambda: self._announce(resumed)):
            if not bench.team.leads:
                bench.ledger.declare(kind, text)
        unprobed = () if self._validated else ("model and loss treat every example by itself",)
        for text in (*conditions_of(bench.recipe, self._given_source), *unprobed):
            self.declare(CONDITION, text)

    def _announce(self, resumed: bool) -> list[tuple[str, str]]:
        recipe, ledger, allowance = self.bench.recipe, self.bench.ledger, self.bench.allowance
        if recipe.rdp_filter is not None:
            left: Runs = ()
        else:
            left = allowance.left if isinstance(allowance, Planned) else recipe.plan(self.position)
        plans.announce(ledger, recipe.fingerprint(), left, budget=recipe.budget, resumed=resumed)
        self._announced = True
        kinds = (plans.KIND, UNPROTECTED, CONDITION)
        return [(kind, text) for kind in kinds for text in ledger.declared(kind)]

    def _fresh_source(self) -> Source:
        if self._given_source is not None:
            return self._given_source
        ledger = self.bench.ledger
        if self._seed is None:
            return Secure()
        return Seeded(self._seed, ledger.incarnation, len(ledger), ledger.next_stream())

    def _declare(self) -> None:
        """Write into the ledger what every guarantee about it must say, whoever reads it later."""
        ledger, team = self.bench.ledger, self.bench.team
        probed = "was" if self._validated else "was NOT"
        ledger.declare("setting", f"opening {ledger.incarnation}: {team.size} processes, the model {probed} probed")
        for line in (self.bench.source.assumption, *self._more()):
            ledger.declare("assumption", line)

    def _more(self) -> tuple[str, ...]:
        unprobed = () if self._validated else ("the model was NOT probed for mixing examples (validate=False)",)
        return unprobed + agreement.assumptions(self.bench.team)

    def _renew_allowance(self) -> None:
        recipe, ledger = self.bench.recipe, self.bench.ledger
        self.bench.renew = lambda: _allowance(recipe, ledger, self.position, self._announced)
        self.bench.allowance, self.bench.recorded = self.bench.renew(), len(ledger)

    def close(self) -> None:
        """Take the hooks off the optimizer and close the ledger."""
        self._loop.close()
        self.bench.ledger.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _allowance(recipe: Recipe, ledger: Ledger, position: int, announced: bool) -> Allowance:
    if recipe.rdp_filter is not None:
        return recipe.rdp_filter.allowance(ledger.events())
    if recipe.budget is None:
        return Unlimited()
    room = plans.room(ledger, recipe.fingerprint(), recipe.budget, resumed=announced)
    return Planned(*room, recipe.plan(position))


def _header(recipe: Recipe) -> dict[str, str]:
    adjacency = recipe.budget.adjacency if recipe.budget else "add-or-remove-one"
    basis = weaker(recipe.basis, required_accountant(recipe.budget.accountant).basis) if recipe.budget else recipe.basis
    return {"recipe": recipe.fingerprint(), "unit": "record", "adjacency": adjacency, "basis": basis}
