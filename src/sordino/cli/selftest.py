"""`sordino selftest`: does Sordino compute on this machine's device what it computes by definition?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from sordino.cli import options
from sordino.cli.terminal import FOUND, console, print_json

EPILOG = """
[bold]Examples[/bold]

sordino selftest --device cuda (a GPU; mps on a Mac with Apple silicon)

sordino selftest --device cpu --no-speed
"""


def selftest(
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="cuda, cuda:1, mps or cpu. Default: the accelerator, if there is one."),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time a step beside SGD and Opacus.")] = True,
    json: options.Json = False,
) -> None:
    """Check gradients, clipping and noise on a device against their definitions. Exits with 1 if they differ."""
    from sordino.audit.devices import DeviceCheck, Timing, choose_device, describe_device, examine_device

    out, chosen = console(), choose_device(device)

    def tell(answer: DeviceCheck | Timing) -> None:
        if isinstance(answer, DeviceCheck):
            mark = "[green]✓[/green]" if answer.passed else "[red]✗[/red]"
            out.print(f"{mark} [bold]{answer.question}:[/bold] {escape(answer.words)}", highlight=False)
        else:
            out.print(f"  {answer}", markup=False)

    if not json:
        out.print(f"Checking {describe_device(chosen)}; this takes about a minute.", markup=False)
    found = examine_device(chosen, timed=speed, tell=None if json else tell)
    if json:
        rows = [vars(finding) for finding in found.findings]
        timings = [vars(timing) for timing in found.timings]
        print_json({"device": found.device, "passed": found.passed, "findings": rows, "timings": timings})
    else:
        out.print("All is well." if found.passed else "[red]Something differs: do not train on this device.[/red]")
        out.print("Please send us this line:")
        out.print(found.summary(), markup=False, soft_wrap=True)
    if not found.passed:
        raise typer.Exit(FOUND)
