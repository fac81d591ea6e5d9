"""What the budget still pays for, decided before each release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from dp_accounting import DpEvent

from sordino.accounting.budget import Budget, affordable
from sordino.accounting.events import to_json
from sordino.errors import BudgetExhausted

Runs = Sequence[tuple[DpEvent, int]]
"""Events in order, each with how often it occurs in a row."""


class Allowance(Protocol):
    """Refuses a release before it is made (law 5)."""

    def require(self, event: DpEvent) -> None:
        """Return if `event` may be charged now, else raise `BudgetExhausted`."""
        ...


class Unlimited:
    """No budget was set: everything is charged and nothing is refused."""

    def require(self, event: DpEvent) -> None:
        return None


class Planned:
    """A budget over a plan that is known in advance.

    The longest affordable beginning of the plan is priced once; its events then pass without being priced again.
    An event outside the plan is priced together with everything spent so far.
    """

    def __init__(self, budget: Budget, spent: Runs, plan: Runs) -> None:
        self._budget = budget
        self._spent = _Tally(spent)
        self._prepaid = self._affordable(plan)

    @property
    def left(self) -> list[tuple[DpEvent, int]]:
        """The part of the plan that can be paid and is still to come."""
        return self._prepaid.runs()

    def _affordable(self, plan: Runs) -> _Tally:
        remaining = affordable(self._budget, self._spent.runs(), plan)
        paid = _Tally()
        for event, count in plan:
            paid.add(event, min(count, remaining))
            remaining -= min(count, remaining)
        return paid

    def require(self, event: DpEvent) -> None:
        if self._prepaid.count(event) > 0:
            self._prepaid.add(event, -1)
            self._spent.add(event, 1)
        elif affordable(self._budget, self._spent.runs(), [(event, 1)]) == 1:
            self._spent.add(event, 1)
            self._prepaid = self._affordable(self._prepaid.runs())
        else:
            raise BudgetExhausted(
                f"the next release would exceed epsilon={self._budget.epsilon:g} at delta={self._budget.delta:g}: "
                f"{self._spent.total()} events are spent; training ends here with the model as it is"
            )


class _Tally:
    """How often each event occurred; events are told apart by their text, since composed ones cannot be hashed."""

    def __init__(self, runs: Runs = ()) -> None:
        self._events: dict[str, DpEvent] = {}
        self._counts: Counter[str] = Counter()
        for event, count in runs:
            self.add(event, count)

    def add(self, event: DpEvent, count: int) -> None:
        text = to_json(event)
        self._events[text] = event
        self._counts[text] += count

    def count(self, event: DpEvent) -> int:
        return self._counts[to_json(event)]

    def total(self) -> int:
        return self._counts.total()

    def runs(self) -> list[tuple[DpEvent, int]]:
        return [(self._events[text], count) for text, count in self._counts.items() if count > 0]
