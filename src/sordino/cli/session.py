"""A run, built from its configuration: new, or gone on with from its directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.accounting import Guarantee
from sordino.claims import FIXED_IN_ADVANCE, HELD_OUT, UNPROTECTED
from sordino.cli import architectures, config, preparing, sizing, sources
from sordino.cli.choosing import Chosen
from sordino.cli.common import caution
from sordino.cli.config import Config
from sordino.cli.preparing import LEDGER
from sordino.data import tabular_release, tabular_schema
from sordino.data.dataset import Data
from sordino.data.tabular_schema import Schema
from sordino.data.tabular_sheet import Sheet
from sordino.errors import InvalidInput
from sordino.lab.networks import parameter_count
from sordino.private import Private
from sordino.sampling.importance import Importance


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

    def loss(self) -> float | None:
        """Mean cross-entropy of the held-out records whose class is known, or None without any."""
        return mean_loss(self.model, self.data.test) if self.has_held_out else None

    def released_clip(self) -> float | None:
        """The clipping bound in force where DPIS adapts it, made from released values alone; else None."""
        bench = self.private.bench
        if not isinstance(bench.recipe.sampler, Importance) or bench.recipe.sampler.external is None:
            return None
        return float(bench.memory["released"]["clip"])

    def guarantee(self) -> Guarantee:
        """What was promised, with what the preparation of the data read beside it."""
        spent = self.private.guarantee()
        said = spent.assumptions
        if self.config.data.source == "digits":
            tuned = "the default settings of this command were found on these digits, which are public"
            said = tuple(tuned if line == FIXED_IN_ADVANCE else line for line in said)
        return replace(spent, assumptions=(*said, *sources.assumed(self.config.data.source), *self.data.caveats))


def per_example_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes, reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, records: tuple[Tensor, Tensor]) -> float:
    """Share of `records` that are classified rightly, with the model in eval mode meanwhile."""
    inputs, classes = records
    return float((_outputs(model, inputs).argmax(1) == classes).double().mean())


@torch.no_grad()
def mean_loss(model: nn.Module, records: tuple[Tensor, Tensor]) -> float | None:
    """Mean cross-entropy, with the model in eval mode meanwhile; None where no class is known or it is not finite."""
    inputs, classes = records
    loss = float(F.cross_entropy(_outputs(model, inputs).double(), classes))
    return loss if math.isfinite(loss) else None


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    training = model.training
    model.eval()
    try:
        return torch.cat([model(part) for part in inputs.split(1024)])
    finally:
        model.train(training)


def begin(chosen: Chosen, run: Path | None, ready: Callable[[], None] = lambda: None) -> Session:
    """Start a new run in its own directory; the configuration is there before anything is learnt.

    A table whose schema is open is prepared first. Model and recipe are tried on random records before that, so that
    nothing is spent on a run that cannot go on; `ready` is called after all that, right before anything is spent.
    """
    directory = run or _directory_by_time()
    if (directory / LEDGER).exists():
        raise InvalidInput(
            f"{directory} holds a run already: go on with `sordino resume {directory}` or choose another"
        )
    if chosen.plan is None:
        data = _encoded(chosen.config, chosen.records)
        settled = with_model(chosen.config, data)
        private = _private(settled, data, directory)
        _warn(private)
        ready()
    else:
        rehearse(chosen)
        ready()
        assert isinstance(chosen.records, Sheet)
        settled = preparing.prepare(chosen.config, chosen.records, chosen.plan, directory)
        data = _encoded(settled, chosen.records)
        settled = with_model(settled, data)
        private = _private(settled, data, None)
        private.load(directory)
    try:
        settled.write(directory)
    except InvalidInput:
        private.close()
        raise
    return _session(settled, data, private)


def rehearse(chosen: Chosen) -> None:
    """Build everything around random records in place of the table's, to refuse early what would be refused late."""
    public, records = chosen.config, chosen.config.data.records
    if public.model.name is not None and ":" in public.model.name:
        raise InvalidInput(
            f"model={public.model.name} of your own must know its inputs before anything is released: "
            "give --schema with every range, and --classes"
        )
    assert public.schema is not None
    assert records is not None
    data = preparing.stand_in(public.schema, records)
    with _private(with_model(public, data), data, None) as private:
        _warn(private)


