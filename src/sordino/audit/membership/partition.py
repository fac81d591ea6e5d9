"""Who belongs to whom: target and shadow, each with records that it trains on and records that it does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import InvalidInput

SHARES = (2, 1, 2, 1)


@dataclass(frozen=True)
class Partition:
    """Indices, at random and disjoint, in the proportions 2:1:2:1 (DPSUR, Sec. 6.4.2)."""

    target_members: Tensor
    target_others: Tensor
    shadow_members: Tensor
    shadow_others: Tensor

    @staticmethod
    def of(records: int, seed: int = 0) -> Partition:
        """Divide `records` records; consecutive blocks, as in the public implementation, would follow their order."""
        if records < sum(SHARES) * 4:
            raise InvalidInput(f"records={records} must be >= {sum(SHARES) * 4}: each of four parts needs some")
        order = torch.randperm(records, generator=torch.Generator().manual_seed(seed))
        unit = records // sum(SHARES)
        parts = order[: unit * sum(SHARES)].split([share * unit for share in SHARES])
        return Partition(*parts)
