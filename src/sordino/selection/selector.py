"""What a selector promises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dp_accounting import DpEvent

from sordino.terms import Terms

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt, Bench


class Snapshot(Protocol):
    """The state before a proposal."""

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        ...


class Selector(Protocol):
    """Sees the model before and after a proposal, and keeps one of them.

    What it must remember from attempt to attempt it keeps in the run's private memory.
    """

    def event(self, proposal: DpEvent) -> DpEvent:
        """What an attempt costs: the proposal's own event and whatever the selector's test adds (law 4)."""
        ...

    def terms(self, terms: Terms, recipe: Recipe, memory: dict[str, Any]) -> Terms:
        """The terms of an attempt, for selectors whose price depends on more than the proposal's."""
        return replace(terms, event=self.event(terms.event))

    def check(self, bench: Bench) -> None:
        """Refuse, before anything is spent, a model that the price does not hold for."""
        return

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        """Remember what a rejection must restore, or nothing where nothing is ever rejected."""
        ...

    def refine(self, attempt: Attempt) -> None:
        """Change the released gradient, now in the parameters, by what was released before; most leave it alone."""
        return

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        """Decide on the proposal that now stands in the model."""
        ...

    @property
    def constant(self) -> bool:
        """Whether every attempt costs the same, as far as the selector is concerned."""
        return True

    @property
    def evaluates(self) -> bool:
        """Whether its price needs losses that do not mix records in eval mode either."""
        return False

    @property
    def counts_attempts(self) -> bool:
        """Whether a rejected attempt is a step of the recipe (law 4); only published accounting says no."""
        return True

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a guarantee must say about the selection."""
        return ()