def _warn(private: Private) -> None:
    recipe, model = private.bench.recipe, private.bench.objective.model
    if (words := sizing.verdict(recipe, parameter_count(model, trained=True))) is not None:
        caution(words)


def with_model(public: Config, data: Data) -> Config:
    """The configuration with a model that fits the records: by name, or the default for such records."""
    sample = data.train_set[0][0]
    assert public.recipe is not None
    default = architectures.default(public.data.source, sample.shape, len(data.classes), public.recipe)
    return replace(public, model=architectures.choose(public.model, default, sample.shape, len(data.classes)))


def reopen(directory: Path, *, trust_code: bool = False, prepare: bool = True) -> Session:
    """Go on with a run that was interrupted, killed or finished; one that died in its preparation is prepared again.

    The folder may come from anybody: code that it names is run only if `trust_code` says so. Without `prepare`
    nothing is released: a run whose preparation has not ended is refused.
    """
    chosen = config.of_run(directory)
    unprepared = config.of_run(directory, preparing.PREPARATION) if chosen is None else None
    found = chosen or unprepared
    if found is None:
        raise InvalidInput(_no_run(directory))
    architectures.require_trusted(found.model, trust_code, directory / config.FILE)
    if found.recipe is None:
        raise InvalidInput(f"{directory / config.FILE} has no [recipe]: give the directory of a run of `sordino train`")
    records = sources.load(found.data)
    sources.require_count(found.data, records)
    if chosen is None:
        if not prepare:
            raise InvalidInput(f"{directory} is not prepared yet, so it has no model: sordino resume goes on with it")
        chosen = _prepare_again(found, records, directory)
    data = _encoded(chosen, records)
    settled = chosen if chosen.model.name else with_model(chosen, data)
    _require_classes(settled, data)
    private = _private(settled, data, None)
    private.load(directory)
    if settled is not chosen:  # it was killed before its model was chosen
        settled.write(directory)
    (directory / preparing.PREPARATION).unlink(missing_ok=True)  # left by a kill: config.toml takes its place
    return _session(settled, data, private)


def _session(chosen: Config, data: Data, private: Private) -> Session:
    """Bound together, and the ledger knows which records no guarantee covers."""
    session = Session(chosen, data, private)
    if session.has_held_out:
        private.declare(UNPROTECTED, HELD_OUT)
    return session


def _no_run(directory: Path) -> str:
    said = f"{directory} holds no {config.FILE}: give the directory of a run of `sordino train`"
    if not (directory / LEDGER).exists():
        return said
    return (
        f"{said} (version 0.1 kept none until its preparation was done: `sordino account` says what this one spent; "
        "a new run on these records costs that much more)"
    )


def _prepare_again(found: Config, records: Data | Sheet, directory: Path) -> Config:
    """Finish a run that was killed before its schema was complete; what it had released stays charged."""
    count, recipe = found.data.records, found.recipe
    if not isinstance(records, Sheet) or count is None or recipe is None or found.data.prepare is None:
        raise InvalidInput(f"{preparing.PREPARATION} of {found.data.source} is not whole: start a new run")
    schema = tabular_schema.for_header(found.schema or Schema(), list(records.train.columns), records.target, None)
    records.check(schema)
    plan = tabular_release.plan(schema, count, recipe.budget, found.data.prepare)
    if plan is None:
        raise InvalidInput(f"{preparing.PREPARATION} of {found.data.source} leaves nothing open: start a new run")
    again = Chosen(replace(found, schema=schema), records, plan)
    rehearse(again)
    return preparing.prepare(again.config, records, plan, directory)


def _encoded(chosen: Config, records: Data | Sheet) -> Data:
    if not isinstance(records, Sheet):
        return records
    if chosen.schema is None or not chosen.schema.complete:
        raise InvalidInput(f"the configuration of {chosen.data.source} has no complete [schema]: start a new run")
    if missing := sorted({*chosen.schema.columns, records.target} - set(records.train.columns)):
        raise InvalidInput(f"data={chosen.data.source} has no column {missing[0]!r} any more: restore it")
    return records.encoded(chosen.schema)


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
    if not isinstance(classes, int) or len(data.classes) > classes:
        raise InvalidInput(f"data={chosen.data.source} has {len(data.classes)} classes, the run began with {classes}")


def _directory_by_time() -> Path:
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return next(path for path in tries if not path.exists())
