"""`sordino selftest`: does Sordino compute on this machine's device what it computes by definition?"""

from __future__ import annotations

from typing import Annotated

import typer

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
    from sordino.audit.devices import choose_device, examine_device

    found = examine_device(choose_device(device), timed=speed)
    if json:
        rows = [vars(finding) for finding in found.findings]
        timings = [vars(timing) for timing in found.timings]
        print_json({"device": found.device, "passed": found.passed, "findings": rows, "timings": timings})
    else:
        out = console()
        for finding in found.findings:
            out.print(f"{'✓' if finding.passed else '✗'} {finding.question}: {finding.words}", markup=False)
        for timing in found.timings:
            out.print(f"  {timing}", markup=False)
        out.print("Please send us this line:")
        out.print(found.summary(), markup=False)
    if not found.passed:
        raise typer.Exit(FOUND)
