"""Per-example gradient norms and weighted sums."""

from __future__ import annotations

from sordino.errors import InvalidInput
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Batch, Differentiated, Engine, Objective
from sordino.gradients.looped import Looped
from sordino.gradients.vmapped import Vmapped

__all__ = ["Batch", "BookKeeping", "Differentiated", "Engine", "Looped", "Objective", "Vmapped", "find_engine"]


def find_engine(name: str) -> Engine:
    """The engine called `name`; "auto" keeps books, and falls back to vmap, then to a loop, where it cannot."""
    engines: dict[str, type[BookKeeping | Vmapped | Looped]] = {"auto": BookKeeping, "vmap": Vmapped, "loop": Looped}
    if name not in engines:
        raise InvalidInput(f"engine={name!r} must be one of {', '.join(engines)}: 'auto' finds the fastest that works")
    return engines[name]()
