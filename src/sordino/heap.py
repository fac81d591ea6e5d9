"""Keep the memory that one training step frees for the next one: for programs to ask for, never done by an import."""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The names M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>."""

LARGEST = (1 << 30, 1 << 25)
"""Blocks up to this size are kept; the second is as much as older versions of glibc allow."""


def keep() -> bool:
    """Ask glibc not to give freed memory back to the system; returns whether it agreed.

    By default it gives back large blocks at once, and the next step gets them again page by page: thousands of page
    faults, up to a fifth of a small network's step on a CPU, in some processes and not in others (docs/performance.md).
    This holds for the whole process, so a program calls it and a library does not. Elsewhere than on glibc, nothing
    happens.

    >>> from sordino import heap
    >>> heap.keep() in (True, False)
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
