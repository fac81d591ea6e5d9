"""Batches that somebody else drew: trained on privately, priced without amplification (law 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sordino.errors import InvalidInput
from sordino.noise import Source
from sordino.sampling.draw import Draw, Sampler
from sordino.terms import Terms


@dataclass(frozen=True)
class Foreign(Sampler):
    """A loader of the user's own, shuffled or not; nothing is known of how it chooses records.

    Guarantees: none beyond the plain Gaussian mechanism, charged in full for every batch.
    """

    def terms(self, terms: Terms, memory: dict[str, Any]) -> Terms:
        return terms

    def draw(self, records: int, source: Source, memory: dict[str, Any]) -> Draw:
        raise InvalidInput(
            "sampler=Foreign() does not draw: pass your loader to private.loader(yours), "
            "or use sampler=Poisson to be priced with amplification"
        )
