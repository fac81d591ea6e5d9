"""How to train when nobody says how: from the kind of records and their public number alone."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.data.dataset import Data
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
    """Expected size of a draw as a share of the records, within limits; and how long and how fast to learn.

    `epochs` are cut to `most_steps`: a million records say in few epochs what there is to say.
    """

    share: float
    fewest: int
    most: int
    most_epochs: float
    optimizer: Optimizer
    most_steps: int = 400

    def batch_size(self, records: int) -> int:
        wanted = max(self.fewest, int(self.share * records))
        return max(1, min(wanted, self.most, records))

    def epochs(self, records: int) -> float:
        return min(self.most_epochs, self.most_steps * self.batch_size(records) / records)


BENCHMARK = Defaults(share=0.25, fewest=1, most=256, most_epochs=20.0, optimizer=OPTIMIZERS["sgd"], most_steps=10**9)
TABLE = Defaults(share=0.25, fewest=1, most=16_384, most_epochs=25.0, optimizer=OPTIMIZERS["sgd"])
IMAGES = Defaults(
    share=0.125, fewest=64, most=4_096, most_epochs=20.0, optimizer=Optimizer("sgd", lr=0.1, momentum=0.9)
)


def defaults_for(records: Data | Sheet) -> Defaults:
    """For a user's own records: large draws, because noise is added once per draw whatever its size.

    Chosen by held-out accuracy on public tables (breast cancer, diabetes, digits of scikit-learn; part of IMDb).
    """
    if isinstance(records, Sheet):
        return TABLE
    return IMAGES if records.train_set[0][0].dim() == 3 else BENCHMARK
