"""Per-example gradient norms and weighted sums."""

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.choice import engine_named
from sordino.gradients.engine import Batch, Differentiated, Engine, Objective
from sordino.gradients.looped import Looped
from sordino.gradients.vmapped import Vmapped

__all__ = ["Batch", "BookKeeping", "Differentiated", "Engine", "Looped", "Objective", "Vmapped", "engine_named"]
