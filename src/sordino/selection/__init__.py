"""Whether a proposed model is kept or rolled back."""

from sordino.selection.always import Always
from sordino.selection.selector import Selector, Snapshot

__all__ = ["Always", "Selector", "Snapshot"]
