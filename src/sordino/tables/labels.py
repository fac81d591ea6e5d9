"""Releases the classes of a target if nobody gave their names: those that clearly more than one record has.

`sordino.accounting.unlisted` has the price of their names, and its proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from scipy.stats import norm

from sordino.accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.accounting.unlisted import Unlisted
from sordino.errors import LostInNoise
from sordino.noise import Source, add_noise
from sordino.tables.encoding import spell_label


def build_event(noise_multiplier: float, unlisted: float) -> DpEvent:
    """Return the event that pays for the names of the classes."""
    return ComposedDpEvent([GaussianDpEvent(noise_multiplier), Unlisted(unlisted)])


def find_threshold(noise_multiplier: float, unlisted: float) -> float:
    """Find the noised count above which a class is named: a single record passes it with probability `unlisted`."""
    return 1.0 + noise_multiplier * float(norm.isf(unlisted))


def release_classes(
    cells: Sequence[str], noise_multiplier: float, unlisted: float, receipt: Receipt, source: Source
) -> tuple[str, ...]:
    """Release the names of the classes above the threshold, in order; the event must have been charged."""
    spelled = {cell: spell_label(cell) for cell in set(cells)}
    counts = Counter(name for cell in cells if (name := spelled[cell]) is not None)
    exact = torch.tensor(list(counts.values()), dtype=torch.float64)
    noisy = add_noise(source, receipt, exact, noise_multiplier).tolist()
    least = find_threshold(noise_multiplier, unlisted)
    named = [name for name, count in zip(counts, noisy, strict=True) if count > least]
    if len(named) < 2:
        raise LostInNoise(
            f"the target has {len(named)} classes with clearly more than {least:.0f} records, it takes 2: "
            "give --classes if you know their names"
        )
    return tuple(sorted(named, key=rank))


def rank(name: str) -> tuple[int, float, str]:
    """Return the sorting key of a name: numbers by size, then words."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name
