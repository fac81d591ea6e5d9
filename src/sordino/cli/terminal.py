"""What all commands share: exit codes, and the places for results, messages and errors."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

UNSURE = {
    "unchecked": "signature not checked: the ledger is signed, and its key is not set (SORDINO_LEDGER_KEY)",
    "missing": "the ledger is not signed, though a key is set: if it ever was, somebody forged it",
}
"""What to say about a ledger whose signatures prove nothing."""
NARROW = shutil.get_terminal_size().columns < 60
"""Whether help is plain text: in a narrow terminal, tables would cut the names of options."""
FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130
_LARGE = 10_000_000
"""A file of this many bytes takes long enough to read for a progress bar."""


def write_epilog(text: str) -> str:
    """Write the end of a command's help; plain text has no bold words."""
    return re.sub(r"\[/?bold\]", "", text) if NARROW else text


def console() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def messages() -> Console:
    """The console for everything that is not a result: progress, cautions, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(what: str, words: str) -> None:
    """Print one line about what a command is about to do."""
    from rich.markup import escape

    messages().print(f"[bold]{what:9}[/bold] {escape(words)}")


@contextmanager
def show_reading() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while a large file is read; it is told how much of the file was read."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    bar = Progress(
        TextColumn("reading"), BarColumn(bar_width=32), TaskProgressColumn(), console=messages(), transient=True
    )
    task = bar.add_task("", total=None)
    shown = False

    def told(done: int, size: int) -> None:
        nonlocal shown
        if size >= _LARGE:
            bar.start() if not shown else None
            shown = True
            bar.update(task, completed=done, total=size)

    try:
        yield told
    finally:
        bar.stop() if shown else None


def complain(message: str) -> None:
    """Print one line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def explain_interruption() -> Iterator[None]:
    """Wrap training, so that Ctrl-C before the first step, or a second Ctrl-C during a step, ends in one line."""
    import typer

    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted at once: what the run had saved and spent stands; sordino resume RUN goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def caution(message: str) -> None:
    """Tell the user something important, in one line on stderr."""
    print(f"caution: {message}", file=sys.stderr)


def print_json(result: dict[str, Any]) -> None:
    """Print one JSON object on stdout, for machines; numbers that JSON lacks become text."""
    print(json.dumps(result, default=str, allow_nan=False))


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Save the same object in a file of the run, for `sordino report`."""
    from sordino.books import write_durably

    try:
        write_durably(path, json.dumps(result, default=str, allow_nan=False, indent=1).encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None
