"""Membership inference: was this record trained on? The attacks of DPSUR's Sec. 6.4, and stronger ones beside them."""

from sordino.audit.membership.learnt import black_box, loss_threshold, white_box
from sordino.audit.membership.networks import Attacker
from sordino.audit.membership.partition import Partition
from sordino.audit.membership.plotting import roc
from sordino.audit.membership.reference import References, lira, rmia
from sordino.audit.membership.scoring import Membership, Share, score
from sordino.audit.membership.signals import Signals, signals
from sordino.audit.membership.training import references

__all__ = [
    "Attacker",
    "Membership",
    "Partition",
    "References",
    "Share",
    "Signals",
    "black_box",
    "lira",
    "loss_threshold",
    "references",
    "rmia",
    "roc",
    "score",
    "signals",
    "white_box",
]
