"""`sordino account`: what a run cost or would cost, by every accountant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.options import choose_delta, count_steps, find_rate
from sordino.cli.terminal import UNSURE, caution, console, print_json
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits, to_plain

if TYPE_CHECKING:
    from sordino.accounting import Accountant, Adjacency, Events, plans
    from sordino.recipe import Recipe
    from sordino.report.run_folder import Folder

EPILOG = """
[bold]Examples[/bold]

sordino account --batch-size 256 --records 60000 --noise-multiplier 1.3 --epochs 5 --delta 1e-5

sordino account runs/20260101-120000 (also while it is running)
"""
_Run = Annotated[Path | None, typer.Argument(help="A run of `sordino train`; nothing is written.")]
_Adjacency = Annotated[str | None, typer.Option("--adjacency", help="add-or-remove-one (default) or replace-one.")]


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
    options.require_numbers(locals())
    early.require_known("adjacency", adjacency, options.ADJACENCIES, words="is unknown: use")
    if run is not None:
        early.require_run(run)
        from sordino.report.run_folder import expect_anything

        with expect_anything(run):
            _present(_bill_run(run, delta, adjacency), json)
        return
    statement = _bill_steps(find_rate(rate, batch_size, records), noise_multiplier, steps, epochs)
    statement.delta, statement.adjacency = choose_delta(delta, records), adjacency or "add-or-remove-one"
    _present(statement, json)


@dataclass
class Statement:
    """Events and the terms they are priced by."""

    title: str
    events: Events
    delta: float = 0.0
    adjacency: str = "add-or-remove-one"
    basis: str = "proven"
    assumptions: list[str] = field(default_factory=list)
    stages: plans.Bill | None = None
    prefix: plans.Bill | None = None
    unprotected: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    unit: str = "record"


def _bill_steps(rate: float, noise_multiplier: float | None, steps: int | None, epochs: float | None) -> Statement:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    if noise_multiplier is None:
        raise InvalidInput("noise-multiplier is missing: use --noise-multiplier, noise over clipping bound")
    count = count_steps(steps, epochs, rate)
    title = f"{count:,} steps at rate {rate:.6g} with noise multiplier {noise_multiplier:g}"
    return Statement(title, [(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)), count)])


def _bill_run(run: Path, delta: float | None, adjacency: str | None) -> Statement:
    from sordino import books
    from sordino.accounting import plans
    from sordino.accounting.guarantee import CONDITION, UNPROTECTED
    from sordino.books import find_plans
    from sordino.report.run_folder import Folder

    folder = Folder(run)
    recipe = _read_recipe(folder)
    with books.reading(folder.ledger.parent) as ledger:
        events, header, said = ledger.events(), ledger.header, ledger.declared("assumption")
        if ledger.signature in UNSURE:
            caution(UNSURE[ledger.signature])
        title = f"{run}: {len(ledger):,} events"
        unprotected, conditions = ledger.declared(UNPROTECTED), ledger.declared(CONDITION)
        declared = plans.declared(ledger) or find_plans(recipe, header)
        unplanned = plans.list_unplanned(ledger, declared)
    whole = plans.bill(events, declared, unplanned)
    prefix = plans.bill(events, declared, unplanned, stopped_in_advance=True)
    if delta is None:
        delta = _read_delta(folder)
    if delta is None:  # the plan of a table, or of a recipe whose parts have no name, is only in the ledger
        delta = next((plan.budget.delta for plan in declared if plan.budget is not None), None)
    if delta is None and recipe is not None and recipe.records:  # without a budget: what `train` and `report` say
        delta = 0.1 / recipe.records
    if delta is None:
        raise InvalidInput(f"{run} has no budget that names a delta: use --delta")
    chosen = adjacency or header.get("adjacency", "add-or-remove-one")
    basis = header.get("basis", "proven")
    unit = header.get("unit", "record")
    return Statement(title, whole.events, delta, chosen, basis, said, whole, prefix, unprotected, conditions, unit)


def _read_recipe(folder: Folder) -> Recipe | None:
    from sordino.recipe import Recipe

    try:
        text = folder.text("recipe.toml")
        return None if text is None else Recipe.from_toml(text)
    except InvalidInput:  # the ledger then says that it has no plan
        return None


def _read_delta(folder: Folder) -> float | None:
    """Read the δ of the budget in the run's recipe, if there is one."""
    from sordino.accounting.events import fits

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
    prefix: float | None = None


