"""`sordino train` on a table if no network is asked for: learn it, keep the model, and report the outcome."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from sordino.accounting.guarantee import read_versions
from sordino.books import LEDGER, OUTCOME, require_fresh
from sordino.books import reading as reading_books
from sordino.cli.choosing import choose_data, parse_column_bounds
from sordino.cli.config import Config, LearningChoice, ModelChoice
from sordino.cli.lookup import is_benchmark
from sordino.cli.progress import format_clock, open_bar
from sordino.cli.session import choose_directory
from sordino.cli.terminal import caution, console, messages, print_json, save_json, show_reading
from sordino.cli.train import Flags
from sordino.errors import InvalidInput
from sordino.figures import to_plain
from sordino.searching.of_tables import recall_trial
from sordino.tables.encoder import Binned, Named, Worded
from sordino.tables.evaluation import Figures
from sordino.tables.files import read_table
from sordino.tables.predicting import is_saved
from sordino.tables.reading import HELD_OUT_SHARE, DataChoice, is_table, require_file
from sordino.tables.schema import Number, Schema, read_schema
from sordino.tables.training import (
    Fitted,
    Ready,
    Wishes,
    build_program,
    choose_records,
    plan_table,
    prepare_table,
    train_table,
)
from sordino.vault import open_budget

ADDITIVE = "additive"
"""The name of the model of a table, in configurations."""
_OF_NETWORKS = (
    *("model", "recipe", "noise_multiplier", "epochs", "steps", "batch_size", "clip", "lr", "momentum", "optimizer"),
    *("engine", "microbatch", "save_every", "prepare", "features", "augment", "mirror"),
)
_OF_TABLES = ("task", "metrics_epsilon", "unit", "per_unit")
_MANY = 12
SCORED = (
    "Held-out figures: none (the winner's score was noised; --metrics-epsilon releases figures within the same epsilon)"
)
_SHOWN = {
    "auc": "AUC",
    "accuracy": "accuracy",
    "recall": "recall",
    "average_precision": "average precision",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
}


def wants_learning(flags: Flags, base: Config) -> bool:
    """Whether to learn a table by the learner of tables instead of a network."""
    source = flags.data or base.data.source
    network = [*flags.given(*_OF_NETWORKS), *(["non_private_twin"] if flags.non_private_twin else [])]
    other = base.recipe is not None or base.own is not None or base.model.name not in (None, ADDITIVE)
    if not is_benchmark(source) and is_table(source) and not network and not other:
        return True
    if mine := flags.given(*_OF_TABLES):
        why = f"--{network[0].replace('_', '-')}" if network else f"data={source}"
        raise InvalidInput(
            f"--{min(mine).replace('_', '-')} is for tables without a network: it does not go with {why}"
        )
    return False


def train(flags: Flags, base: Config) -> None:
    """Read, learn, save, and report the outcome."""
    config, ready = _choose(flags, base)
    directory = flags.run or choose_directory()
    if (directory / LEDGER).exists():
        raise InvalidInput(
            f"{directory} holds a run already: go on with `sordino resume {directory}` or choose another"
        )
    require_fresh(directory)
    _learn_and_report(config, ready, directory, as_json=flags.json)


def _choose(flags: Flags, base: Config) -> tuple[Config, Ready]:
    data = choose_data(base.data, flags)
    learning = base.learning
    if flags.epsilon is None and learning is None:
        raise InvalidInput("epsilon is missing: use --epsilon 3, what may be spent")
    wanted = flags.given("epsilon", "delta", "accountant", "adjacency", *_OF_TABLES)
    given = read_schema(flags.schema) if flags.schema is not None else base.schema or Schema()
    single = parse_column_bounds(flags.bounds or ())
    of_target = single.pop(data.target or "", learning.bounds if learning else None)
    given = given.with_columns({name: Number(*bounds) for name, bounds in single.items()})
    if data.classes is not None:
        given = replace(given, classes=data.classes)
    kept = {f.name: getattr(learning, f.name) for f in fields(LearningChoice)} if learning else {}
    merged = {**kept, **wanted, "bounds": of_target}
    ready = _prepare(data, given, merged, base.run.seed if flags.seed is None else flags.seed)
    choice = LearningChoice(**{**merged, "delta": ready.budget.delta})
    config = Config(
        data=replace(data, records=len(ready.sheet.train), classes=None),
        schema=given,
        model=ModelChoice(ADDITIVE),
        run=replace(base.run, seed=ready.wishes.seed, **flags.given("dataset_budget")),
        learning=choice,
    )
    return config, ready


def _prepare(data: DataChoice, given: Schema, merged: dict[str, Any], seed: int | None) -> Ready:
    path = require_file(data.source)
    with show_reading() as told:
        table = read_table(path, data.dialect, told)
    if data.target is None:
        raise InvalidInput(f"{path} needs --target COLUMN: {table.describe()}")
    wishes = Wishes(
        target=data.target,
        schema=given,
        bounds=data.bounds,
        target_bounds=merged["bounds"],
        held_out=HELD_OUT_SHARE if data.held_out is None else data.held_out,
        seed=seed,
        **{name: value for name, value in merged.items() if name != "bounds"},
    )
    return prepare_table(table, wishes)


def resume(directory: Path, config: Config, *, as_json: bool) -> None:
    """Learn again after a kill, within the rest of the budget; a finished run is left as it is."""
    if is_saved(directory) and (directory / OUTCOME).is_file():
        console().print(f"{directory} is finished: there is nothing left to do", markup=False)
        return
    if (directory / LEDGER).exists():
        _learn_and_report(config, prepare_again(config), directory, as_json=as_json, resumed=True)
    else:
        _learn_and_report(config, prepare_again(config), directory, as_json=as_json)


def prepare_again(config: Config) -> Ready:
    """Read the records of a run as they were when it began."""
    assert config.learning is not None
    wanted = {f.name: getattr(config.learning, f.name) for f in fields(LearningChoice)}
    ready = _prepare(config.data, config.schema or Schema(), wanted, config.run.seed)
    count = len(ready.sheet.train)
    if config.data.records not in (None, count):
        raise InvalidInput(
            f"data={config.data.source} has {count} training records, not {config.data.records} as when its run began: "
            "a guarantee is about the records it began with; start a new run"
        )
    return ready


def audit(directory: Path, config: Config, *, as_json: bool) -> bool:
    """Replay the run's learning with single records left out: no release may move by more than was paid for it."""
    from sordino.audit.conformance import Neighbours, replay
    from sordino.report.run_folder import Folder

    ready = prepare_again(config)
    searched = (Folder(directory).json(OUTCOME) or {}).get("search")
    plan = None if searched is None else recall_trial(ready, searched)
    program, whole = build_program(ready, plan), ready.sheet.train
    findings: list[str] = []
    releases, removed = 0, choose_records(whole)
    with open_bar("replaying") as bar:
        task = bar.add_task("", total=len(removed), note="")
        for number, place in enumerate(removed):
            kept = np.arange(len(whole)) != place
            found = replay(program, Neighbours("a record", whole.select(kept), whole), seed=number)
            findings += found.findings
            releases += found.releases
            bar.advance(task)
    passed = not findings
    told = {"run": str(directory), "passed": passed, "records": len(removed), "releases": releases}
    save_json(directory / "audit.json", told)  # for the report; findings may be about records, and stay here
    if as_json:
        print_json({**told, "findings": findings})
        return passed
    verdict = "none moved by more than the ledger pays for" if passed else "NOT all of them are paid for"
    console().print(f"{directory}: {releases:,} releases, with and without each of {len(removed)} records: {verdict}")
    if searched is not None:
        console().print("These are those of one trial with the settings that won; trials that lost were forgotten.")
    for finding in findings:
        console().print(f"✗ {finding}", markup=False)
    console().print(f"Kept in {directory / 'audit.json'}: `sordino report {directory}` shows it.", markup=False)
    return passed


