"""Private: a recipe bound to a model, an optimizer, a dataset and a per-example loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sordino import books, checkpoint, validation
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger
from sordino.augmentation import GIVEN_ALONE, OWN_COINS, UNTRIED, Augmentation, ShiftAndMirror, require_views
from sordino.distributed import agreement, form_team, sharding
from sordino.errors import BudgetExhausted, CheckpointError, InvalidInput
from sordino.gradients import Objective
from sordino.gradients.engine import Loss, list_modules
from sordino.loops import UserLoop
from sordino.names import spell
from sordino.noise import Source
from sordino.parts import evaluating
from sordino.proposals import finish
from sordino.recipe import Recipe
from sordino.records import Collate, Records, find_tensors
from sordino.run import ROUNDING_IS_SMALL, Run, Stopped
from sordino.step import Bench
from sordino.units import Unit, Units, describe_units, name_unit
from sordino.validation import check_ledger, check_length, check_optimizer
from sordino.validation.watching import IN_ANY_COMPANY, Watch, list_assumptions
from sordino.vault.claims import DatasetBudget

_log = logging.getLogger("sordino")

UNPROBED = ("the model was NOT probed for mixing examples (validate=False)", IN_ANY_COMPANY)
ALONE = ("model and loss treat every example by itself, with random numbers that nobody knows",)
"""What a guarantee must assume, and what its headline must say, if the model was not probed."""


@dataclass(frozen=True)
class Step:
    """What may be said about a step in public: its number."""

    number: int
    steps: int


class Private:
    """Train `model` with `optimizer` on `dataset` by `recipe`, and say what that reveals.

    >>> import torch, sordino
    >>> from sordino import Budget, recipes
    >>> data = torch.randn(500, 4), torch.randint(2, (500,))
    >>> model = torch.nn.Linear(4, 2)
    >>> def loss(model, batch):
    ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    >>> recipe = recipes.dpsgd(batch_size=100, epochs=1).calibrate(Budget(epsilon=3, delta=1e-4), records=500)
    >>> private = sordino.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, recipe)
    >>> for step in private.steps():
    ...     pass
    >>> private.guarantee().epsilon <= 3
    True

    What is trained:

    - `loss(model, batch)` returns one loss per example, not their mean.
    - `unit` names the owner of every record, as one identifier each or as a column of the dataset. Sordino then draws,
      clips and protects whole owners, and the recipe's `records` counts owners. A draw uses at most `per_unit` records
      of an owner. `unit_name` is what the guarantee calls an owner, "user" by default (`sordino.units`).
    - `augment` is the number of random views of a record that a draw uses. `augmentation` makes them one at a time;
      without it, the dataset makes one whenever a record is read. Their gradients are averaged before clipping, so the
      price stays the same (`sordino.augmentation`).

    Where it is written down:

    - `run` names a folder. Every event is stored there durably before its release exists. Without it, the ledger stays
      in memory until `save`.
    - `ledger` is a ledger that already holds releases about these records, such as statistics for normalising them.
    - `vault` is the dataset's budget (`sordino.vault.open_budget`). The plan is reserved there before the first step.

    How it runs:

    - `engine` and `microbatch` (how many records are processed at once) affect performance and change no numbers.
    - `seed` makes noise and sampling repeatable for experiments. The guarantee says so.
    - `validate=False` skips the probe of model and loss. The guarantee says so. Nobody then notices a loss that reaches
      no parameter, which trains on noise alone.
    - Under ``torchrun``, all processes of `group` (by default all processes) take each step together
      (`sordino.distributed`).

    Nothing wraps the model and nothing subclasses the optimizer; `close` removes the optimizer's hooks. The attribute
    `run` is the `sordino.run.Run` that pays for the steps: its ledger, its folder, its team.
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
        unit: Unit | None = None,
        per_unit: int | None = None,
        unit_name: str | None = None,
        augment: int | None = None,
        augmentation: Augmentation | None = None,
        seed: int | None = None,
        source: Source | None = None,
        engine: str = "auto",
        microbatch: int | None = None,
        validate: bool = True,
        group: ProcessGroup | None = None,
        vault: DatasetBudget | None = None,
    ) -> None:
        if microbatch is not None and microbatch < 1:
            raise InvalidInput(f"microbatch={microbatch} must be >= 1: it is how many examples are processed at once")
        recipe.terms(0)  # refuses a recipe that is not calibrated
        name = name_unit(unit, per_unit, unit_name)
        if unit is not None:
            recipe.require("units", name=name)
        views = require_views(augment, augmentation, find_tensors(dataset) is not None)
        if views is not None:
            recipe.require("augmented")
        records = (
            Records(dataset, collate, views)
            if unit is None
            else Units(dataset, unit, per_unit=per_unit, collate=collate, views=views)
        )
        check_length(records.count, recipe.records, name)
        check_optimizer(model, optimizer, recipe.selection)
        check_ledger(recipe.basis, ledger, name)
        objective = Objective(model, loss)
        team, self._engine, self._validated = form_team(group), engine, validate
        alone = validate and records.sees_alone()
        unseen = () if alone else (UNTRIED,) if views is not None else (OWN_COINS,) if validate else ()
        foreign = views is not None and not isinstance(augmentation, ShiftAndMirror)
        said = (
            *(() if unit is None else (ROUNDING_IS_SMALL,)),
            *((GIVEN_ALONE,) if foreign else ()),
            *(() if validate else UNPROBED),
        )
        self.run = Run(
            recipe,
            unit=name,
            population=records.count,
            assumptions=(*said, *agreement.list_assumptions(team)),
            conditions=(*(() if validate else ALONE), *unseen),
            setting=f"the model was {'' if validate else 'NOT '}probed{records.describe(name)}",
            ledger=ledger,
            seed=seed,
            source=source,
            team=team,
            vault=vault and vault.over(lambda: agreement.digest_records(records.count, records.raw)),
        )
        self.bench = Bench(
            recipe=recipe,
            objective=objective,
            optimizer=optimizer,
            records=records,
            engine=recipe.norms.engine(engine, self.run.source),
            microbatch=microbatch,
            run=self.run,
            watch=Watch(recipe.selection.evaluates) if validate else None,
        )
        recipe.selection.check(self.bench)
        agreement.require_shards(team, objective, validate)
        if sharding.is_sharded(objective):
            recipe.require("sharded")
        if team.size > 1:
            recipe.require("several processes", processes=team.size)
        agreement.require_shareable(team, objective, ledger is not None)
        agreement.require_same(team, lambda: _shared_by_all(self.bench, validate))
        self._probed: set[tuple[bool, ...]] = set()
        self._probe()
        self._begin(None if run is None else Path(run))
        self._loop = UserLoop(self.bench, self._probe)

    # -- training -----------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Take the recipe's steps one by one; end after the last, or before the first that the budget cannot pay for.

        If an optimizer returns a different model from the one it trains, it then puts that one in place
        (`sordino.proposals`).
        """
        while self.position < self.total:
            try:
                step = self.step()
            except BudgetExhausted as ended:
                _log.info("%s", ended)
                break
            yield step  # outside the try: a loop left by `break` ends here when Python shuts down, without its globals
        finish(self.bench.optimizer)

    def step(self) -> Step:
        """Take the next step, or raise `BudgetExhausted` before anything happens."""
        if not self.bench.recipe.amplifies:
            name = type(self.bench.recipe.sampler).__name__
            raise InvalidInput(
                f"sampler={name}() draws no batches: pass your loader to private.loader(yours), "
                "or leave out sampler= to get Poisson draws, which are priced with amplification"
            )
        self._probe()
        if self.position >= self.total:
            raise BudgetExhausted(f"all {self.total} steps of the recipe are taken: calibrate a longer one for more")
        sharding.reshard(self.bench.objective)
        # An interrupt inside torch, in this step or an earlier one, may have left gradients off.
        with torch.enable_grad():
            self._loop.take()
        return Step(self.position, self.total)

    def loader(
        self, foreign: Iterable[Any] | None = None, *, num_workers: int = 0, microbatch: int | None = None
    ) -> Iterator[Any]:
        """Yield batches for your own loop, one per draw (or in parts of `microbatch`), drawn by the recipe's sampler.

        An empty draw is handled internally and yields no batch. `foreign` is your own loader, for recipes with
        ``sampler=Foreign()``.
        """
        if sharding.is_sharded(self.bench.objective):
            raise InvalidInput(
                "a sharded model cannot run in your own loop: processes with parts of different sizes would wait "
                "for each other in its forward passes; use private.steps()"
            )
        return self._loop.batches(foreign, num_workers, microbatch)

    def backward(self, losses: Tensor) -> None:
        """Replace ``losses.mean().backward()``; `losses` has one loss per example of the loader's last batch."""
        self._loop.backward(losses)

    @property
    def completes_draw(self) -> bool:
        """Whether the loader's present batch is the last part of its draw, after which the step is taken."""
        return self._loop.completes_draw

    def attach(self, scheduler: LRScheduler) -> None:
        """Step a learning-rate scheduler with every proposal, and roll it back when the proposal is rejected.

        Do not step it yourself.
        """
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InvalidInput("ReduceLROnPlateau follows a loss, which is private: use a scheduler that counts steps")
        if scheduler.optimizer is not self.bench.optimizer:
            raise InvalidInput("the scheduler belongs to another optimizer: build it on the one that Private was given")
        self.bench.schedulers.append(scheduler)

    @property
    def position(self) -> int:
        """How many of the recipe's steps are taken."""
        return self.run.position

    @property
    def total(self) -> int:
        """How many steps the recipe has."""
        steps = self.bench.recipe.steps
        assert steps is not None
        return steps

    def _probe(self) -> None:
        """Refuse a model that mixes examples: at the start, and again when it changes between train and eval."""
        self._probe_as_it_is()
        if self.bench.recipe.selection.evaluates:
            with evaluating(self.bench.objective.model):
                self._probe_as_it_is()

    def _probe_as_it_is(self) -> None:
        objective, records = self.bench.objective, self.bench.records
        modes = tuple(module.training for module in list_modules(objective.model))
        if self._validated and modes not in self._probed:
            fetch = records.make_fetcher(self.bench.device)
            crowd = min(self.bench.microbatch or validation.CROWD, validation.CROWD)
            seen = validation.require_valid(objective, self.bench.parameters(), fetch, records.length, crowd)
            self.run.assume(list_assumptions(seen))
            assert self.bench.watch is not None
            self.bench.watch.random |= seen.used or seen.known
            self._probed.add(modes)

    # -- what it costs ------------------------------------------------------------------------------------------

    def guarantee(
        self, delta: float | None = None, accountant: str | None = None, *, stopped: Stopped = "after looking"
    ) -> Guarantee:
        """Return what is promised: a pure function of the ledger.

        It is the price of the whole plan, both what is spent and what is left: if you look at a model and then stop,
        you have chosen among all the models of the plan. ``stopped="in advance"`` gives the smaller price of what was
        spent so far. It holds only if the moment of stopping did not depend on anything that the run released.
        """
        return self.run.guarantee(delta, accountant, stopped=stopped, more=self._loop.assumptions)

    def declare(self, kind: str, text: str) -> None:
        """Add a line to the ledger that every guarantee about it has to state.

        ``"assumption"`` is what the guarantee rests on, ``"unprotected"`` names records that it does not cover, such as
        "the held-out records", and ``"condition"`` is what must hold for a part that you wrote.
        """
        self.run.declare(kind, text)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, run: str | Path | None = None, extra: dict[str, Any] | None = None) -> Path:
        """Store model, optimizer, position and ledger in the run's directory; `extra` is for your own plain values."""
        folder = self.run.folder
        if run is not None and folder is not None and Path(run) != folder:
            raise InvalidInput(f"this run is recorded in {folder}, not in {run}: call save() without a directory")
        if folder is None:
            if run is None:
                raise InvalidInput("save needs a directory: private.save('run/')")
            folder = Path(run)
            self.run.keep_in(folder)
        self.run.save({**self.state_dict(), "extra": extra or {}})
        return folder

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: model, optimizer and released values; nothing private (law 7)."""
        return {
            "model": sharding.gather_state(self.bench.objective.model.state_dict()),
            "optimizer": sharding.gather_state(self.bench.optimizer.state_dict()),
            "released": self.bench.states.save(),
        }

    def load(self, run: str | Path) -> dict[str, Any]:
        """Continue a saved or killed run from its full ledger and its newest whole checkpoint; return its `extra`.

        Work charged after the checkpoint is lost but stays paid for; the noise is fresh.
        """
        extra: dict[str, Any] = {}
        try:
            with self.run.reopen(Path(run)) as state:
                if state is not None:
                    self._restore(state, Path(run))
                    extra = state["extra"]
        finally:
            self._renew_engine()
        return extra

    def resume(self, run: str | Path) -> dict[str, Any]:
        """`load` the run in this directory, or begin it there: for a program that may be killed and restarted."""
        if self.run.team.lead((Path(run) / books.LEDGER).exists):
            return self.load(run)
        self._begin(Path(run))
        return {}

    def save_position(self, folder: str | Path) -> None:
        """Store position and released values in `folder`, beside a model and optimizer that another framework saves."""
        team, ledger = self.run.team, self.run.ledger

        def write() -> None:
            content = {"released": self.bench.states.save(), **checkpoint.describe_ledger(ledger)}
            checkpoint.write(Path(folder), self.position, {**content, "position": self.position})

        team.lead(write)

    def load_position(self, run: str | Path, folder: str | Path | None) -> None:
        """Continue `run`, whose model and optimizer another framework has restored from `folder`.

        `save_position` wrote to that folder; None starts from the first step. What was charged afterwards stays paid
        for.
        """
        try:
            with self.run.reopen(Path(run), None if folder is None else Path(folder)) as state:
                if state is None and folder is not None:
                    raise CheckpointError(
                        f"{folder} holds no position of a private run: resume from another checkpoint"
                    )
                self.bench.states = self.bench.recipe.start()
                with checkpoint.one_line("its released values do not fit this recipe"):
                    self.bench.states.restore((state or {}).get("released") or {})
        finally:
            self._renew_engine()

    def _begin(self, folder: Path | None) -> None:
        self.run.begin(folder)
        self._renew_engine()

    def _renew_engine(self) -> None:
        """Renew the engine and the records' views: they draw from the run's source, which is new at every opening."""
        if self.bench.records.views is not None:
            self.bench.records.views.forget()
        self.bench.engine = self.bench.recipe.norms.engine(self._engine, self.run.source)

    def _restore(self, state: dict[str, Any], folder: Path) -> None:
        """Put model, optimizer and released values back as they were saved."""
        bench = self.bench
        for part in ("model", "optimizer", "extra"):
            if not isinstance(state.get(part), dict):
                raise CheckpointError(f"the checkpoint in {folder} holds no {part}: it was not written by Private.save")
        if not isinstance(state.get("released", {}), dict):
            raise CheckpointError(f"the checkpoint in {folder} holds released values that are not a table")
        with checkpoint.one_line("does not fit this model and optimizer"):
            bench.objective.model.load_state_dict(sharding.scatter_state(state["model"], bench.objective.model))
            bench.optimizer.load_state_dict(sharding.scatter_optimizer(state["optimizer"], bench.optimizer))
        bench.states = bench.recipe.start()
        bench.states.restore(state.get("released") or {})

    def close(self) -> None:
        """Take the hooks off the optimizer and close the ledger."""
        self._loop.close()
        self.run.close()

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shared_by_all(bench: Bench, validate: bool) -> dict[str, str]:
    """Return what must be the same in every process, by the names that an error shows."""
    return {
        **{f"recipe's {each.name}": spell(getattr(bench.recipe, each.name)) for each in fields(bench.recipe)},
        "number of records": str(bench.records.length),
        "records": agreement.digest_records(bench.records.length, bench.records.raw),
        **describe_units(bench.records),
        "augment": "none" if bench.records.views is None else str(bench.records.views.count),
        **agreement.describe_settings(bench.optimizer, bench.schedulers),
        "validate": str(validate),
        "parameters": agreement.digest_weights(bench.objective),
    }
