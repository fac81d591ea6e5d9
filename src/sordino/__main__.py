"""The `sordino` command, also as ``python -m sordino``."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it. A Ctrl-C while it loads ends without a traceback, as it does later."""
    try:
        from sordino.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
