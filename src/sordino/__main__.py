"""The `sordino` command, also as ``python -m sordino``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C prints no traceback, even while it loads or while Python ends."""
    try:
        from sordino.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
