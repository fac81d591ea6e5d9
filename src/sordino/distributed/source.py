"""One stream of randomness for several processes: the leader draws, the others hear what it drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sordino.accounting.ledger import Receipt
from sordino.errors import InvalidInput
from sordino.noise import Source

if TYPE_CHECKING:
    from sordino.distributed.team import Team


class Shared:
    """A source that gives every process the same values: sampling coins, projections, the noise of small releases.

    Only the leader has a stream, so nothing is drawn twice, and a seeded run draws the same with any number of
    processes. The noise of gradients, as large as the model, is not sent around: the leader adds it to its own part of
    the sum from `own`.
    """

    def __init__(self, team: Team, own: Source | None) -> None:
        self._team, self._own = team, own
        self.assumption = team.lead(lambda: self.own.assumption)

    @property
    def own(self) -> Source:
        """The leader's stream; nobody else has one."""
        if self._own is None:
            raise InvalidInput("noise is drawn by rank 0 alone: noise of a second rank would not be accounted for")
        return self._own

    def uniform(self, size: int) -> NDArray[np.float64]:
        return self._team.lead(lambda: self.own.uniform(size))

    def directions(self, size: int) -> NDArray[np.float32]:
        return self._team.lead(lambda: self.own.directions(size))

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return self._team.lead(lambda: self.own.gaussian(receipt, size, std))
