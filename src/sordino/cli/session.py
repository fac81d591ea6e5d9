"""A run, built from its configuration: a new one, or one that continues from its folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.accounting import Guarantee
from sordino.accounting.guarantee import UNPROTECTED
from sordino.augmentation import ShiftAndMirror
from sordino.books import LEDGER, require_fresh, write_durably
from sordino.cli import config, describing, lookup
from sordino.cli.choosing import Chosen
from sordino.cli.config import Config, ModelChoice
from sordino.cli.terminal import caution
from sordino.errors import InvalidInput
from sordino.private import Private, Step
from sordino.proposals import hold_final
from sordino.run import FIXED_IN_ADVANCE, HELD_OUT
from sordino.tables.dataset import Data
from sordino.tables.defaults import count_parameters, judge_size
from sordino.tables.preparing import complete_schema, invent_records
from sordino.tables.reading import Sheet, require_count
from sordino.tables.release import ReleasePlan, plan_release
from sordino.tables.schema import Schema, describe_header
from sordino.vault import open_budget

PREPARATION = "preparation.toml"
"""The configuration of a run whose table is being prepared; `config.toml` takes its place when that is done."""


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
        assert self.private.run.folder is not None
        return self.private.run.folder

    @property
    def has_held_out(self) -> bool:
        return len(self.data.test_set) > 0  # type: ignore[arg-type]  # Dataset does not promise a length

    def steps(self) -> Iterator[Step]:
        """Take the remaining steps one by one."""
        return self.private.steps()

    def measure(self) -> tuple[float | None, float | None]:
        """Measure accuracy and mean loss on the held-out records; None without any."""
        if not self.has_held_out:
            return None, None
        with hold_final(self.private.bench.optimizer):
            return measure(self.model, self.data.test)

    def find_released_clip(self) -> float | None:
        """Return the clipping bound in force if the sampler moves it, from released values alone; else None."""
        bench = self.private.bench
        if not getattr(bench.recipe.sampler, "moves_clip", False):
            return None
        return float(bench.states.save()["clip"])

    def guarantee(self) -> Guarantee:
        """Return the guarantee, with what the preparation of the data has read."""
        spent = self.private.guarantee()
        said = spent.assumptions
        if self.config.data.source == "digits":
            tuned = "the default settings of this command were found on these digits, which are public"
            said = tuple(tuned if line == FIXED_IN_ADVANCE else line for line in said)
        return replace(
            spent, assumptions=(*said, *lookup.list_assumptions(self.config.data.source), *self.data.caveats)
        )


def compute_losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes, reduction="none")


@torch.no_grad()
def measure(model: nn.Module, records: tuple[Tensor, Tensor]) -> tuple[float, float | None]:
    """Return the share of `records` that are classified correctly, and the mean cross-entropy of those of known class.

    The model is in eval mode meanwhile. The loss is None if no class is known or it is not finite.
    """
    inputs, classes = records
    training = model.training
    model.eval()
    try:
        outputs = torch.cat([model(part) for part in inputs.split(1024)])
    finally:
        model.train(training)
    loss = float(F.cross_entropy(outputs.double(), classes))
    return float((outputs.argmax(1) == classes).double().mean()), loss if math.isfinite(loss) else None


def begin(chosen: Chosen, run: Path | None, ready: Callable[[], None] = lambda: None) -> Session:
    """Start a new run in its own directory; the configuration is there before anything is learnt.

    A table whose schema is open is prepared first. Before that, model and recipe are tried on random records, so that
    nothing is spent on a run that cannot continue. `ready` is called last, right before anything is spent.
    """
    directory = run or choose_directory()
    if (directory / LEDGER).exists():
        raise InvalidInput(
            f"{directory} holds a run already: go on with `sordino resume {directory}` or choose another"
        )
    if chosen.plan is None:
        data = _encode(chosen.config, chosen.records)
        settled = _choose_model(chosen.config, data)
        private = _build(settled, data, directory)
        _warn(private)
        ready()
    else:
        _rehearse(chosen)
        ready()
        assert isinstance(chosen.records, Sheet)
        settled = prepare_records(chosen.config, chosen.records, chosen.plan, directory)
        data = _encode(settled, chosen.records)
        settled = _choose_model(settled, data)
        private = _build(settled, data, None)
        private.load(directory)
    try:
        settled.write(directory)
    except InvalidInput:
        private.close()
        raise
    return _bind(settled, data, private)


def _rehearse(chosen: Chosen) -> None:
    """Build everything around random records instead of the table's, so that mistakes are refused early."""
    public, records = chosen.config, chosen.config.data.records
    if public.model.name is not None and ":" in public.model.name:
        raise InvalidInput(
            f"model={public.model.name} of your own must know its inputs before anything is released: "
            "give --schema with every range, and --classes"
        )
    assert public.schema is not None
    assert records is not None
    data = invent_records(public.schema, records)
    with _build(_choose_model(public, data), data, None) as private:
        _warn(private)


