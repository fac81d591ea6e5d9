"""`sordino account`: what a run cost or would cost, by every accountant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.cli import options
from sordino.cli.common import console, delta_for, print_json, sampling_rate, step_count
from sordino.errors import InvalidInput
from sordino.names import fits
from sordino.printing import plain_number, rounded_up

if TYPE_CHECKING:
    from sordino.accounting import Accountant, Adjacency, Events
    from sordino.report.folder import Folder

EPILOG = """
[bold]Examples[/bold]

sordino account --batch-size 256 --records 60000 --noise-multiplier 1.3 --epochs 5 --delta 1e-5

sordino account runs/20260101-120000 (also while it is running)
"""
_Run = Annotated[Path | None, typer.Argument(help="A run of `sordino train`; nothing is written.")]
_Adjacency = Annotated[str | None, typer.Option("--adjacency", help="add-or-remove-one (default) or replace-one.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(account)


def account(
    run: _Run = None,
    rate: options.Rate = None,
    batch_size: options.BatchSize = None,
    records: options.RecordCount = None,
    noise_multiplier: options.NoiseMultiplier = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    delta: options.Delta = None,
    adjacency: _Adjacency = None,
    json: options.Json = False,
) -> None:
    """Price a saved run, or steps of DP-SGD that you describe, by every accountant."""
    described = (rate, batch_size, records, noise_multiplier, steps, epochs)
    if run is not None and any(value is not None for value in described):
        raise InvalidInput("a run and a description of steps are both given: use one of them")
    if run is not None:
        from sordino.report.folder import whatever_it_holds

        with whatever_it_holds(run):
            _present(_of_run(run, delta, adjacency), json)
        return
    bill = _of_steps(sampling_rate(rate, batch_size, records), noise_multiplier, steps, epochs)
    bill.delta, bill.adjacency = delta_for(delta, records), adjacency or "add-or-remove-one"
    _present(bill, json)


@dataclass
class Bill:
    """Events and the terms they are priced by."""

    title: str
    events: Events
    delta: float = 0.0
    adjacency: str = "add-or-remove-one"
    basis: str = "proven"


def _of_steps(rate: float, noise_multiplier: float | None, steps: int | None, epochs: float | None) -> Bill:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    if noise_multiplier is None:
        raise InvalidInput("noise-multiplier is missing: use --noise-multiplier, noise over clipping bound")
    if not 0 < rate <= 1:
        raise InvalidInput(f"rate={rate} must be in (0, 1]: give expected draw size / number of records")
    if not noise_multiplier > 0:
        raise InvalidInput(f"noise-multiplier={noise_multiplier} must be > 0: without noise there is no privacy")
    count = step_count(steps, epochs, rate)
    title = f"{count:,} steps at rate {rate:.6g} with noise multiplier {noise_multiplier:g}"
    return Bill(title, [(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)), count)])


def _of_run(run: Path, delta: float | None, adjacency: str | None) -> Bill:
    from sordino.accounting import Ledger
    from sordino.report.folder import Folder

    folder = Folder(run)
    with Ledger.read(folder.ledger) as ledger:
        events, header = ledger.events(), ledger.header
        title = f"{run}: {len(ledger):,} events"
    if delta is None:
        delta = _delta_of(folder)
    if delta is None:
        raise InvalidInput(f"{run} has no budget that names a delta: use --delta")
    chosen = adjacency or header.get("adjacency", "add-or-remove-one")
    return Bill(title, events, delta, chosen, header.get("basis", "proven"))


def _delta_of(folder: Folder) -> float | None:
    """That of the budget in the run's recipe, if it names one."""
    budget = folder.toml("recipe.toml").get("budget", {})
    delta = budget.get("delta") if isinstance(budget, dict) else None
    return delta if fits(delta, "float") else None


@dataclass(frozen=True)
class Price:
    """One accountant's answer, or why it has none."""

    accountant: str
    epsilon: float | None
    basis: str
    refusal: str = ""


def _price(accountant: Accountant, bill: Bill, adjacency: Adjacency) -> Price:
    # A limit theorem stays one whatever the recipe claims, and a recipe without proof gains none by a good accountant.
    basis = bill.basis if bill.basis != "proven" else accountant.basis
    try:
        return Price(accountant.name, accountant.epsilon(bill.events, bill.delta, adjacency), basis)
    except InvalidInput as refusal:
        return Price(accountant.name, None, basis, str(refusal))


def _present(bill: Bill, as_json: bool) -> None:
    from sordino.accounting import ACCOUNTANTS, epsilon
    from sordino.accounting.adjacency import required_adjacency

    adjacency = required_adjacency(bill.adjacency)
    epsilon([], bill.delta)  # refuses a delta that is none
    prices = [_price(accountant, bill, adjacency) for accountant in ACCOUNTANTS.values()]
    if all(price.epsilon is None for price in prices):
        raise InvalidInput(prices[0].refusal)
    if as_json:
        plain = {p.accountant: {"epsilon": _plain(p.epsilon), "basis": p.basis} for p in prices}
        print_json({"delta": bill.delta, "adjacency": adjacency, "epsilon": plain, "title": bill.title})
        return
    _print_table(bill, prices)


def _plain(epsilon: float | None) -> float | str | None:
    return None if epsilon is None else plain_number(epsilon)


def _print_table(bill: Bill, prices: list[Price]) -> None:
    from rich.table import Table

    table = Table("accountant", "ε", "basis", title=bill.title, title_justify="left")
    for price in prices:
        table.add_row(
            price.accountant, "no price" if price.epsilon is None else rounded_up(price.epsilon, 4), price.basis
        )
    out = console()
    out.print(table)
    out.print(
        f"at δ = {bill.delta:g}, {bill.adjacency} adjacency. Every proven ε is an upper bound: the smallest holds."
    )
    for price in prices:
        if price.refusal:
            out.print(f"{price.accountant}: {price.refusal}", markup=False)
