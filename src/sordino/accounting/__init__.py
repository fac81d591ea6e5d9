"""What privacy costs: events, the ledger that records them, and the prices, budgets and guarantees based on them.

Nothing in this package imports torch.
"""

from sordino.accounting.budget import Budget, affordable
from sordino.accounting.calibration import Calibrated, calibrate_noise, calibrate_steps, noise_for, steps_for
from sordino.accounting.events import ADJACENCIES, Adjacency, Events, from_json, merge, to_json
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger, Receipt
from sordino.accounting.pricing import ACCOUNTANTS, Accountant, Basis, delta, epsilon

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "Accountant",
    "Adjacency",
    "Basis",
    "Budget",
    "Calibrated",
    "Events",
    "Guarantee",
    "Ledger",
    "Receipt",
    "affordable",
    "calibrate_noise",
    "calibrate_steps",
    "delta",
    "epsilon",
    "from_json",
    "merge",
    "noise_for",
    "steps_for",
    "to_json",
]
