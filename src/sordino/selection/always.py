"""Every proposal is kept: ordinary private training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dp_accounting import DpEvent

from sordino.selection.selector import Selector, Snapshot

if TYPE_CHECKING:
    from sordino.step import Attempt


@dataclass(frozen=True)
class Always(Selector):
    """Keep every proposal. Guarantees: post-processing alone, so it costs nothing."""

    def event(self, proposal: DpEvent) -> DpEvent:
        return proposal

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        return None

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        return True
