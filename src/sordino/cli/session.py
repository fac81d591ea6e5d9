"""A run, built from its configuration: new, or gone on with from its directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.accounting import Guarantee
from sordino.claims import FIXED_IN_ADVANCE
from sordino.cli import architectures, config, sources
from sordino.cli.config import Config
from sordino.data import Data
from sordino.errors import InvalidInput
from sordino.private import Private

LEDGER = "ledger.sqlite"


@dataclass(frozen=True)
class Session:
    """Everything that a run needs, bound together."""

    config: Config
    data: Data
    private: Private

    @property
    def model(self) -> nn.Module:
        return self.private.bench.objective.model

    @property
    def run(self) -> Path:
        assert self.private.run is not None
        return self.private.run

    @property
    def has_held_out(self) -> bool:
        return len(self.data.test_set) > 0  # type: ignore[arg-type]  # Dataset does not promise a length

    def accuracy(self) -> float | None:
        """Share of the held-out records that the model classifies rightly, or None without any."""
        return accuracy(self.model, self.data.test) if self.has_held_out else None

    def guarantee(self) -> Guarantee:
        """What was promised, with what the preparation of the data read beside it."""
        spent = self.private.guarantee()
        said = spent.assumptions
        if self.config.data.source == "digits":
            tuned = "the default settings of this command were found on these digits, which are public"
            said = tuple(tuned if line == FIXED_IN_ADVANCE else line for line in said)
        return replace(spent, assumptions=(*said, *self.data.caveats))


def per_example_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes, reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, records: tuple[Tensor, Tensor]) -> float:
    """Share of `records` that are classified rightly, with the model in eval mode meanwhile."""
    inputs, classes = records
    training = model.training
    model.eval()
    try:
        guesses = torch.cat([model(part).argmax(1) for part in inputs.split(1024)])
    finally:
        model.train(training)
    return float((guesses == classes).double().mean())


def begin(chosen: Config, data: Data, run: Path | None) -> Session:
    """Start a new run in its own directory; the configuration is there before anything is spent."""
    directory = run or _directory_by_time()
    if (directory / LEDGER).exists():
        raise InvalidInput(
            f"{directory} holds a run already: go on with `sordino resume {directory}` or choose another"
        )
    private = _private(chosen, data, directory)
    try:
        chosen.write(directory)
    except OSError as error:
        private.close()
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from error
    return Session(chosen, data, private)


def reopen(directory: Path) -> Session:
    """Go on with a run that was interrupted, killed or finished."""
    if not (directory / config.FILE).is_file():
        raise InvalidInput(f"{directory} holds no {config.FILE}: give the directory of a run of `sordino train`")
    chosen = config.read(directory / config.FILE)
    data = sources.load(chosen.data)
    sources.require_count(chosen.data, data)
    _require_classes(chosen, data)
    private = _private(chosen, data, None)
    private.load(directory)
    return Session(chosen, data, private)


def _private(chosen: Config, data: Data, run: Path | None) -> Private:
    assert chosen.recipe is not None
    model = architectures.build(chosen.model, chosen.run.seed)
    return Private(
        model,
        chosen.recipe.optimizer.build(model.parameters()),
        data.train_set,
        per_example_loss,
        chosen.recipe,
        run=run,
        seed=chosen.run.seed,
        engine=chosen.run.engine,
        microbatch=chosen.run.microbatch,
    )


def _require_classes(chosen: Config, data: Data) -> None:
    classes = chosen.model.options.get("classes", len(data.classes))
    if len(data.classes) > classes:
        raise InvalidInput(f"data={chosen.data.source} has {len(data.classes)} classes, the run began with {classes}")


def _directory_by_time() -> Path:
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return next(path for path in tries if not path.exists())