def _learn_and_report(config: Config, ready: Ready, directory: Path, *, as_json: bool, resumed: bool = False) -> None:
    named = config.run.dataset_budget
    vault = open_budget(named) if named else None
    plan = plan_table(ready, shared=vault is not None)  # refuse what noise would drown before anything is written
    if vault is not None and not resumed:  # also a run that the dataset's own budget has no room for
        claim = vault.claim(unit=ready.unit, repeatable=ready.wishes.seed is not None)
        claim.preview(plan.events(), ready.budget.adjacency)
    if not as_json:
        _announce(config, ready)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from None
    config.write(directory)
    began = time.monotonic()
    with open_bar("private training") as bar:
        task = bar.add_task("", total=None, note="")
        fitted = train_table(
            *(ready, directory, lambda done, steps: bar.update(task, completed=done, total=steps)),
            resumed=resumed,
            vault=vault,
        )
    told = _to_plain(fitted, directory, round(time.monotonic() - began))
    save_json(directory / OUTCOME, told)
    for words in fitted.learned.cautions:
        caution(words)
    if as_json:
        print_json(told)
    else:
        _print(fitted, directory, told)


def _to_plain(fitted: Fitted, directory: Path, seconds: int) -> dict[str, Any]:
    """Return the outcome of the run, for machines and for its report."""
    learned, ready = fitted.learned, fitted.ready
    with reading_books(directory) as ledger:
        head = ledger.head()
    figures = learned.figures
    accuracy = figures["accuracy"] if figures is not None and "accuracy" in figures.values else None
    return {
        "status": "finished",
        "run": str(directory),
        "steps": learned.plan.settings.steps,
        "total": learned.plan.settings.steps,
        "task": learned.task,
        "records": len(ready.sheet.train),
        "inputs": learned.encoder.width,
        "columns": list(learned.encoder.blocks),
        "left_out": dict(learned.encoder.left_out or {}),
        "classes": list(learned.encoder.classes),
        "held_out_accuracy": accuracy,
        "figures": None if figures is None else figures.to_plain(),
        "cautions": list(learned.cautions),
        "seconds": seconds,
        "events": head.events,
        "head": head.chain.hex(),
        **learned.guarantee.to_dict(),
        "epsilon": to_plain(learned.guarantee.epsilon),
        "versions": read_versions(),
    }


