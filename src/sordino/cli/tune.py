"""`sordino tune`: a model from records, with settings that were searched for, within an ε that includes the search."""

from __future__ import annotations

from dataclasses import replace

import typer

from sordino.cli import early, options
from sordino.cli.terminal import INTERRUPTED, complain
from sordino.cli.train import Flags

EPILOG = """
[bold]Examples[/bold]

sordino tune --data patients.csv --target outcome --epsilon 3

sordino tune --data patients.csv --target outcome --epsilon 3 --space space.toml --expected-trials 20 --jobs 2

sordino tune --data digits --method automatic --epsilon 8 --space space.toml --public-held-out

[bold]A space[/bold] has one line for each setting, drawn at random: rate = { low = 0.03, high = 0.5, log = true } for
numbers, or { choices = ... } for a few values.

The number of trials is random and secret, and nothing of those that lose is shown or kept. A search that was killed
goes on when the command is given again with the same --run.
"""


@options.take_fields(Flags)
def tune(flags: Flags) -> None:
    """Search for settings, then train with the best; epsilon covers the whole search."""
    early.check_training(flags, searching=True)
    try:
        from sordino.cli.launch import train_and_report

        train_and_report(replace(flags, tune=True))
    except KeyboardInterrupt:
        complain("interrupted: what was spent stays spent; the same command with the same --run goes on")
        raise typer.Exit(INTERRUPTED) from None
