"""Whether a proposed model is kept or rolled back.

The selectors that reject live in modules of their own, which recipes import: `selective`, `annealing`, `step_length`.
"""

from sordino.selection.always import Always
from sordino.selection.selector import Selector, Snapshot

__all__ = ["Always", "Selector", "Snapshot"]