def _warn(private: Private) -> None:
    recipe, model = private.bench.recipe, private.bench.objective.model
    if (words := judge_size(recipe, count_parameters(model))) is not None:
        caution(words)


def _choose_model(public: Config, data: Data) -> Config:
    """Complete the configuration with a model that fits the records: by name, or the default for such records."""
    sample = data.train_set[0][0]
    assert public.recipe is not None
    described = public.data.features is not None and public.model.name is None
    wanted = ModelChoice(describing.MODEL) if described else public.model
    chosen = lookup.choose_architecture(wanted, public.data.source, sample.shape, len(data.classes), public.recipe)
    return replace(public, model=chosen)


def prepare_records(public: Config, sheet: Sheet, plan: ReleasePlan, directory: Path) -> Config:
    """Complete the schema. Everything that a run needs is on disk before anything is released (law 5).

    If this is killed, the table is prepared again. The complete schema is written at once, because a lost one would
    have to be paid for again.
    """
    assert public.recipe is not None
    assert public.schema is not None
    budget = open_budget(public.run.dataset_budget) if public.run.dataset_budget else None
    if not (directory / LEDGER).exists():
        require_fresh(directory)
        if budget is not None and public.recipe.budget is not None:  # refused before there is a folder
            claim = budget.claim(basis=public.recipe.basis)
            claim.preview([*plan.events(), *public.recipe.plan()], public.recipe.budget.adjacency)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        public.write(directory, PREPARATION)
        if public.own is None:  # its parts may have no name to write
            write_durably(directory / "recipe.toml", public.recipe.to_toml().encode())
    except OSError as error:
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from error
    complete = complete_schema(sheet, public.schema, plan, public.recipe, directory, public.run.seed, budget)
    settled = replace(public, schema=complete)
    settled.write(directory)
    (directory / PREPARATION).unlink(missing_ok=True)
    return settled


def reopen(directory: Path, *, trust_code: bool = False, prepare: bool = True) -> Session:
    """Continue a run that was interrupted, killed or finished; one that was killed while preparing is prepared again.

    The folder may come from anybody: code that it names runs only if `trust_code` says so. Without `prepare` nothing is
    released, and a run that is not fully prepared is refused.
    """
    chosen = config.read_run_config(directory)
    unprepared = config.read_run_config(directory, PREPARATION) if chosen is None else None
    found = chosen or unprepared
    if found is None:
        raise InvalidInput(explain_missing(directory))
    lookup.require_trusted(found, trust_code, directory / config.FILE)
    found = lookup.complete_recipe(found)
    if chosen is not None:
        chosen = found
    if found.recipe is None:
        raise InvalidInput(f"{directory / config.FILE} has no [recipe]: give the folder of a run of `sordino train`")
    records = lookup.load_records(found.data)
    if isinstance(records, Sheet) and found.schema is not None:
        records = records.take_parts(found.schema)
    require_count(found.data, records)
    if chosen is None:
        if not prepare:
            raise InvalidInput(f"{directory} is not prepared yet, so it has no model: sordino resume goes on with it")
        chosen = _prepare_again(found, records, directory)
    data = _encode(chosen, records)
    settled = chosen if chosen.model.name else _choose_model(chosen, data)
    _require_classes(settled, data)
    private = _build(settled, data, None)
    private.load(directory)
    if settled is not chosen:  # it was killed before its model was chosen
        settled.write(directory)
    (directory / PREPARATION).unlink(missing_ok=True)  # a kill left it: config.toml takes its place
    return _bind(settled, data, private)


