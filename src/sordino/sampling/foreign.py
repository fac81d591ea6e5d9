"""Batches that somebody else drew: trained on privately, priced without amplification (law 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dp_accounting import GaussianDpEvent

from sordino.errors import InvalidInput
from sordino.noise import Source
from sordino.sampling.draw import Draw, Sampler
from sordino.terms import Terms


@dataclass(frozen=True)
class Foreign(Sampler):
    """A loader of the user's own, shuffled or not; nothing is known of how it chooses records.

    Guarantees: no amplification. Without one record, its batch may hold another one instead and later batches may
    shift by one, so that each sum changes by up to two contributions: every batch is charged as a plain Gaussian with
    half the noise. A record must not occur twice in a batch, which the guarantee states as an assumption. A torch
    DataLoader that shuffles is priced by the epoch with `sordino.sampling.ShuffledLoader`.
    """

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a guarantee must say about the loader."""
        return (
            "batches came from a foreign loader, so no amplification by sampling is claimed",
            "the foreign loader puts a record into a batch at most once, "
            "and without one record each batch would differ by at most one other",
        )

    def terms(self, terms: Terms, memory: dict[str, Any]) -> Terms:
        if not isinstance(terms.event, GaussianDpEvent):
            raise InvalidInput(f"sampler=Foreign() goes with exact norms, not with {terms.event}: use Poisson draws")
        return replace(terms, event=GaussianDpEvent(terms.noise_multiplier / 2))

    def draw(self, records: int, source: Source, memory: dict[str, Any]) -> Draw:
        raise InvalidInput(
            f"sampler={type(self).__name__}() does not draw: pass your loader to private.loader(yours), "
            "or use sampler=Poisson to be priced with amplification"
        )
