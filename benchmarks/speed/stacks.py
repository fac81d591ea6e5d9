"""Where the time of a step goes: a thread looks at the stack of the thread that trains, a few hundred times a second.

No part of a step is called or timed by itself, so the same eyes see SGD and Sordino alike. A look counts for the part
that the outermost telling function of the stack belongs to: the loss, a backward pass, the optimizer, and, by file,
what Sordino does besides.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType

PARTS = ("forward", "backward", "norms and sums", "noise", "draw and records", "ledger", "update", "rest")
EVERY = 0.002

FILES: Mapping[str, str] = MappingProxyType(
    {
        "/sordino/noise.py": "noise",
        "/sordino/records.py": "draw and records",
        "/sordino/parts.py": "draw and records",
        "/sordino/accounting/": "ledger",
        "/sordino/books.py": "ledger",
        "/torch/utils/data/": "draw and records",
        "/speed/cases.py": "draw and records",
        "/torch/optim/": "update",
    }
)
"""Parts by file, for what happens outside a forward or backward pass."""
GRADIENTS = "/sordino/gradients/"


def find_part(stack: list[tuple[str, str]]) -> str:
    """The part that a stack of (file, function), innermost first, is in.

    Inside a backward pass what Sordino's rules do is theirs; inside the loss the forward pass is computed, also where
    a rule of Sordino computes it.
    """
    for depth, (file, function) in enumerate(stack):
        if file.endswith("/speed/cases.py") and function == "loss":
            return "forward"
        if "/torch/autograd/" in file and function in ("backward", "grad", "_engine_run_backward"):
            inside = any(GRADIENTS in inner for inner, _ in stack[:depth])
            return "norms and sums" if inside else "backward"
    for file, _ in stack:
        for known, part in FILES.items():
            if known in file:
                return part
        if GRADIENTS in file:
            return "norms and sums"
    return "rest"


def read_stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """File and function of every frame, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found


def watch(work: Callable[[], None]) -> dict[str, float]:
    """The share of each part in the time that `work` takes."""
    seen: Counter[str] = Counter()
    done, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        while not done.is_set():
            time.sleep(EVERY)
            frames = sys._current_frames()
            seen[find_part(read_stack(frames.get(thread)))] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    eyes = threading.Thread(target=look, daemon=True)
    eyes.start()
    try:
        work()
    finally:
        done.set()
        eyes.join()
        sys.setswitchinterval(before)
    return {part: seen[part] / max(1, seen.total()) for part in PARTS}