def _announce(config: Config, ready: Ready) -> None:
    """Say which records are used, before anything is spent."""
    held, wishes = len(ready.sheet.held_out), ready.wishes
    protected = "released with noise" if wishes.metrics_epsilon else "not protected"
    kept = f", {held:,} held out to measure on, {protected}" if held else ", none held out"
    _say("Records", f"{len(ready.sheet.train):,} of {Path(config.data.source).name} to train on{kept}")
    if wishes.unit is not None:
        _say("Unit", f"{wishes.unit}: at most {ready.rows_per_unit} records of each are used")
    _say("Budget", f"ε = {ready.budget.epsilon:g} at δ = {ready.budget.delta:g}, for all that is learnt")


def _print(fitted: Fitted, directory: Path, told: dict[str, Any]) -> None:
    learned, out = fitted.learned, console()
    wide = not out.is_terminal
    encoder = learned.encoder
    out.print("\nFinished.\n" if "search" in told else f"\nFinished in {format_clock(told['seconds'])}.\n")
    kinds = Counter(type(block) for block in encoder.blocks.values())
    names = {Binned: "number", Named: "category", Worded: "text"}
    said = [_count(kinds[kind], name) for kind, name in names.items() if kinds[kind]]
    what = (
        f"{encoder.target} ({', '.join(map(_quote, encoder.classes[:_MANY]))})" if encoder.classes else encoder.target
    )
    out.print(f"Learnt privately: {what} from {', '.join(said)}: which values and ranges they have, and", markup=False)
    out.print(f"  what each of them says about {encoder.target}, all of it with noise.", markup=False)
    left = encoder.left_out or {}
    if left:
        shown = ", ".join(f"{name} ({why})" if why else name for name, why in list(left.items())[:_MANY])
        more = f" and {len(left) - _MANY} more" if len(left) > _MANY else ""
        out.print(f"Left out: {shown}{more}", markup=False)
    out.print(f"\nGuarantee. {replace(learned.guarantee, assumptions=())}", markup=False, soft_wrap=wide)
    out.print("Assumptions:")
    for assumption in learned.guarantee.assumptions:
        out.print(Text(f"  - {assumption}"), soft_wrap=wide)
    out.print()
    out.print(SCORED if "search" in told and not learned.figures else _describe_figures(learned.figures), markup=False)
    run = shlex.quote(str(directory))
    out.print(f"\nSaved in {directory}. Next:", markup=False)
    out.print(f"  sordino predict {run} --data new.csv --out predictions.csv", markup=False)
    out.print(f"  sordino report {run}", markup=False)
    out.print(f"  sordino audit {run}", markup=False)


def _describe_figures(figures: Figures | None) -> str:
    if figures is None:
        return "Held-out figures: not measured (--hold-out 0.2 keeps a fifth of the records for them)"
    how = "released with noise" if figures.released else "not protected"
    lines = [f"On {figures.records:,} held-out records ({how}; 95 % intervals):"]
    for name, words in _SHOWN.items():
        if name in figures.values:
            guess = f"; by guessing {figures.baseline[name]:.3f}" if name in figures.baseline else ""
            lines.append(f"  {words:18}{figures.values[name]}{guess}")
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    plural = {"category": "categories"}.get(what, f"{what}s")
    return f"{number:,} {what if number == 1 else plural}"


def _quote(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _say(what: str, words: str) -> None:
    messages().print(f"[bold]{what:9}[/bold] {escape(words)}")