def _price(accountant: Accountant, statement: Statement, adjacency: Adjacency) -> Price:
    # A limit theorem stays a limit whatever the recipe claims, and a good accountant does not prove an unproven recipe.
    basis = statement.basis if statement.basis != "proven" else accountant.basis
    try:
        if statement.stages is None:
            return Price(accountant.name, accountant.epsilon(statement.events, statement.delta, adjacency), basis)
        whole = statement.stages.epsilon(statement.delta, accountant.name, adjacency)
        assert statement.prefix is not None
        return Price(
            accountant.name, whole, basis, prefix=statement.prefix.epsilon(statement.delta, accountant.name, adjacency)
        )
    except InvalidInput as refusal:
        return Price(accountant.name, None, basis, str(refusal))


def _present(statement: Statement, as_json: bool) -> None:
    from sordino.accounting import ACCOUNTANTS, epsilon
    from sordino.accounting.events import require_adjacency

    adjacency = require_adjacency(statement.adjacency)
    epsilon([], statement.delta)  # refuses a delta outside (0, 1)
    prices = [_price(accountant, statement, adjacency) for accountant in ACCOUNTANTS.values()]
    if all(price.epsilon is None for price in prices):
        raise InvalidInput(prices[0].refusal)
    if as_json:
        plain = {p.accountant: {"epsilon": _to_plain(p.epsilon), "basis": p.basis} for p in prices}
        told: dict[str, Any] = {
            "delta": statement.delta,
            "adjacency": adjacency,
            "unit": statement.unit,
            "epsilon": plain,
            "title": statement.title,
        }
        if statement.assumptions:
            told["assumptions"] = statement.assumptions
        told |= {} if not statement.unprotected else {"unprotected": statement.unprotected}
        told |= {} if not statement.conditions else {"conditions": statement.conditions}
        if statement.stages is not None:
            so_far = {p.accountant: _to_plain(p.prefix) for p in prices}
            told |= {"notes": list(statement.stages.notes), "epsilon_if_stopped_in_advance": so_far}
        print_json(told)
        return
    _print_table(statement, prices)


def _to_plain(epsilon: float | None) -> float | str | None:
    return None if epsilon is None else to_plain(epsilon)


def _format_epsilon(epsilon: float | None) -> str:
    return "no price" if epsilon is None else round_up(epsilon, 4)


def _print_table(statement: Statement, prices: list[Price]) -> None:
    from rich.table import Table

    from sordino.accounting import plans

    shortened = any(price.prefix != price.epsilon for price in prices) and statement.stages is not None
    columns = ("accountant", "ε", *(("ε if stopped in advance",) if shortened else ()), "basis")
    table = Table(*columns, title=statement.title, title_justify="left")
    for price in prices:
        so_far = (_format_epsilon(price.prefix),) if shortened else ()
        table.add_row(price.accountant, _format_epsilon(price.epsilon), *so_far, price.basis)
    out = console()
    out.print(table)
    out.print(
        f"at δ = {round_up_digits(statement.delta, 3)}, {statement.adjacency} adjacency, for every {statement.unit}. "
        "Every proven ε is an upper bound: the smallest holds."
    )
    if statement.unprotected:
        out.print(f"NOT protected: {' and '.join(statement.unprotected)}.", markup=False)
    if statement.conditions:
        out.print(f"Provided that {' and '.join(statement.conditions)}, which nobody checked.", markup=False)
    for line in statement.assumptions:
        out.print(f"- {line}", markup=False)
    for note in statement.stages.notes if statement.stages is not None else ():
        out.print(f"Note: {note}.", markup=False)
    if shortened:
        out.print(f"Stopped in advance: {plans.IN_ADVANCE}.", markup=False)
    refused: dict[str, list[str]] = {}
    for price in prices:
        if price.refusal:
            refused.setdefault(price.refusal, []).append(price.accountant)
    for refusal, accountants in refused.items():
        out.print(f"No price by {', '.join(accountants)}: {refusal}", markup=False)
