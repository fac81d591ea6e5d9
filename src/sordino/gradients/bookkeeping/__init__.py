"""Book-keeping: exact per-example norms and weighted sums from one forward and one backward pass.

`recording` sees every use of a parameter during the loss, `operations` knows what torch's functions do to their
arguments, `proof` finds where the examples are in every output, `book` holds what is kept of a batch, and `keeper` is
the engine that puts them together.
"""

from sordino.gradients.bookkeeping.keeper import BookKeeping

__all__ = ["BookKeeping"]
