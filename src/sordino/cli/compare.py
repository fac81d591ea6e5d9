"""`sordino compare`: methods × ε × seeds on a dataset, in parallel, resumable, with tables and figures."""

from __future__ import annotations

import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino import lab
from sordino.cli import early, options
from sordino.cli.terminal import FOUND, INTERRUPTED, complain, console, messages, print_json
from sordino.errors import InvalidInput
from sordino.figures import write_count

if TYPE_CHECKING:
    from rich.table import Table

    from sordino.lab.experiments import Case, Settings
    from sordino.lab.experiments.pool import Told

STUDIES = ("scatter", "pixels", "frozen", "selection", "dynamic")
"""Comparisons made for the pages about single mechanisms; their methods run only if they are named."""
EPILOG = """
[bold]Examples[/bold]

sordino compare --dataset digits --method dpsgd --method dpsur --epsilon 1 --epsilon 3 --seeds 3

sordino compare --config comparison.toml --out runs/fashion (dataset, methods, epsilons, seeds in a file)

sordino compare --dataset digits --method dpsgd --recipe mine.py:softened --epsilon 3 (a mechanism of your own)

sordino compare --dataset patients.csv --target outcome --epsilon 2 --seeds 1 (your own table: every run costs)

The same command again goes on where it was killed; finished runs are not repeated.
"""
ACCOUNTINGS = ("proven", "published", "both")
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
    recipes: tuple[str, ...] = ()


def compare(
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", "--data", help="Such as fashion-mnist; `digits` needs no download. Or a table of your own."
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: all that are configured.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="A mechanism of your own beside them; may be repeated."),
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: those configured.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds. Default: 3.")] = None,
    accounting: Annotated[str | None, typer.Option(help="proven (default), published or both.")] = None,
    settings: Annotated[list[Path] | None, typer.Option(help="A method's own TOML file; may be repeated.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with dataset, methods, epsilons, seeds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/compare-<dataset>.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes at once. Default: one per core.")] = None,
    records: Annotated[
        int | None, typer.Option(help="Train on this many of the first records only, to try it out.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Take this many steps only, to try it out; the noise is set to match.")
    ] = None,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="Times that a run is evaluated and saved. Default: 60.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of finished runs.")] = False,
    target: Annotated[str | None, typer.Option(help="The column of your table that is to be predicted.")] = None,
    schema: Annotated[Path | None, typer.Option(help="TOML with what is public about your table.")] = None,
    delta: options.Delta = None,
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
        "recipes": tuple(recipe or ()) or None,
    }
    _check_names(dataset, () if settings else method or (), recipe or ())
    for each in epsilon or ():
        options.require_numbers({"epsilon": each})
    options.require_numbers({"delta": delta, "records": records, "steps": steps, "seeds": seeds})
    if accounting is not None:
        early.require_listed("accounting", accounting, ACCOUNTINGS)
    plan = replace(
        read_comparison(config) if config else Comparison(), **{k: v for k, v in given.items() if v is not None}
    )
    if plan.dataset is not None and is_own(plan.dataset):
        from sordino.cli.comparing_tables import compare_on_table

        for name, value in (("records", plan.records), ("steps", plan.steps), ("settings", plan.settings or None)):
            if value is not None:
                raise InvalidInput(f"{name}={value} is for the datasets that Sordino knows: leave it out for a table")
        compare_on_table(plan, target, schema, delta, out, as_json=json)
        return
    for name, own in (("target", target), ("schema", schema), ("delta", delta)):
        if own is not None:
            raise InvalidInput(f"{name}={own} is for a table of your own: leave it out for {plan.dataset}")
    cases = list_cases(plan)
    folder = out or Path("runs") / f"compare-{cases[0].dataset}"
    run_and_publish(cases, folder, workers, evaluations, as_json=json, keep=keep)


def is_own(dataset: str) -> bool:
    """Whether this names a user's file, not a dataset of the laboratory."""
    return bool(Path(dataset).suffix) and dataset not in options.DATA


