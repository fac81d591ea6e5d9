"""A witness of every draw of noise, outside the ledger: a line in a file of its own, before the noise exists."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from sordino.accounting import epsilon
from sordino.accounting.events import from_json, to_json
from sordino.accounting.ledger import Receipt
from sordino.noise import Secure


def watch(log: Path, *, kill_at: int | None = None) -> None:
    """From now on every draw of this process is in `log` first; at the draw `kill_at` (from 1) it dies instead.

    A kill at draw k is a kill between the k-th charge and its noise. Call it in a forked child: there is no way back.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    draw, made = Secure.gaussian, [0]

    def gaussian(self: Secure, receipt: Receipt, size: int, std: float) -> Tensor:
        made[0] += 1
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(descriptor, f"{receipt.sequence} {to_json(receipt.event)}\n".encode())
        return draw(self, receipt, size, std)

    Secure.gaussian = gaussian  # type: ignore[method-assign]


@dataclass(frozen=True)
class Draws:
    """What was drawn: for every receipt that noise was drawn on, its event. Several draws on one receipt are one."""

    events: dict[int, str]

    @staticmethod
    def read(log: Path) -> Draws:
        text = log.read_text() if log.exists() else ""
        lines = (line.partition(" ") for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return Draws({int(sequence): event.rstrip("\n") for sequence, _, event in lines})

    def __len__(self) -> int:
        return len(self.events)

    def missing(self, held: list[tuple[Any, int]]) -> list[str]:
        """The events that were drawn on and that a ledger, which holds `held`, does not know of."""
        known = Counter({to_json(event): count for event, count in held})
        return sorted((Counter(self.events.values()) - known).elements())

    def price(self, delta: float, accountant: str, adjacency: str) -> float:
        """What the draws cost at least."""
        counts = Counter(self.events.values())
        return epsilon([(from_json(text), n) for text, n in counts.items()], delta, accountant, adjacency)


def at_line(number: int, act: Callable[[], None]) -> list[int]:
    """Call `act` before the line `number` (from 1) of this package that this process runs; returns a live counter."""
    seen = [0]

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                sys.settrace(None)
                act()
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if "/sordino/" in frame.f_code.co_filename else None

    sys.settrace(call)
    return seen
