"""``python -m sordino`` is the `sordino` command."""

from sordino.cli import main

if __name__ == "__main__":
    main()
