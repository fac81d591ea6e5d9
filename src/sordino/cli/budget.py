"""`sordino budget`: one budget per dataset, across runs, people and machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli import options
from sordino.cli.terminal import FOUND, NARROW, console, print_json, write_epilog
from sordino.errors import InvalidInput, VaultForged
from sordino.figures import round_up, round_up_digits

if TYPE_CHECKING:
    from rich.table import Table

    from sordino.vault import DatasetState, Vault
    from sordino.vault.summary import BudgetSummary, Share

EPILOG = """
[bold]Examples[/bold]

sordino budget create patients --epsilon 10 --delta 1e-6

sordino budget grant patients bob

sordino train --data patients.csv --target outcome --epsilon 2 --dataset-budget patients

sordino budget show patients

sordino budget verify patients runs/first runs/second

The vault is the file or the postgresql:// address in SORDINO_VAULT; without it, .sordino/vault.sqlite in your home.
"""
budget = typer.Typer(
    help="One budget per dataset, across runs, people and machines: who reserved what, and what is left.",
    epilog=write_epilog(EPILOG),
    rich_markup_mode=None if NARROW else "rich",
)
_Name = Annotated[str, typer.Argument(help="The dataset's name.")]
_Vault = Annotated[
    str | None, typer.Option("--vault", help="A file, or postgresql://...; default: SORDINO_VAULT, or your own file.")
]
_Run = Annotated[str, typer.Argument(help="The run, by its number or the beginning of it.")]
_Person = Annotated[str, typer.Argument(help="Who; in PostgreSQL, the name of a role.")]


@budget.callback(invoke_without_command=True)
def _budget(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@budget.command()
def create(
    name: _Name,
    epsilon: Annotated[float, typer.Option(help="What all runs on the dataset may cost together.")],
    delta: Annotated[float, typer.Option(help="Well below 1 / records.")],
    unit: Annotated[str, typer.Option(help="What is protected: record, user, ...")] = "record",
    adjacency: options.AdjacencyName = "add-or-remove-one",
    composition: Annotated[
        str, typer.Option(help="adaptive holds whatever people look at; planned is tighter, if nobody does.")
    ] = "adaptive",
    order: Annotated[float | None, typer.Option(help="Renyi order of adaptive composition. Default: suits ε.")] = None,
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Make a budget for a dataset; you own it. Its delta, unit and composition can never change."""
    from sordino.accounting import Budget
    from sordino.vault import open_vault

    given = Budget(epsilon, delta, adjacency=adjacency)
    opened = open_vault(vault, create=True)
    _show(opened.create(name, given, unit=unit, composition=composition, order=order), json)


@budget.command(name="list")
def list_all(vault: _Vault = None, json: options.Json = False) -> None:
    """List the datasets that you may see."""
    from sordino.vault.summary import sum_up

    opened = _open(vault)
    found = [sum_up(opened.state(name), brief=True) for name in opened.names()]
    if json:
        keys = ("name", "owner", "budget", "delta", "total", "part", "closed")
        print_json({"datasets": [{key: getattr(each, key) for key in keys} for each in found]})
        return
    table = _make_table("dataset", "owner", "ε", "of", "δ", "used")
    for each in found:
        used = f"{_percent(each.part)}{', closed' if each.closed else ''}"
        figures = (round_up(each.total), f"{each.budget:g}", round_up_digits(each.delta, 3), used)
        table.add_row(each.name, each.owner, *figures)
    console().print(table)


