"""`sordino reproduce`: rerun a table of a paper, its figures beside ours at the same published and proven ε."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli import early, options
from sordino.cli.terminal import FOUND, complain, console
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.lab.experiments.papers import PaperTable
    from sordino.lab.experiments.results import Row

EPILOG = """
[bold]Examples[/bold]

sordino reproduce --list

sordino reproduce dpsur:table2 --dataset fashion-mnist

sordino reproduce dynamic:table1 --dataset mnist --quick (one seed, one epsilon)

The same command again goes on where it was killed; finished runs are not repeated.
"""
SEEDS = 3
_WITHOUT_EFFECT = {
    "seconds": (("seeds", "workers", "steps"), "two steps of every cell are measured, one cell after the other"),
    "attack": (("workers",), "targets are trained and attacked one after the other"),
}
"""Options that have no effect on a kind of table, and why."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `sordino reproduce`: which part of a table, how long the runs are, and where they go."""

    table: Annotated[str | None, typer.Argument(help="Such as dpsur:table2; --list shows them all.")] = None
    dataset: Annotated[str | None, typer.Option(help="Only this dataset of the table.")] = None
    seeds: Annotated[int | None, typer.Option(help="Runs per cell and accounting: 3, and 1 of attacks.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="A part of the table: one seed, the epsilon nearest 3.")] = (
        False
    )
    out: Annotated[Path, typer.Option(help="Where results go; tables share their runs.")] = Path("runs/reproduce")
    workers: Annotated[int | None, typer.Option(help="Processes at once. Default: one per core.")] = None
    records: Annotated[
        int | None, typer.Option(help="Train on this many of the first records only, to try it out.")
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Take this many steps only, to try it out; the noise is set to match.")
    ] = None
    show: Annotated[
        bool,
        typer.Option("--show", help="Print what is finished here, or came with Sordino; run and write nothing."),
    ] = False
    listed: Annotated[bool, typer.Option("--list", help="List the tables and where they stand.")] = False


@options.take_fields(Wanted)
def reproduce(wanted: Wanted) -> None:
    """Rerun a table of a paper and set its figures beside ours."""
    if wanted.table is not None:
        early.require_listed("table", wanted.table, options.PAPER_TABLES, words="is not known: choose")
    from sordino.lab.experiments.papers import paper_table, paper_tables

    if wanted.listed:
        for each in paper_tables().values():
            console().print(f"{each.name}: {each.where} ({', '.join(each.printed)})", markup=False)
        return
    if wanted.table is None:
        raise InvalidInput("the table is missing: give one, such as dpsur:table2; --list shows them all")
    table = paper_table(wanted.table)
    datasets = table.require(wanted.dataset)
    _require(table, wanted)
    failed = {"seconds": _time, "attack": _attack}.get(table.kind, _train)(table, datasets, wanted)
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(FOUND)


def _require(table: PaperTable, wanted: Wanted) -> None:
    """Refuse options that have no meaning, instead of ignoring them silently."""
    for name in ("seeds", "records", "steps", "workers"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise InvalidInput(f"{name}={value} must be >= 1: leave it out for the default")
    if wanted.quick and wanted.seeds is not None:
        raise InvalidInput(
            f"seeds={wanted.seeds} and quick exclude each other: quick is one seed, leave one of them out"
        )
    useless, why = _WITHOUT_EFFECT.get(table.kind, ((), ""))
    for name in useless:
        if getattr(wanted, name) is not None:
            raise InvalidInput(
                f"{name}={getattr(wanted, name)} has no effect on {table.name}, where {why}: leave it out"
            )


def _train(table: PaperTable, datasets: list[str], wanted: Wanted) -> list[str]:
    """Run tables of accuracy, or of the ε that reaches an accuracy; return what failed, one line each."""
    from sordino.cli.compare import run_cases
    from sordino.lab.experiments import catalogue, results
    from sordino.lab.experiments.reproducing import cases_of, compare_side_by_side, plan

    planned = plan(
        table,
        datasets,
        catalogue(),
        seeds=wanted.seeds or SEEDS,
        quick=wanted.quick,
        records=wanted.records,
        steps=wanted.steps,
    )
    failed = [] if wanted.show else run_cases(cases_of(planned), wanted.out, wanted.workers)
    shipped = wanted.show and not _list_limits(wanted)

    def find(label: str) -> Row | None:
        return results.find(wanted.out, label) or (results.find_shipped(label) if shipped else None)

    _save(compare_side_by_side(table, planned, find), table, datasets, wanted)
    return failed


def _time(table: PaperTable, datasets: list[str], wanted: Wanted) -> list[str]:
    """Run tables of speed."""
    from sordino.lab.experiments import catalogue
    from sordino.lab.experiments.reproducing import compare_times, quick_cells

    cells = table.cells(datasets)
    cells = quick_cells(table, cells) if wanted.quick else cells
    _save(compare_times(table, cells, catalogue(), wanted.out, wanted.records, wanted.show), table, datasets, wanted)
    return []


def _attack(table: PaperTable, datasets: list[str], wanted: Wanted) -> list[str]:
    """Run tables of membership attacks, including models without privacy."""
    from sordino.lab.experiments import catalogue
    from sordino.lab.experiments.membership import Attacks, compare_attacks
    from sordino.lab.experiments.reproducing import quick_cells

    cells = [*table.cells(datasets), *table.non_private(datasets)]
    cells = quick_cells(table, cells) if wanted.quick else cells
    attacks = Attacks(wanted.out, wanted.seeds or 1, wanted.records, wanted.steps, wanted.show)
    _save(compare_attacks(table, cells, catalogue(), attacks), table, datasets, wanted)
    return []


def _save(text: str, table: PaperTable, datasets: list[str], wanted: Wanted) -> None:
    """Print a table with remarks about it and, unless it is only shown, keep it beside its runs."""
    text = "\n\n".join([*_list_remarks(table, wanted), text])
    if not wanted.show:
        wanted.out.mkdir(parents=True, exist_ok=True)
        (wanted.out / _name_file(table, datasets, wanted)).write_text(text)
    console().print(text, markup=False)


def _list_remarks(table: PaperTable, wanted: Wanted) -> list[str]:
    """List what a reader of the table alone must know."""
    remarks = ["Runs that are not in --out are those that came with Sordino."] if wanted.show else []
    if short := _list_limits(wanted):
        limits = " and ".join(f"{value} {name}" for name, value in short.items())
        remarks.append(f"SHORTENED to {limits} for a try: ours are not the paper's runs.")
    if wanted.quick:
        remarks.append("A quick look: a part of the table, one seed.")
    if table.has_non_private and table.kind != "attack":
        remarks.append("The paper's figures without privacy are left out.")
    return remarks


def _name_file(table: PaperTable, datasets: list[str], wanted: Wanted) -> str:
    """Name the file of a table; a part of it, or a shortened one, does not replace the whole."""
    part = [] if datasets == list(table.printed) else datasets
    short = [f"{name}{value}" for name, value in _list_limits(wanted).items()]
    return "-".join([table.name.replace(":", "-"), *part, *(["quick"] if wanted.quick else []), *short]) + ".md"


def _list_limits(wanted: Wanted) -> dict[str, int]:
    given = {"records": wanted.records, "steps": wanted.steps}
    return {name: value for name, value in given.items() if value is not None}
