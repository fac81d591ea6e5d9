"""The `sordino` command. Importing it loads neither torch nor the accounting: each command loads what it needs."""

from sordino.cli.commands import app, main

__all__ = ["app", "main"]
