"""The price of an epoch's batches when every record is in at most one of them (docs/proofs/shuffled.md)."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.accounting.events import NoOpDpEvent
from sordino.errors import InvalidInput


@dataclass(frozen=True)
class PaidByEpoch(NoOpDpEvent):
    """A further batch of an epoch whose event, charged before its first batch, pays for this one too.

    It costs nothing by itself: a record in this batch is in no other batch of the epoch. It is still recorded, with the
    noise of its release, so that a ledger shows every release.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise InvalidInput(f"noise_multiplier={self.noise_multiplier} must be > 0: without noise, no privacy")


NAMES = {"paid-by-epoch": PaidByEpoch}
