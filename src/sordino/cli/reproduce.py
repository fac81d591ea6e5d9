"""`sordino reproduce`: rerun a table of a paper, its figures beside ours at the same published and proven ε."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli.common import FOUND, complain, console
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.experiments.papers import PaperTable

EPILOG = """
[bold]Examples[/bold]

sordino reproduce --list

sordino reproduce dpsur:table2 --dataset fashion-mnist

sordino reproduce dynamic:table1 --dataset mnist --quick (one seed, one epsilon)

The same command again goes on where it was killed; finished runs are not repeated.
"""


@dataclass(frozen=True)
class Wanted:
    """Which part of a table, how long the runs are, and where they go."""

    datasets: list[str]
    out: Path
    seeds: int
    quick: bool
    records: int | None
    steps: int | None
    workers: int | None
    show: bool


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(reproduce)


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Such as dpsur:table2; --list shows them all.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only this dataset of the table.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs per cell and accounting.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A subset: one seed, the epsilon nearest 3.")] = False,
    out: Annotated[Path, typer.Option(help="Where results go; tables share their runs.")] = Path("runs/reproduce"),
    workers: Annotated[int | None, typer.Option(help="Processes at once. Default: one per core.")] = None,
    records: Annotated[int | None, typer.Option(help="Train on the first so many records alone, for a try.")] = None,
    steps: Annotated[int | None, typer.Option(help="Take so few steps, for a try; the noise follows.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what is finished; run nothing.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and where they stand.")] = False,
) -> None:
    """Rerun a table of a paper and set its figures beside ours."""
    from sordino.experiments.papers import paper_table, paper_tables

    if listed:
        for each in paper_tables().values():
            console().print(f"{each.name}: {each.where} ({', '.join(each.printed)})", markup=False)
        return
    if table is None:
        raise InvalidInput("the table is missing: give one, such as dpsur:table2; --list shows them all")
    if seeds < 1:
        raise InvalidInput(f"seeds={seeds} must be >= 1")
    chosen = paper_table(table)
    wanted = Wanted(chosen.require(dataset), out, seeds, quick, records, steps, workers, show)
    failed = {"seconds": _timed, "attack": _attacked}.get(chosen.kind, _trained)(chosen, wanted)
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(FOUND)


def _trained(table: PaperTable, wanted: Wanted) -> list[str]:
    """Tables of accuracy, and of the ε that reaches one: what failed, one line each."""
    from sordino.cli.live import run_shown
    from sordino.experiments import catalogue, store
    from sordino.experiments.reproducing import cases_of, plan, side_by_side

    planned = plan(
        table,
        wanted.datasets,
        catalogue(),
        seeds=wanted.seeds,
        quick=wanted.quick,
        records=wanted.records,
        steps=wanted.steps,
    )
    failed = [] if wanted.show else run_shown(cases_of(planned), wanted.out, wanted.workers)
    _keep(side_by_side(table, planned, lambda label: store.find(wanted.out, label)), table, wanted)
    return failed


def _timed(table: PaperTable, wanted: Wanted) -> list[str]:
    """Tables of speed: measured anew every time."""
    from sordino.experiments import catalogue
    from sordino.experiments.timing import timed

    cells = table.cells(wanted.datasets)
    _keep(timed(table, cells[:1] if wanted.quick else cells, catalogue(), wanted.records), table, wanted)
    return []


def _attacked(table: PaperTable, wanted: Wanted) -> list[str]:
    """Tables of membership attacks."""
    from sordino.experiments import catalogue
    from sordino.experiments.attacking import attacked
    from sordino.experiments.reproducing import quick_cells

    cells = table.cells(wanted.datasets)
    cells = quick_cells(cells) if wanted.quick else cells
    text = attacked(table, cells, catalogue(), wanted.out, wanted.records, wanted.steps, wanted.show)
    _keep(text, table, wanted)
    return []


def _keep(text: str, table: PaperTable, wanted: Wanted) -> None:
    """Print a table and keep it beside its runs."""
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / f"{table.name.replace(':', '-')}.md").write_text(text)
    console().print(text, markup=False)