def _check_names(dataset: str | None, methods: Sequence[str], recipes: Sequence[str]) -> None:
    """Refuse mistyped names before torch is loaded."""
    for code in recipes:
        if ":" not in code:
            raise InvalidInput(f"recipe={code!r} must be file.py:function: give --method for those that Sordino has")
        early.require_code(code)
    if dataset is not None and is_own(dataset) and not Path(dataset).exists():
        raise InvalidInput(f"dataset={dataset} does not exist: give a table, or one of {', '.join(options.DATA)}")
    if dataset is not None and not is_own(dataset) and "SORDINO_CONFIGS" not in os.environ:
        early.require_known("dataset", dataset, options.DATA, ", or a table of yours", "is not configured: choose")
        named = [*_list_configured(dataset), *(code.rpartition(":")[2] for code in recipes)]
        for method in methods:
            early.require_listed("method", method, named, words=f"is not configured for {dataset}: choose")


def _list_configured(dataset: str) -> list[str]:
    """List the methods for a laboratory dataset by the names in its files; reading them in full would load torch."""
    found: list[str] = []
    for path in sorted((Path(lab.__file__).parent / "configs" / dataset).glob("*.toml")):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        found += tables["methods"] if "methods" in tables else [tables["method"]]
    return found


def run_and_publish(
    cases: list[Case],
    folder: Path,
    workers: int | None,
    evaluations: int | None,
    *,
    as_json: bool,
    keep: bool = False,
) -> None:
    """Run all cases with a live table, publish the results, and say what failed."""
    from sordino.lab.experiments import results, summaries
    from sordino.lab.experiments.publishing import publish

    failed = run_cases(cases, folder, workers, evaluations, keep=keep)
    rows = [row for case in cases if (row := results.find(folder, case.label)) is not None]
    paths = publish(rows, folder) if rows else []
    if as_json:
        print_json({"rows": rows, "files": [str(path) for path in paths]})
    elif rows:
        console().print(summaries.accuracy_table(rows, settings=True), markup=False)
        say_where(rows, folder, paths)
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(FOUND)


def say_where(rows: Sequence[Any], folder: Path, paths: Sequence[Path]) -> None:
    """Say where the results are, and which page to open."""
    console().print(
        f"{write_count(len(rows), 'result')} in {folder}: {', '.join(path.name for path in paths[:3])}", markup=False
    )
    page = next((path for path in paths if path.suffix == ".html"), None)
    if page is not None:
        console().print(f"Open {page} in a browser", markup=False)


def read_comparison(path: Path) -> Comparison:
    """Read the plan in a TOML file; an error names the mistake in one line."""
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
    """List the cases seed by seed, so that there is a first table early on."""
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
    mine = [_configure_own(code, dataset, here) for code in plan.recipes]
    here |= {settings.method: settings for settings in mine}
    named = tuple(settings.method for settings in (*own, *mine))
    methods = tuple(dict.fromkeys((*plan.methods, *named))) or tuple(usual)
    if unknown := [method for method in methods if method not in here]:
        raise InvalidInput(f"method={unknown[0]!r} is not configured for {dataset}: choose one of {_join(here)}")
    return [here[method] for method in methods]


