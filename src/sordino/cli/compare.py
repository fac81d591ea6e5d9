"""`sordino compare`: methods × ε × seeds on a dataset, in parallel, resumable, with tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino import toml
from sordino.cli import options
from sordino.cli.common import FOUND, complain, console, print_json
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.lab.experiments import Case, Settings

EPILOG = """
[bold]Examples[/bold]

sordino compare --dataset digits --method dpsgd --method dpsur --epsilon 1 --epsilon 3 --seeds 3

sordino compare --config comparison.toml --out runs/fashion (dataset, methods, epsilons, seeds in a file)

The same command again goes on where it was killed; finished runs are not repeated.
"""


@dataclass(frozen=True)
class Plan:
    """What is compared; the keys of a --config file."""

    dataset: str | None = None
    methods: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = ()
    seeds: int = 3
    accounting: str = "proven"
    records: int | None = None
    steps: int | None = None
    settings: tuple[str, ...] = ()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(compare)


def compare(
    dataset: Annotated[str | None, typer.Option(help="Such as fashion-mnist; `digits` needs no download.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: all that are configured.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: those configured.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds. Default: 3.")] = None,
    accounting: Annotated[str | None, typer.Option(help="proven (default), published or both.")] = None,
    settings: Annotated[list[Path] | None, typer.Option(help="A method's own TOML file; may be repeated.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with dataset, methods, epsilons, seeds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/compare-<dataset>.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes at once. Default: one per core.")] = None,
    records: Annotated[int | None, typer.Option(help="Train on the first so many records alone, for a try.")] = None,
    steps: Annotated[int | None, typer.Option(help="Take so few steps, for a try; the noise follows.")] = None,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="Times that a run is evaluated and saved. Default: 60.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare methods at equal epsilon over several seeds; resumable, with a table, CSV, Parquet and figures."""
    given: dict[str, Any] = {
        "dataset": dataset,
        "methods": tuple(method or ()) or None,
        "epsilons": tuple(epsilon or ()) or None,
        "seeds": seeds,
        "accounting": accounting,
        "records": records,
        "steps": steps,
        "settings": tuple(str(path) for path in settings or ()) or None,
    }
    plan = replace(read_plan(config) if config else Plan(), **{k: v for k, v in given.items() if v is not None})
    cases = cases_of(plan)
    folder = out or Path("runs") / f"compare-{cases[0].dataset}"
    conclude(cases, folder, workers, evaluations, as_json=json)


def conclude(cases: list[Case], folder: Path, workers: int | None, evaluations: int | None, *, as_json: bool) -> None:
    """Run all cases with a live table, publish what came out, and say what failed."""
    from sordino.cli.live import run_shown
    from sordino.lab.experiments import results, summaries
    from sordino.lab.experiments.publishing import publish

    failed = run_shown(cases, folder, workers, evaluations)
    rows = [row for case in cases if (row := results.find(folder, case.label)) is not None]
    paths = publish(rows, folder) if rows else []
    if as_json:
        print_json({"rows": rows, "files": [str(path) for path in paths]})
    elif rows:
        console().print(summaries.accuracy_table(rows), markup=False)
        console().print(f"{len(rows)} results in {folder}: {', '.join(path.name for path in paths[:3])}", markup=False)
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(FOUND)


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file; every mistake is named in one line."""
    table = toml.read(path)
    known = {f.name for f in fields(Plan)}
    if unknown := sorted(set(table) - known):
        raise InvalidInput(f"configuration {path} has no key {unknown[0]!r}: it has {', '.join(sorted(known))}")
    if "settings" in table:
        table["settings"] = [str(path.parent / name) for name in table["settings"]]
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Plan(**values)


def cases_of(plan: Plan) -> list[Case]:
    """Seed by seed, so that a first table is there early."""
    chosen = _chosen(plan)
    if plan.seeds < 1:
        raise InvalidInput(f"seeds={plan.seeds} must be >= 1")
    kinds = ("proven", "published") if plan.accounting == "both" else (plan.accounting,)
    cases = [
        case
        for seed in range(plan.seeds)
        for settings in chosen
        for kind in kinds
        for case in settings.cases(plan.epsilons or None, [seed], kind)
    ]
    if plan.records or plan.steps:
        cases = [case.shortened(plan.records, plan.steps) for case in cases]
    return cases


def _chosen(plan: Plan) -> list[Settings]:
    from sordino.lab.experiments import catalogue, read

    own = [read(Path(path)) for path in plan.settings]
    if plan.dataset is None and not own:
        raise InvalidInput("dataset is missing: use --dataset, such as digits or fashion-mnist, or --settings")
    known = catalogue()
    dataset = plan.dataset or own[0].dataset
    if dataset not in {name for name, _ in known} | {settings.dataset for settings in own}:
        raise InvalidInput(f"dataset={dataset!r} is not configured: choose one of {_listed(name for name, _ in known)}")
    here = {method: settings for (name, method), settings in known.items() if name == dataset}
    here |= {settings.method: settings for settings in own if settings.dataset == dataset}
    methods = plan.methods or (tuple(settings.method for settings in own) or tuple(here))
    if unknown := [method for method in methods if method not in here]:
        raise InvalidInput(f"method={unknown[0]!r} is not configured for {dataset}: choose one of {_listed(here)}")
    return [here[method] for method in methods]


def _listed(names: Any) -> str:
    return ", ".join(sorted(set(names)))
