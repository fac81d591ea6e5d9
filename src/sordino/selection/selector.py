"""What a selector promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dp_accounting import DpEvent

if TYPE_CHECKING:
    from sordino.step import Attempt


class Snapshot(Protocol):
    """The state before a proposal."""

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        ...


class Selector(Protocol):
    """Sees the model before and after a proposal, and keeps one of them."""

    def event(self, proposal: DpEvent) -> DpEvent:
        """What an attempt costs: the proposal's own event and whatever the selector's test adds (law 4)."""
        ...

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        """Remember what a rejection must restore, or nothing where nothing is ever rejected."""
        ...

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        """Decide on the proposal that now stands in the model."""
        ...
