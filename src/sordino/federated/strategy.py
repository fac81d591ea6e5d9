"""A Flower strategy that protects whole users: Flower carries the messages, `rounds` decides what is released."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from sordino import books, checkpoint
from sordino.accounting.guarantee import Guarantee
from sordino.errors import InvalidInput
from sordino.federated import QUIET
from sordino.federated.client import ARRAYS, CONFIG, InProcessGrid, read_update, read_vote
from sordino.federated.rounds import ASSUMPTIONS, LASTING, Quantile, Round, Rounds
from sordino.federated.work import FedAvg, Work, find_trainable
from sordino.noise import Source
from sordino.proposals import finish
from sordino.recipe import Recipe
from sordino.run import Run, Stopped
from sordino.vault.claims import DatasetBudget

_log = logging.getLogger("sordino")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class PrivateStrategy(Strategy):
    """DP-FedAvg and DP-FedSGD at user level (McMahan et al. 2018, Alg. 1), with every schedule of the library.

    `recipe` is calibrated with ``records`` = the public number of users; its batch size is the expected number of users
    in a round, its steps are rounds. `work` is what clients compute. `optimizer` is the server's, over the parameters
    of `model`, and is built from the recipe unless given; SGD with learning rate 1 is plain federated averaging.
    `adaptive` lets the clipping bound follow a quantile. `run` names a directory in which every event is recorded
    before any user is asked, and the model after every round; `resume` continues a run that is already there.
    `patience` is how many seconds to wait at the start for users to connect. `seed` makes draws and noise repeatable
    for experiments, and the guarantee says so. `vault` is the budget of the users (`sordino.vault.open_budget`), whose
    unit must be "user": all rounds are reserved there before the first.

    `weighted_by_key` must stay None: weights by the number of examples are refused, because one user that claims many
    examples would dominate the average, and their sum, the divisor, is private.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        work: Work | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        adaptive: Quantile | None = None,
        run: str | Path | None = None,
        resume: bool = False,
        patience: float = 0.0,
        seed: int | None = None,
        source: Source | None = None,
        weighted_by_key: str | None = None,
        vault: DatasetBudget | None = None,
    ) -> None:
        if weighted_by_key is not None:
            raise InvalidInput(
                f"weighted_by_key={weighted_by_key!r} must be None: with weights by examples one user can be most of "
                "the average and the noise no longer covers it; every user counts once"
            )
        if not find_trainable(model):
            raise InvalidInput("the model has no parameter that requires a gradient: there is nothing to train")
        _check_dtypes(model)
        self.work = work or FedAvg()
        dealt = recipe.sampler is not None and recipe.sampler.covers > 1
        assumptions = (*ASSUMPTIONS, LASTING) if dealt else ASSUMPTIONS
        self.run = Run(recipe, unit="user", assumptions=assumptions, seed=seed, source=source, vault=vault)
        optimizer = optimizer or recipe.optimizer.build(find_trainable(model).values())
        self.rounds = Rounds(model, recipe, optimizer, self.run, adaptive)
        self._patience = patience
        self._current: Round | None = None
        if run is not None and resume and (Path(run) / books.LEDGER).exists():
            self.load(run)
        else:
            self.run.begin(None if run is None else Path(run))

    # -- what Flower calls --------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Take the recipe's remaining rounds, or `num_rounds` of them; end when the budget runs out.

        The model starts from `initial_arrays`, or as it is. A user who has not answered after `timeout` seconds counts
        as zero. `evaluate_fn` sees only released models; evaluate on public records.
        """
        if initial_arrays is not None:
            self.rounds.model.load_state_dict(initial_arrays.to_torch_state_dict())
        left = self.run.count_steps_left()
        rounds = left if num_rounds is None else min(num_rounds, left)
        if not isinstance(grid, InProcessGrid):
            warn_if_loud()
        self._await(grid)
        result = super().start(grid, self.arrays(), rounds, timeout, train_config, evaluate_config, evaluate_fn)
        finish(self.rounds.optimizer)
        result.arrays = self.arrays()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Charge the round, draw users among those connected, and ask them."""
        current = self._current = self.rounds.begin(list(grid.get_node_ids()))
        asked = ConfigRecord(
            {**config, **self.work.to_config(), "round": current.terms.step, "clip": current.terms.clip}
        )
        content = RecordDict({ARRAYS: arrays, CONFIG: asked})
        group = str(current.terms.step)
        return [Message(content, user, MessageType.TRAIN, group_id=group) for user in current.drawn]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip every update again, sum, add noise once, divide by the public constant, step. Total: never fails."""
        current, self._current = self._current, None
        if current is None:
            raise InvalidInput("no round is in progress: configure_train comes first, once per round")
        shapes = {name: total.shape for name, total in current.total.items()}
        for message in replies:
            update = read_update(message, shapes)
            if update is not None:
                self.rounds.add(current, message.metadata.src_node_id, update, read_vote(message))
        self.rounds.release(current)
        self._save()
        public: dict[str, int | float | list[int] | list[float]] = {
            "clip": current.terms.clip,
            "noise-multiplier": current.terms.noise_multiplier,
        }
        return self.arrays(), MetricRecord(public)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no client: what clients measure on their records would be a release without noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """Log what is public: the recipe's terms, never how many users answered."""
        recipe, terms = self.rounds.recipe, self.rounds.terms()
        _log.info(
            "user-level rounds: %s of %s users expected, divisor %g, clip %g, noise multiplier %g, %s rounds",
            recipe.batch_size, recipe.records, terms.divisor, terms.clip, terms.noise_multiplier, recipe.steps,
        )  # fmt: skip

    # -- what you call ------------------------------------------------------------------------------------------

    def arrays(self) -> ArrayRecord:
        """Return the released model as Flower carries it."""
        return ArrayRecord(self.rounds.model.state_dict())

    def guarantee(
        self, delta: float | None = None, accountant: str | None = None, *, stopped: Stopped = "after looking"
    ) -> Guarantee:
        """Return what every user is promised, by the whole plan of the run: a pure function of the ledger.

        ``stopped="in advance"`` gives the smaller price of the rounds so far, which holds only if the moment of
        stopping did not depend on any release.
        """
        return self.run.guarantee(delta, accountant, stopped=stopped)

    def load(self, run: str | Path) -> None:
        """Continue a run that stopped, with its ledger and newest model; an interrupted round stays paid for."""
        with self.run.reopen(Path(run)) as state:
            if state is not None:
                with checkpoint.one_line("does not fit this model and optimizer"):
                    self.rounds.model.load_state_dict(state["model"])
                    self.rounds.optimizer.load_state_dict(state["optimizer"])
                    self.rounds.clip = float(state["clip"])

    def _save(self) -> None:
        """Store the model after a round, if the run has a folder."""
        if self.run.folder is not None:
            model, optimizer = self.rounds.model.state_dict(), self.rounds.optimizer.state_dict()
            self.run.save({"model": model, "optimizer": optimizer, "clip": self.rounds.clip})

    def _await(self, grid: Grid) -> None:
        """Wait for users to connect; continue without the missing ones, so that no one's absence can stop a release."""
        deadline = time.monotonic() + self._patience
        while len(set(grid.get_node_ids())) < (self.rounds.recipe.records or 0) and time.monotonic() < deadline:
            time.sleep(min(0.5, self._patience))

    def close(self) -> None:
        """Free the ledger."""
        self.run.close()

    def __enter__(self) -> PrivateStrategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def warn_if_loud() -> None:
    """Say which variables are missing from the environment of Flower's programs."""
    if loud := [name for name, value in QUIET.items() if os.environ.get(name) != value]:
        _log.warning("Flower may call home: set %s", " ".join(f"{name}={QUIET[name]}" for name in loud))


def _check_dtypes(model: nn.Module) -> None:
    """Refuse weights that Flower's arrays cannot carry, before anything is spent."""
    for name, value in model.state_dict().items():
        if value.dtype == torch.bfloat16:
            raise InvalidInput(f"{name} is bfloat16, which Flower's arrays cannot carry: use model.float()")
