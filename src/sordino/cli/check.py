"""`sordino check`: is this model fit for private training?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.terminal import FOUND, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from sordino.cli.examining import Examined

EPILOG = """
[bold]Examples[/bold]

sordino check lenet.py:build --input 1,28,28 (build() returns a model)

sordino check package.module:build (build() returns a model, a per-example loss and a batch)
"""


def check(
    build: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Returns a model, or (model, loss, batch).")],
    shape: Annotated[
        str | None,
        typer.Option("--input", metavar="SHAPE", help="Shape of one input, such as 1,28,28, for a model alone."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Probe a model before anything is spent: does one example change another's loss? Exits with 1 if it does."""
    early.require_code(build)
    from sordino.cli.examining import examine

    examined = examine(build, shape)
    if json:
        print_json(_to_plain(examined))
    else:
        _print(examined)
    if examined.findings:
        raise typer.Exit(FOUND)


def _to_plain(examined: Examined) -> dict[str, Any]:
    return {
        "parameters": sum(layer.parameters for layer in examined.layers),
        "trainable": sum(layer.trainable for layer in examined.layers),
        "layers": [vars(layer) for layer in examined.layers],
        "findings": [finding.to_dict() for finding in examined.findings],
        "fixes": [str(change) for change in examined.fixes],
        "engine": examined.engine,
        "uses": [vars(use) for use in examined.uses],
        "measured_examples": examined.measured,
    }


def _print(examined: Examined) -> None:
    from rich.table import Table

    table = Table("layer", "kind", "parameters", "trainable")
    for layer in examined.layers:
        table.add_row(layer.name, layer.kind, f"{layer.parameters:,}", f"{layer.trainable:,}")
    out = console()
    out.print(table)
    for finding in examined.findings:
        out.print(f"✗ {finding.message}", markup=False)
    if examined.fixes:
        out.print("sordino.fix(model) would change:")
        for change in examined.fixes:
            out.print(f"  {change}", markup=False)
    if examined.engine is not None:
        out.print(f"gradients: the {examined.engine} engine differentiates this model")
    if examined.uses:
        out.print(_tabulate_costs(examined))
    if not examined.findings:
        out.print("✓ every example's loss is its own: this model can be trained privately")


def _tabulate_costs(examined: Examined) -> Table:
    """Show how the gradients of each parameter are measured, and what that costs beyond the backward pass."""
    from rich.table import Table

    table = Table(
        "parameter", "operation", "rule", "kept per example", f"norms and sum of {examined.measured} examples"
    )
    for use in examined.uses:
        kept, spent = f"{use.bytes_per_example / 1024:,.1f} KB", f"{use.milliseconds:.2f} ms"
        table.add_row(use.parameter, use.operation, use.rule, kept, spent)
    return table
