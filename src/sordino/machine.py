"""What this process may use of the machine."""

from __future__ import annotations

import os


def cores() -> int:
    """How many processors this process may use: all, or fewer under `taskset` or in a container that pins it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
