"""`sordino compare` on a user's own table: `sordino train` once for every method, ε and repetition.

The records are private here. Every run spends its own ε on them, and anybody who looks at all results has seen the
releases of all runs. The command says so before the first run and again beside the results.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sordino.books import LEDGER, OUTCOME
from sordino.cli import early, options
from sordino.cli.terminal import FOUND, INTERRUPTED, caution, complain, console, messages, print_json
from sordino.errors import InvalidInput, SordinoError
from sordino.figures import write_count
from sordino.lab.experiments import results
from sordino.report.run_folder import Folder

if TYPE_CHECKING:
    from sordino.cli.compare import Comparison

ADDITIVE = "additive"
"""The name of what `sordino train` does with a table if no network is asked for."""
METHODS = (ADDITIVE, "dpsgd", "automatic")
EPSILONS = (1.0, 3.0)


@dataclass(frozen=True)
class TableRun:
    """One run: its name, and the options for `sordino train`."""

    label: str
    method: str
    epsilon: float
    seed: int
    recipe: str | None


def compare_on_table(
    plan: Comparison, target: str | None, schema: Path | None, delta: float | None, out: Path | None, *, as_json: bool
) -> None:
    """Train every method on the table, publish the results, and say what all runs cost together."""
    from sordino.cli.compare import say_where
    from sordino.cli.train import Flags
    from sordino.lab.experiments.publishing import publish
    from sordino.lab.experiments.summaries import accuracy_table

    assert plan.dataset is not None
    if target is None:
        raise InvalidInput(f"dataset={plan.dataset} is a table: give --target, the column that is to be predicted")
    if plan.accounting != "proven":
        raise InvalidInput(f"accounting={plan.accounting} is for the papers' datasets: a table's epsilon is proven")
    trials = list_trials(plan)
    folder = out or Path("runs") / f"compare-{Path(plan.dataset).stem}"
    wanted = Flags(data=plan.dataset, target=target, schema=schema, delta=delta, json=True)
    early.check_training(replace(wanted, epsilon=trials[0].epsilon))
    together = describe_total(trials)
    waiting = [trial for trial in trials if results.find(folder, trial.label) is None]
    done = len(trials) - len(waiting)
    already = f", {done} of them finished already" if done else ""
    messages().print(f"{write_count(len(trials), 'run')}{already}, one at a time", markup=False)
    if together:
        caution(together)
    rows, failed = _run_all(trials, wanted, folder)
    paths = publish(rows, folder) if rows else []
    if as_json:
        print_json({"rows": rows, "files": [str(path) for path in paths], "together": together})
    elif rows:
        console().print(accuracy_table(rows, settings=True), markup=False)
        say_where(rows, folder, paths)
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(FOUND)


def list_trials(plan: Comparison) -> list[TableRun]:
    """List the runs seed by seed, so that there is a first table early on."""
    known = [ADDITIVE, *options.list_methods()]
    for method in plan.methods:
        early.require_known("method", method, known)
    if plan.seeds < 1:
        raise InvalidInput(f"seeds={plan.seeds} must be >= 1")
    own = {code.rpartition(":")[2]: code for code in plan.recipes}
    methods = {method: None if method == ADDITIVE else method for method in plan.methods or METHODS} | own
    return [
        TableRun(f"{method}-eps{epsilon:g}-run{seed}", method, float(epsilon), seed, recipe)
        for seed in range(plan.seeds)
        for method, recipe in methods.items()
        for epsilon in plan.epsilons or EPSILONS
    ]


def describe_total(trials: Sequence[TableRun]) -> str:
    """Say what several runs cost together: their sum, which holds whatever they release and whoever chose them."""
    if len(trials) == 1:
        return ""
    total = sum(trial.epsilon for trial in trials)
    return (
        f"each of the {len(trials)} runs spends its epsilon on the same records: whoever sees all of them sees "
        f"epsilon = {total:g} in all (by adding up), not that of the one that is kept"
    )


def _run_all(trials: Sequence[TableRun], wanted: Any, folder: Path) -> tuple[list[results.Row], list[str]]:
    rows: list[results.Row] = []
    failed: list[str] = []
    for number, trial in enumerate(trials, 1):
        row = results.find(folder, trial.label)
        if row is None:
            try:
                row = _train(trial, wanted, folder)
            except SordinoError as error:
                failed.append(f"{trial.label}: {error}")
                continue
            except KeyboardInterrupt:
                complain("interrupted: run the same command again to go on")
                raise typer.Exit(INTERRUPTED) from None
            results.write(folder, row)
        rows.append(row)
        messages().print(f"{number}/{len(trials)} {trial.label} {row['accuracy']:.2%}", markup=False)
    return rows, failed


def _train(trial: TableRun, wanted: Any, folder: Path) -> results.Row:
    """Run `sordino train`, or `resume` if the run was killed, without showing its output; return its row."""
    from sordino.cli.launch import train_and_report
    from sordino.cli.resume import resume

    place = folder / "runs" / trial.label
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            if (place / LEDGER).exists():
                resume(place, trust_code=True, json=True)  # this command itself names the code
            else:
                train_and_report(replace(wanted, recipe=trial.recipe, epsilon=trial.epsilon, run=place))
        except (typer.Exit, KeyboardInterrupt):
            raise KeyboardInterrupt from None
    return _make_row(trial, wanted, place)


def _make_row(trial: TableRun, wanted: Any, place: Path) -> results.Row:
    told: dict[str, Any] = json.loads((place / OUTCOME).read_text())
    accuracy = told.get("held_out_accuracy")
    if accuracy is None:
        raise InvalidInput(f"{place} has no held-out accuracy to compare: a comparison takes a target with classes")
    curve = _read_curve(place)
    guarantee = {key: told[key] for key in ("epsilon", "delta", "basis", "unit", "adjacency", "accountant")}
    model = Folder(place).toml("config.toml").get("model", {}).get("name", "not recorded")
    return {
        "label": trial.label,
        "dataset": Path(str(wanted.data)).name,
        "method": trial.method,
        "epsilon": trial.epsilon,
        "seed": trial.seed,
        "accounting": "proven",
        "accuracy": accuracy,
        "seconds": told.get("seconds", 0),
        "basis": told["basis"],
        "guarantee": guarantee,
        "steps": told.get("steps"),
        "curve": curve,
        "noise": [],
        "clip": [],
        "case": {"model": {"name": model}, "features": {"kind": "columns"}, "run": str(place)},
    }


def _read_curve(place: Path) -> list[dict[str, float]]:
    return [{"step": step, "accuracy": accuracy} for step, accuracy in Folder(place).history()]
