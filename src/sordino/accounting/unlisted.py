"""The price of naming values that were not listed in advance, if clearly more than one record has them.

Adding a record may change the count of an existing value by one, which Gaussian noise of deviation σ hides. Or it
brings a new value, which is seen with probability at most δ' = Pr[1 + σZ > threshold]. Either way the release is no
worse than a Gaussian event together with an event that reveals everything with probability δ' (Korolova et al. 2009,
for search queries; with Gaussian noise, Wilkins et al. 2024). The proof is in docs/proofs/unlisted.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from sordino.accounting.events import Adjacency, DpEvent
from sordino.accounting.extremes import chance_of_all
from sordino.accounting.grids import INTERVAL
from sordino.accounting.pld import pld


@dataclass(frozen=True)
class Unlisted(DpEvent):
    """With probability `delta`, everything that one record says is revealed; otherwise nothing."""

    delta: float


NAMES = {"unlisted": Unlisted}


@chance_of_all.register(Unlisted)
def _(event: Unlisted, adjacency: Adjacency) -> float:
    return event.delta if adjacency == "add-or-remove-one" else 2 * event.delta  # one record leaves and another joins


@pld.register(Unlisted)
def _(event: Unlisted, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    seen = chance_of_all(event, adjacency)
    assert seen is not None
    return PrivacyLossDistribution.create_from_rounded_probability({0: 1 - seen}, seen, interval)