@budget.command()
def show(
    name: _Name,
    page: Annotated[Path | None, typer.Option("--page", help="Also write a page that others can read.")] = None,
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Show what is spent, reserved and left of a dataset's budget, by run and by person."""
    opened = _open(vault)
    _show(opened.state(name), json)
    if page is not None:
        from sordino.report.vault_page import write_page

        write_page(opened, name, page)
        if not json:
            console().print(f"Wrote {page}.", markup=False)


@budget.command()
def grant(
    name: _Name,
    person: _Person,
    epsilon: Annotated[float | None, typer.Option(help="A limit for this person's runs together.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take it back; what they hold stays theirs.")] = False,
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Let a person reserve from a dataset's budget. Only its owner may."""
    opened = _open(vault)
    if revoke and epsilon is not None:
        raise InvalidInput("--revoke and --epsilon exclude one another: to change a grant, grant it again")
    state = opened.revoke(name, person) if revoke else opened.grant(name, person, epsilon)
    words = "may reserve no more" if revoke else "may reserve"
    _confirm(state, json, f"{person} {words}{f', at most epsilon={epsilon:g}' if epsilon else ''}")


@budget.command(name="raise")
def raise_to(
    name: _Name,
    epsilon: Annotated[float, typer.Option(help="The new, larger epsilon.")],
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Give a dataset a larger budget. Only its owner may; the history keeps a record of it."""
    _confirm(_open(vault).raise_to(name, epsilon), json, f"its budget is epsilon={epsilon:g} now")


@budget.command()
def close(name: _Name, vault: _Vault = None, json: options.Json = False) -> None:
    """Close a budget for good: no run can reserve from it; those that hold something may finish. Only its owner may."""
    _confirm(_open(vault).close(name), json, "it is closed: no run can reserve any more")


@budget.command()
def settle(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was killed or cut off.")],
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Show a run's ledger to the vault: what it never drew is returned."""
    from sordino import books
    from sordino.vault import DatasetBudget
    from sordino.vault import settle as settle_ledger
    from sordino.vault.claims import read_ties

    opened = _open(vault)
    with books.reopen(run) as ledger:
        ties = read_ties(ledger)
        if not ties:
            raise InvalidInput(f"{run} has reserved nothing in a vault: there is nothing to settle")
        name = str(ties[-1]["dataset"])
        held = settle_ledger(DatasetBudget(opened, name), ledger)
    _confirm(opened.state(name), json, f"run {held.run[:8]} drew {held.events:,} events; the rest is returned")


@budget.command(name="write-off")
def write_off(name: _Name, run: _Run, vault: _Vault = None, json: options.Json = False) -> None:
    """Count all that a run reserved as spent, for good: its ledger is lost. Only the owner may."""
    _confirm(_open(vault).write_off(name, run), json, f"run {run[:8]} is written off: all it reserved counts as spent")


@budget.command()
def history(name: _Name, vault: _Vault = None, json: options.Json = False) -> None:
    """Show who did what to a dataset's budget, and when."""
    from sordino.vault.summary import describe_entry

    entries = _open(vault).history(name)
    if json:
        keys = ("number", "kind", "run", "person", "at", "receipt")
        told = [{**{key: getattr(each, key) for key in keys}, "said": each.said} for each in entries]
        print_json({"dataset": name, "entries": told})
        return
    table = _make_table("#", "when", "who", "what")
    for each in entries:
        table.add_row(str(each.number), each.at.replace("T", " "), each.person, describe_entry(each))
    console().print(table)


@budget.command()
def verify(
    name: _Name,
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, whose receipts must be in it.")] = None,
    vault: _Vault = None,
    json: options.Json = False,
) -> None:
    """Check a dataset's whole history again: chain, signatures, prices, and the receipts that runs keep."""
    opened = _open(vault)
    receipts = {str(run): receipt for run in runs or [] if (receipt := _find_receipt(run, name))}
    try:
        told, verdict = opened.verify(name, receipts), "intact"
    except VaultForged as error:
        told, verdict = str(error), "forged"
    if json:
        print_json({"dataset": name, "verdict": verdict, "reason": told})
    else:
        console().print(f"{name}: {verdict}. {told}", markup=False)
    if verdict != "intact":
        raise typer.Exit(FOUND)


def _find_receipt(run: Path, name: str) -> str:
    from sordino import books
    from sordino.vault.claims import read_ties

    with books.reading(run) as ledger:
        found = [str(tie["receipt"]) for tie in read_ties(ledger) if "receipt" in tie and tie["dataset"] == name]
    if not found:
        raise InvalidInput(f"{run} holds no receipt of dataset {name!r}: it did not draw on that budget")
    return found[-1]


def _open(vault: str | None) -> Vault:
    from sordino.vault import open_vault

    return open_vault(vault)


def _confirm(state: DatasetState, json: bool, words: str) -> None:
    if json:
        _show(state, json)
    else:
        console().print(f"{state.name}: {words}.", markup=False)


def _show(state: DatasetState, json: bool) -> None:
    from sordino.vault.summary import sum_up

    found = sum_up(state)
    if json:
        print_json(found.to_dict())
        return
    out = console()
    for line in _describe(found):
        out.print(line, markup=False)
    for title, rows in (("person", found.people), ("run", found.runs)):
        if rows:
            out.print(_list_shares(title, rows))


def _describe(found: BudgetSummary) -> list[str]:
    delta = round_up_digits(found.delta, 3)
    lines = [
        f"{found.name}: epsilon={found.budget:g} at delta={delta} for every {found.unit} ({found.adjacency}), owner "
        f"{found.owner}{', closed' if found.closed else ''}"
    ]
    if found.events == 0:
        return [*lines, f"Nothing is spent or reserved yet. Composition: {found.composition}."]
    runs = "1 run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
    lines.append(
        f"Spent and reserved: epsilon={round_up(found.total)} over {found.events:,} events of {runs}; "
        f"spent for good: {round_up(found.spent)}. Left: {_percent(found.left)} of the whole."
    )
    lines.append(f"Composition {found.composition}: {found.basis}.")
    if found.composition == "adaptive":
        lines.append(f"If nobody had looked, as one privacy loss distribution: epsilon={round_up(found.planned)}.")
        lines.append("Judge by the share that is left: ε does not add up, and the first run already uses much of it.")
    return lines


def _list_shares(title: str, rows: tuple[Share, ...]) -> Table:
    with_person = title == "run"
    columns = (
        (title, "person", "state", "events", "ε alone", "used")
        if with_person
        else ((title, "state", "events", "ε alone", "used"))
    )
    table = _make_table(*columns)
    for row in rows:
        who = (row.name[:8], row.person) if with_person else (row.name,)
        table.add_row(*who, row.status, f"{row.events:,}", round_up(row.epsilon), _percent(row.part))
    return table


def _make_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED)
    for column in columns:
        table.add_column(column)
    return table


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
