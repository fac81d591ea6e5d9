"""What a process may use of its machine: the processors, and the memory that one training step frees for the next.

Programs have to ask for it; importing does nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The names M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>."""

LARGEST = (1 << 30, 1 << 25)
"""Blocks up to this size are kept; the second is as much as older versions of glibc allow."""

TUNABLES, LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def cores() -> int:
    """How many processors this process may use: all, or fewer under `taskset` or in a container that pins it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep() -> bool:
    """Ask glibc not to give freed memory back to the system; returns whether it agreed.

    By default it gives large blocks back at once, and the next step gets them again page by page: thousands of page
    faults, up to a fifth of a small network's step on a CPU, in some processes and not in others (docs/performance.md).
    This holds for the whole process, so a program calls it and a library does not. Elsewhere than on glibc, nothing
    happens.

    >>> from sordino.lab import machine
    >>> machine.keep() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    kept = any(option(MMAP_THRESHOLD, size) == 1 for size in LARGEST)
    return kept and option(TRIM_THRESHOLD, (1 << 31) - 1) == 1


@contextmanager
def large_pages() -> Iterator[None]:
    """Processes started within this block get large pages of memory, if the system has them: fewer look-ups.

    glibc reads this from the environment when a process starts, so a program cannot ask for itself. An existing choice
    in the environment is kept.
    """
    before = os.environ.get(TUNABLES)
    chosen = [before] if before else []
    if LARGE_PAGES not in (before or ""):
        os.environ[TUNABLES] = ":".join([*chosen, f"{LARGE_PAGES}=1"])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TUNABLES, None)
        else:
            os.environ[TUNABLES] = before
