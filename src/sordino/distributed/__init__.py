"""Several processes, one mechanism: the same program under ``torchrun``, one draw, one noise, one ledger.

Every process draws the same records and differentiates its part of them; the sums are added up by one all-reduce, to
which rank 0 contributes the noise, exactly once. Rank 0 alone writes the ledger, before the noise exists.
"""

from sordino.distributed import agreement, sharding
from sordino.distributed.team import Ranks, Team, form_team, join, mirror_ledger

__all__ = ["Ranks", "Team", "agreement", "form_team", "join", "mirror_ledger", "sharding"]
