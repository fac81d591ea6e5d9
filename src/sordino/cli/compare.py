"""`sordino compare`: methods × ε × seeds on a dataset, in parallel, resumable, with tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import options
from sordino.cli.terminal import FOUND, INTERRUPTED, complain, console, messages, print_json
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from sordino.lab.experiments import Case, Settings
    from sordino.lab.experiments.pool import Told

STUDIES = ("scatter", "pixels", "frozen", "selection", "dynamic")
"""Footings of the pages about single mechanisms: their methods run where they are named."""
EPILOG = """
[bold]Examples[/bold]

sordino compare --dataset digits --method dpsgd --method dpsur --epsilon 1 --epsilon 3 --seeds 3

sordino compare --config comparison.toml --out runs/fashion (dataset, methods, epsilons, seeds in a file)

The same command again goes on where it was killed; finished runs are not repeated.
"""
DIED = "its process died twice: run again to go on"


@dataclass(frozen=True)
class Comparison:
    """What is compared; the keys of a --config file."""

    dataset: str | None = None
    methods: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = ()
    seeds: int = 3
    accounting: str = "proven"
    records: int | None = None
    steps: int | None = None
    settings: tuple[str, ...] = ()


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
    dataset_budget: options.NoDatasetBudget = None,
    json: options.Json = False,
) -> None:
    """Compare methods at equal epsilon over several seeds; resumable, with a table, CSV, Parquet and figures."""
    if dataset_budget is not None:
        raise InvalidInput(
            f"dataset-budget={dataset_budget}: compare trains on public benchmarks with repeatable noise, which draws "
            "on nobody's budget: leave it out, or compare runs of `sordino train --dataset-budget`"
        )
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
    plan = replace(
        read_comparison(config) if config else Comparison(), **{k: v for k, v in given.items() if v is not None}
    )
    cases = list_cases(plan)
    folder = out or Path("runs") / f"compare-{cases[0].dataset}"
    run_and_publish(cases, folder, workers, evaluations, as_json=json)


def run_and_publish(
    cases: list[Case], folder: Path, workers: int | None, evaluations: int | None, *, as_json: bool
) -> None:
    """Run all cases with a live table, publish what came out, and say what failed."""
    from sordino.lab.experiments import results, summaries
    from sordino.lab.experiments.publishing import publish

    failed = run_cases(cases, folder, workers, evaluations)
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


def read_comparison(path: Path) -> Comparison:
    """The plan in a TOML file; every mistake is named in one line."""
    from sordino.names import read_toml

    table = read_toml(path)
    known = {f.name for f in fields(Comparison)}
    if unknown := sorted(set(table) - known):
        raise InvalidInput(f"configuration {path} has no key {unknown[0]!r}: it has {', '.join(sorted(known))}")
    if "settings" in table:
        table["settings"] = [str(path.parent / name) for name in table["settings"]]
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Comparison(**values)


def list_cases(plan: Comparison) -> list[Case]:
    """Seed by seed, so that a first table is there early."""
    chosen = _choose_settings(plan)
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


def _choose_settings(plan: Comparison) -> list[Settings]:
    from sordino.lab.experiments import catalogue, read

    own = [read(Path(path)) for path in plan.settings]
    if plan.dataset is None and not own:
        raise InvalidInput("dataset is missing: use --dataset, such as digits or fashion-mnist, or --settings")
    known = catalogue()
    dataset = plan.dataset or own[0].dataset
    if dataset not in {name for name, _ in known} | {settings.dataset for settings in own}:
        raise InvalidInput(f"dataset={dataset!r} is not configured: choose one of {_join(name for name, _ in known)}")
    here = {method: settings for (name, method), settings in known.items() if name == dataset}
    here |= {settings.method: settings for settings in own if settings.dataset == dataset}
    usual = [method for method, settings in here.items() if settings.footing not in STUDIES]
    methods = plan.methods or tuple(settings.method for settings in own) or tuple(usual)
    if unknown := [method for method in methods if method not in here]:
        raise InvalidInput(f"method={unknown[0]!r} is not configured for {dataset}: choose one of {_join(here)}")
    return [here[method] for method in methods]


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def run_cases(cases: Sequence[Case], folder: Path, workers: int | None, evaluations: int | None = None) -> list[str]:
    """Run all cases with a live table; what failed, one line each."""
    from sordino.lab.experiments.cases import EVALUATIONS
    from sordino.lab.experiments.pool import run_all

    try:
        with LiveTable(cases) as live:
            outcomes = run_all(cases, folder, workers, live.tell, EVALUATIONS if evaluations is None else evaluations)
    except KeyboardInterrupt:
        complain("interrupted: the same command again goes on where this one stopped")
        raise typer.Exit(INTERRUPTED) from None
    return [f"{told.case.label}: {told.error or DIED}" for told in outcomes if told.state == "failed"]


class LiveTable:
    """Fills while runs finish: methods down, ε across, on stderr; lines where that is no terminal."""

    def __init__(self, cases: Sequence[Case]) -> None:
        from rich.live import Live

        from sordino.lab.experiments.pool import Told

        self._cases = list({case.label: case for case in cases}.values())
        self._told = {case.label: Told(case, "waiting") for case in self._cases}
        self._console = messages()
        self._live = Live(self._tabulate(), console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def tell(self, told: Told) -> None:
        """Take in what became of a run."""
        self._told[told.case.label] = told
        if self._console.is_terminal:
            self._live.update(self._tabulate())
        elif told.state in ("finished", "failed"):
            reached = "" if told.accuracy is None else f" {told.accuracy:.2%}"
            ended = sum(each.state in ("finished", "failed") for each in self._told.values())
            line = f"{ended}/{len(self._told)} {told.state} {told.case.label}{reached} {told.error}"
            self._console.print(line.rstrip(), markup=False)

    def _tabulate(self) -> Table:
        from rich.table import Table

        table = Table("dataset", "method", "accounting")
        epsilons = sorted({case.epsilon for case in self._cases})
        for epsilon in epsilons:
            table.add_column(f"ε = {epsilon:g}", justify="right")
        for line in dict.fromkeys((case.dataset, case.method, case.accounting) for case in self._cases):
            table.add_row(*line, *(self._fill_cell(line, epsilon) for epsilon in epsilons))
        running = [told for told in self._told.values() if told.state == "running"]
        table.caption = "   ".join(
            f"{told.case.method} ε {told.case.epsilon:g} #{told.case.seed}: {told.step}/{told.steps or '?'}"
            for told in running
        )
        return table

    def _fill_cell(self, line: tuple[str, str, str], epsilon: float) -> str:
        mine = [
            told
            for told in self._told.values()
            if (told.case.dataset, told.case.method, told.case.accounting, told.case.epsilon) == (*line, epsilon)
        ]
        scores = [100 * told.accuracy for told in mine if told.state == "finished" and told.accuracy is not None]
        failed = " [red]failed[/red]" if any(told.state == "failed" for told in mine) else ""
        mean = f"{statistics.mean(scores):.2f}" if scores else "…"
        return f"{mean} ({len(scores)}/{len(mine)}){failed}" if mine else ""
