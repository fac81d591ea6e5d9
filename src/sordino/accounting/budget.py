"""A budget: how much may be spent, and how much of a plan it can pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sordino.accounting.adjacency import required_adjacency
from sordino.accounting.events import DpEvent
from sordino.accounting.pricing import Events, epsilon, required_accountant
from sordino.errors import InvalidInput


@dataclass(frozen=True)
class Budget:
    """At most `epsilon` at `delta`, as `accountant` prices it under `adjacency`."""

    epsilon: float
    delta: float
    accountant: str = "pld"
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise InvalidInput(
                f"epsilon={self.epsilon} must be > 0 and finite: 1 to 8 is usual, smaller is more private"
            )
        if not 0 < self.delta < 1:
            raise InvalidInput(f"delta={self.delta} must be in (0, 1): choose it well below 1 / number of records")
        required_accountant(self.accountant)
        required_adjacency(self.adjacency)

    def price(self, events: Events) -> float:
        """The ε of `events` at this budget's δ."""
        return epsilon(events, self.delta, self.accountant, self.adjacency)

    def allows(self, events: Events) -> bool:
        """Whether all of `events` together stay within the budget."""
        return self.price(events) <= self.epsilon


def affordable(budget: Budget, spent: Events, upcoming: Sequence[DpEvent | tuple[DpEvent, int]]) -> int:
    """How many of the `upcoming` events, taken in order, still fit beside what was `spent`.

    A run (event, count) stands for `count` events. The price grows with every event, so the largest prefix is found by
    bisection: one pricing if everything fits, otherwise about log2 of the number of events.
    """
    runs = [run if isinstance(run, tuple) else (run, 1) for run in upcoming]
    total = sum(count for _, count in runs)
    if total and budget.allows([*spent, *runs]):
        return total
    fits, fails = 0, total
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if budget.allows([*spent, *_prefix(runs, middle)]):
            fits = middle
        else:
            fails = middle
    return fits


def _prefix(runs: Sequence[tuple[DpEvent, int]], length: int) -> list[tuple[DpEvent, int]]:
    prefix: list[tuple[DpEvent, int]] = []
    for event, count in runs:
        taken = min(count, length)
        if taken > 0:
            prefix.append((event, taken))
        length -= taken
    return prefix
