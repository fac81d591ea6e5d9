"""How to train when nobody says how: from the kind of records and their public number alone."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.data import Data
from sordino.data.tabular_sheet import Sheet
from sordino.propose import Optimizer

OPTIMIZERS = {
    "sgd": Optimizer("sgd", lr=0.25, momentum=0.9),
    "adam": Optimizer("adam", lr=0.01),
    "adamw": Optimizer("adamw", lr=0.01),
}
"""Good for small models and some hundred steps; found on digits, which are public."""


@dataclass(frozen=True)
class Defaults:
    """Expected size of a draw as a share of the records, within limits; and how long and how fast to learn."""

    share: float
    fewest: int
    most: int
    epochs: float
    optimizer: Optimizer

    def batch_size(self, records: int) -> int:
        wanted = max(self.fewest, int(self.share * records))
        return max(1, min(wanted, self.most, records))


BENCHMARK = Defaults(share=0.25, fewest=1, most=256, epochs=20.0, optimizer=OPTIMIZERS["sgd"])
TABLE = Defaults(share=0.25, fewest=1, most=16_384, epochs=25.0, optimizer=OPTIMIZERS["sgd"])
IMAGES = Defaults(share=0.125, fewest=64, most=4_096, epochs=20.0, optimizer=Optimizer("sgd", lr=0.1, momentum=0.9))


def defaults_for(records: Data | Sheet) -> Defaults:
    """For a user's own records: large draws, because noise is added once per draw whatever its size."""
    if isinstance(records, Sheet):
        return TABLE
    return IMAGES if records.train_set[0][0].dim() == 3 else BENCHMARK
