"""Membership inference: was this record trained on? The attacks of DPSUR's Sec. 6.4, and stronger ones beside them."""

from sordino.audit.membership.attacks import (
    Attacker,
    Partition,
    Signals,
    black_box,
    loss_threshold,
    query,
    white_box,
)
from sordino.audit.membership.scoring import Membership, plot_roc, score
from sordino.audit.membership.shadows import References, Train, lira, rmia, train_references
from sordino.figures import Estimate

__all__ = [
    "Attacker",
    "Estimate",
    "Membership",
    "Partition",
    "References",
    "Signals",
    "Train",
    "black_box",
    "lira",
    "loss_threshold",
    "plot_roc",
    "query",
    "rmia",
    "score",
    "train_references",
    "white_box",
]
