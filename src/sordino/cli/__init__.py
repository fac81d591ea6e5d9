"""The `sordino` command: its subcommands, its exit codes, and errors as one line.

Importing it loads neither torch nor the accounting: each command loads what it needs.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any, NoReturn

import click
import typer
from typer.core import TyperGroup

from sordino.cli import (
    account,
    audit,
    budget,
    calibrate,
    check,
    compare,
    demo,
    early,
    export,
    finetune,
    generate,
    predict,
    report,
    reproduce,
    resume,
    selftest,
    serve,
    train,
    tune,
    verify,
)
from sordino.cli.terminal import BAD_INPUT, FOUND, NARROW, complain, write_epilog
from sordino.errors import LostInNoise, SordinoError, locate_error

__all__ = ["app", "main"]

TRACEBACK = "SORDINO_TRACEBACK"
"""With this variable set, an error that nobody expected is shown in full."""

EPILOG = """
[bold]Exit codes[/bold]

0 done

1 check, audit or verify found something wrong, or a release was lost in the noise

2 bad input: the error is one line on stderr

130 interrupted: the run is saved and can be resumed
"""


class Commands(TyperGroup):
    """Typer's group, but every error that is meant for the user is one line on stderr."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the named command; for an unknown name, click and typer would both suggest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            early.require_known("command", args[0], self.commands, words="is unknown: use")
            raise

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run one command and exit with its code."""
        options["standalone_mode"] = False
        if isinstance(sys.stdout, io.TextIOWrapper):  # an unprintable character must not end a run that was paid for
            sys.stdout.reconfigure(errors="replace")
        try:
            code = super().main(*args, **options)
        except SordinoError as error:
            complain(str(error))
            sys.exit(FOUND if isinstance(error, LostInNoise) else BAD_INPUT)
        except click.NoSuchOption as error:
            complain(early.describe_unknown_option(error))
            sys.exit(BAD_INPUT)
        except click.MissingParameter as error:
            complain(f"{error.format_message().rstrip('.')}: see {early.name_command(error)} --help")
            sys.exit(BAD_INPUT)
        except click.ClickException as error:
            complain(error.format_message())
            sys.exit(error.exit_code)
        except click.Abort:
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            complain(_describe(error))
            sys.exit(BAD_INPUT)
        sys.exit(code if isinstance(code, int) else 0)


def _describe(error: Exception) -> str:
    """Describe in one line an error that was not written for the user. The system's own messages are about files.

    Messages of a model, a loss or torch may name a label, a value or the size of a draw, which are private.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error}: correct this and run the command again"
    return f"{locate_error(error)}: its message may hold private values and is not shown; set {TRACEBACK}=1 to see it"


app = typer.Typer(
    name="sordino",
    cls=Commands,
    rich_markup_mode=None if NARROW else "rich",
    epilog=write_epilog(EPILOG),
    pretty_exceptions_show_locals=False,  # a traceback's locals would print private records
)
_PLAN = "Plan and check"
_COMMANDS = {
    "Train": (demo, train, tune, finetune, resume),
    "Use a model": (predict, generate, export),
    "Show and prove": (report, serve, verify, audit),
    _PLAN: (calibrate, account, check, selftest),
    "Compare methods": (compare, reproduce),
}
for panel, modules in _COMMANDS.items():
    for module in modules:
        command = getattr(module, module.__name__.rpartition(".")[2])  # a file has the name of its command
        app.command(epilog=write_epilog(getattr(module, "EPILOG", "")), rich_help_panel=panel)(command)
app.add_typer(budget.budget, name="budget", cls=Commands, rich_help_panel=_PLAN)


@app.callback(invoke_without_command=True)
def _sordino(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train PyTorch models so that the model says almost nothing about any one record."""
    if version:
        from sordino import __version__

        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main() -> NoReturn:
    """The entry point of the `sordino` script."""
    app()
    sys.exit(0)
