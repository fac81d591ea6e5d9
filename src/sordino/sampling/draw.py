"""What a sampler returns, and what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from sordino.noise import Source
from sordino.terms import Terms

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget
    from sordino.recipe import Recipe
    from sordino.step import Bench


@dataclass(frozen=True)
class Draw:
    """The records of one step, by index. Private: its size too.

    A sampler that draws more records than are used gives `thresholds`: a record is used if its gradient is longer than
    its threshold, where gradients shorter than `floor` count as that long (importance sampling).
    """

    indices: Tensor
    thresholds: Tensor | None = None
    floor: float = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice) -> Draw:
        thresholds = None if self.thresholds is None else self.thresholds[part]
        return Draw(self.indices[part], thresholds, self.floor)

    def split(self, size: int) -> Iterator[Draw]:
        """The same draw in pieces of at most `size` records, as equal as can be: a small rest costs a whole pass."""
        pieces = -(-len(self) // size)
        edges = [len(self) * piece // pieces for piece in range(pieces + 1)] if pieces else []
        for part in starmap(slice, pairwise(edges)):
            yield self[part]


class Sampler(Protocol):
    """Decides which records a step sees, and what that does to the price.

    A sampler that learns as it goes keeps what it learnt in the run's private `memory`. Of that only
    ``memory["released"]``, plain numbers that were paid for, is saved with the run; the rest it must find out again.
    """

    def for_records(self, records: int, batch_size: int) -> Sampler:
        """This sampler, made ready for a public number of `records` and an expected size of a draw."""
        return self

    @property
    def covers(self) -> int:
        """How many steps in a row one event pays for: 1, or an epoch's where a record is in one batch of it."""
        return 1

    def calibrated(self, recipe: Recipe, budget: Budget) -> Recipe | None:
        """`recipe` made ready for `budget` in this sampler's own way; None to have its plan priced as usual."""
        return None

    def prepare(self, bench: Bench, step: int) -> None:
        """Make releases of its own before a step, each charged; most samplers need none."""
        return

    def terms(self, terms: Terms, memory: dict[str, Any]) -> Terms:
        """The terms of a step whose answer costs ``terms.event`` on a known set of records, on a fresh draw instead.

        Where one event `covers` several steps, ``terms.event`` has the least noise of all of them.
        """
        ...

    def draw(self, records: int, source: Source, memory: dict[str, Any]) -> Draw:
        """The indices of this step's records; the data itself is not touched."""
        ...

    def observe(self, draw: Draw, norms: Tensor, memory: dict[str, Any]) -> None:
        """Learn from the norms of the drawn records; most samplers do not."""
        return
