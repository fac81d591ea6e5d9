"""Pricing: from the events that happened to ε or δ. Asking never changes anything.

An accountant is a name, a basis and two functions; the table `ACCOUNTANTS` is the only place that lists them, so
another accountant needs one file and one line here. New *events* need no line here: register their price with
`pld.register` / `sampled_pld.register` or `rdp_curve.register` / `sampled_rdp_curve.register`.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from sordino.accounting.events import Adjacency, Events, require_adjacency
from sordino.accounting.filtered import FilterPricing
from sordino.accounting.gaussian import TCDP, ZCDP, ZCDP_EPOCH, GdpPricing
from sordino.accounting.pld import PldPricing, pld, sampled_pld
from sordino.accounting.rdp import ORDERS, ClassicRdpPricing, RdpPricing, rdp_curve, sampled_rdp_curve
from sordino.errors import InvalidInput

__all__ = [
    "ACCOUNTANTS",
    "ORDERS",
    "Accountant",
    "Basis",
    "delta",
    "epsilon",
    "pld",
    "rdp_curve",
    "require_accountant",
    "sampled_pld",
    "sampled_rdp_curve",
]

Basis = Literal["proven", "asymptotic", "published"]


class Accountant(Protocol):
    """Turns events into ε or δ; `basis` says on what grounds the answer holds."""

    @property
    def name(self) -> str: ...

    @property
    def basis(self) -> Basis: ...

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float: ...

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float: ...


_ALL: tuple[Accountant, ...] = (
    *(PldPricing(), RdpPricing(), ClassicRdpPricing(), FilterPricing()),
    *(GdpPricing(), ZCDP, ZCDP_EPOCH, TCDP),
)
ACCOUNTANTS: dict[str, Accountant] = {accountant.name: accountant for accountant in _ALL}


def require_accountant(name: str) -> Accountant:
    """Return the accountant called `name`, or raise an error that lists the known ones."""
    if name not in ACCOUNTANTS:
        raise InvalidInput(f"accountant={name!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def epsilon(events: Events, delta: float, accountant: str = "pld", adjacency: str = "add-or-remove-one") -> float:
    """Return the ε at `delta` of all `events` (pairs of event and count), composed adaptively; infinite if none holds.

    Nothing spent costs 0. Computed values are kept, per event and per multiset of events.
    """
    if not 0 < delta < 1:
        raise InvalidInput(f"delta={delta} must be in (0, 1): choose it well below 1 / number of records")
    return require_accountant(accountant).epsilon(events, float(delta), require_adjacency(adjacency))


def delta(events: Events, epsilon: float, accountant: str = "pld", adjacency: str = "add-or-remove-one") -> float:
    """Return the δ at `epsilon` of all `events`, composed adaptively."""
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise InvalidInput(f"epsilon={epsilon} must be >= 0 and finite: give the ε whose δ you want")
    return require_accountant(accountant).delta(events, float(epsilon), require_adjacency(adjacency))
