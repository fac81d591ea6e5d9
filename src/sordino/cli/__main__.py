"""``python -m sordino.cli`` is the `sordino` command."""

from sordino.cli import main

main()