def _configure_own(code: str, dataset: str, known: Mapping[str, Settings]) -> Settings:
    """Put a user's function in place of DP-SGD: with the same records, features, model, draws and length."""
    from sordino.cli.own_recipes import locate

    base = known.get("dpsgd")
    if base is None:
        raise InvalidInput(
            f"recipe={code}: dpsgd is not configured for {dataset}, whose model and length it would take"
        )
    place = locate(code)
    name = code.rpartition(":")[2]
    if name in known:
        raise InvalidInput(f"recipe={code}: there is a method {name!r} already: give the function another name")
    sizes = {key: base.base["recipe"][key] for key in ("batch_size", "epochs", "steps") if key in base.base["recipe"]}
    tables = {**base.base, "recipe": {"name": place, **sizes}}
    return replace(base, method=name, footing="", provenance=f"the user's {code}", base=tables, by_epsilon={})


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def run_cases(
    cases: Sequence[Case],
    folder: Path,
    workers: int | None,
    evaluations: int | None = None,
    *,
    keep: bool = False,
) -> list[str]:
    """Run all cases with a live table; return what failed, one line each."""
    from sordino.lab.experiments.cases import EVALUATIONS
    from sordino.lab.experiments.pool import run_all

    if workers is not None and workers < 1:
        raise InvalidInput(f"workers={workers} must be >= 1: leave it out to use every core")
    messages().print(foretell(cases, folder, workers), markup=False)
    looks = EVALUATIONS if evaluations is None else evaluations
    try:
        with LiveTable(cases) as live:
            outcomes = run_all(cases, folder, workers, live.tell, looks, keep=keep)
    except KeyboardInterrupt:
        complain("interrupted: run the same command again to go on")
        raise typer.Exit(INTERRUPTED) from None
    return [f"{told.case.label}: {told.error or DIED}" for told in outcomes if told.state == "failed"]


def foretell(cases: Sequence[Case], folder: Path, workers: int | None) -> str:
    """Say how many runs there are, and about how long they take, judging by those that came with Sordino."""
    from sordino.lab.experiments import results
    from sordino.lab.experiments.estimates import estimate_seconds
    from sordino.lab.machine import cores

    different = {case.label: case for case in cases}
    waiting = [case for case in different.values() if results.find(folder, case.label) is None]
    at_once = min(workers or cores(), max(1, len(waiting)))
    count = write_count(len(different), "run")
    done = len(different) - len(waiting)
    said = f"{count}{f', {done} of them finished already' if done else ''}, {at_once} at a time"
    if not waiting:
        return said
    known = [estimate_seconds(case) for case in waiting]
    priced = [seconds for seconds in known if seconds is not None]
    if not priced:
        return f"{said}; no run like these came with Sordino, so the time is known once the first is finished"
    total = sum(priced) * len(waiting) / len(priced) / at_once
    partly = "" if len(priced) == len(waiting) else f" (by {len(priced)} of them)"
    return f"{said}: about {_describe_time(total)} judging by the runs that came with Sordino{partly}"


def _describe_time(seconds: float) -> str:
    """45 s, 14 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class LiveTable:
    """A table on stderr that fills as runs finish, methods down, ε across; plain lines if stderr is no terminal."""

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
        """Note how a run ended."""
        self._told[told.case.label] = told
        if self._console.is_terminal:
            self._live.update(self._tabulate())
        elif told.state in ("finished", "failed"):
            reached = "" if told.accuracy is None else f" {told.accuracy:.2%}"
            ended = sum(each.state in ("finished", "failed") for each in self._told.values())
            short = " (shortened)" if told.case.short else ""
            line = f"{ended}/{len(self._told)} {told.state} {told.case.label}{short}{reached} {told.error}"
            self._console.print(line.rstrip(), markup=False)

    def _tabulate(self) -> Table:
        from rich.table import Table

        from sordino.lab.experiments.summaries import describe_features

        table = Table("dataset", "method", "model", "features", "accounting")
        epsilons = sorted({case.epsilon for case in self._cases})
        for epsilon in epsilons:
            table.add_column(f"ε = {epsilon:g}", justify="right")
        for case in {(case.dataset, case.method, case.accounting): case for case in self._cases}.values():
            line = (case.dataset, case.method, case.accounting)
            name = f"{case.method} (shortened)" if case.short else case.method
            model = (str(case.model["name"]), describe_features(case.features))
            cells = (self._fill_cell(line, epsilon) for epsilon in epsilons)
            table.add_row(case.dataset, name, *model, case.accounting, *cells)
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
