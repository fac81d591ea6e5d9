"""The classes of a target whose names nobody gave: those that clearly more than one record has.

Adding a record either changes the count of a class that is there by one, which Gaussian noise of deviation σ hides; or
it brings a class that was not there, which is seen with probability at most δ' = Pr[1 + σZ > threshold]. Either way the
release is no worse than a Gaussian event beside an event that reveals everything with probability δ' (Korolova et al.
2009, for search queries; with Gaussian noise, Wilkins et al. 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.stats import norm

from sordino.accounting.adjacency import Adjacency
from sordino.accounting.composition import INTERVAL
from sordino.accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.accounting.pld import pld
from sordino.errors import InvalidInput
from sordino.noise import Source, noised
from sordino.tables.encoding import spell_label


@dataclass(frozen=True)
class Unlisted(DpEvent):
    """With probability `delta` whatever one record says is seen, else nothing of it."""

    delta: float


@pld.register(Unlisted)
def _(event: Unlisted, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    seen = event.delta if adjacency == "add-or-remove-one" else 2 * event.delta  # a record goes and another comes
    return PrivacyLossDistribution.create_from_rounded_probability({0: 1 - seen}, seen, interval)


def build_event(noise_multiplier: float, unlisted: float) -> DpEvent:
    """What the names of the classes cost."""
    return ComposedDpEvent([GaussianDpEvent(noise_multiplier), Unlisted(unlisted)])


def find_threshold(noise_multiplier: float, unlisted: float) -> float:
    """The noised count above which a class is named: one record passes it with probability `unlisted`."""
    return 1.0 + noise_multiplier * float(norm.isf(unlisted))


def release_classes(
    cells: Sequence[str], noise_multiplier: float, unlisted: float, receipt: Receipt, source: Source
) -> tuple[str, ...]:
    """The names of the classes that clear the threshold, in order; the event must have been charged."""
    spelled = {cell: spell_label(cell) for cell in set(cells)}
    counts = Counter(name for cell in cells if (name := spelled[cell]) is not None)
    exact = torch.tensor(list(counts.values()), dtype=torch.float64)
    noisy = noised(source, receipt, exact, noise_multiplier).tolist()
    least = find_threshold(noise_multiplier, unlisted)
    named = [name for name, count in zip(counts, noisy, strict=True) if count > least]
    if len(named) < 2:
        raise InvalidInput(
            f"the target has {len(named)} classes with clearly more than {least:.0f} records, it takes 2: "
            "give --classes if you know their names"
        )
    return tuple(sorted(named, key=_rank))


def _rank(name: str) -> tuple[int, float, str]:
    """Numbers by size, then words."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name