def _bind(chosen: Config, data: Data, private: Private) -> Session:
    """Bind everything together, and note in the ledger which records no guarantee covers."""
    session = Session(chosen, data, private)
    if session.has_held_out:
        private.declare(UNPROTECTED, HELD_OUT)
    return session


def explain_missing(directory: Path) -> str:
    """Say why this run cannot continue."""
    said = f"{directory} holds no {config.FILE}: give the folder of a run of `sordino train`"
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
        raise InvalidInput(f"{PREPARATION} of {found.data.source} is not whole: start a new run")
    schema = describe_header(found.schema or Schema(), list(records.train.columns), records.target, None)
    records.check(schema)
    shared = found.run.dataset_budget is not None
    plan = plan_release(schema, count, recipe.budget, found.data.prepare, shared=shared)
    if plan is None:
        raise InvalidInput(f"{PREPARATION} of {found.data.source} leaves nothing open: start a new run")
    again = Chosen(replace(found, schema=schema), records, plan)
    _rehearse(again)
    return prepare_records(again.config, records, plan, directory)


def _encode(chosen: Config, records: Data | Sheet) -> Data:
    if not isinstance(records, Sheet):
        return records
    if chosen.schema is None or not chosen.schema.complete:
        raise InvalidInput(f"the configuration of {chosen.data.source} has no complete [schema]: start a new run")
    if missing := sorted({*chosen.schema.columns, records.target} - set(records.train.columns)):
        raise InvalidInput(f"data={chosen.data.source} has no column {missing[0]!r} any more: restore it")
    return records.encode(chosen.schema)


def _build(chosen: Config, data: Data, run: Path | None) -> Private:
    assert chosen.recipe is not None
    model = lookup.build_model(chosen.model, chosen.run.seed)
    return Private(
        model,
        chosen.recipe.optimizer.build(model.parameters()),
        data.train_set,
        compute_losses,
        chosen.recipe,
        run=run,
        seed=chosen.run.seed,
        engine=chosen.run.engine,
        microbatch=chosen.run.microbatch,
        **make_views(chosen, data),
        vault=open_budget(chosen.run.dataset_budget) if chosen.run.dataset_budget else None,
    )


def make_views(chosen: Config, data: Data) -> dict[str, Any]:
    """Options of `Private` for random views of images: shifted by up to an eighth of a side, and mirrored if asked."""
    count = chosen.run.augment
    if count is None:
        return {}
    shape = tuple(data.train_set[0][0].shape)
    if len(shape) != 3:
        raise InvalidInput(f"augment={count} makes views of images, and {chosen.data.source} holds none: leave it out")
    return {"augment": count, "augmentation": ShiftAndMirror(min(shape[1:]) // 8, bool(chosen.run.mirror))}


def _require_classes(chosen: Config, data: Data) -> None:
    classes = chosen.model.options.get("classes", len(data.classes))
    if not isinstance(classes, int) or len(data.classes) > classes:
        raise InvalidInput(f"data={chosen.data.source} has {len(data.classes)} classes, the run began with {classes}")


def choose_directory() -> Path:
    """Choose a new folder in runs/, named after the time."""
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return next(path for path in tries if not path.exists())
