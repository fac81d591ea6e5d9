"""The `sordino` command, also as ``python -m sordino``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Load the command line and run it. A Ctrl-C while it loads, or while Python ends, is no traceback either."""
    try:
        from sordino.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
