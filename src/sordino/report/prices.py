"""What a ledger costs, in several views: ε against δ, ε as it was spent, and what an attacker may reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sordino.accounting import Basis, pricing
from sordino.accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, to_json
from sordino.accounting.filtered import Filtered
from sordino.accounting.plans import Bill
from sordino.errors import InvalidInput
from sordino.run import weaken

Points = tuple[tuple[float, float], ...]
Runs = list[tuple[DpEvent, int]]

DELTAS = (0.5, 0.3, 0.2, *(10.0 ** (-exponent / 2) for exponent in range(2, 25)))
"""From 0.5 down to 1e-12. Nobody promises a δ of 0.5, but it bounds attackers who do not mind false alarms."""
MOMENTS = 24
"""The number of parts into which the history of a budget is cut; each is priced separately."""


@dataclass(frozen=True)
class Tariff:
    """The terms by which a ledger is priced."""

    delta: float
    accountant: str = "pld"
    adjacency: str = "add-or-remove-one"

    def price(self, runs: Runs) -> float:
        """Return the ε of `runs`, infinite if there is none."""
        return pricing.epsilon(runs, self.delta, self.accountant, self.adjacency)

    def charge(self, bill: Bill) -> float:
        """Return the ε of a bill, including the rest of its plans."""
        return bill.epsilon(self.delta, self.accountant, self.adjacency)


def count_repeats(events: Iterable[DpEvent]) -> Runs:
    """Events in order, equal neighbours counted together."""
    return [(group[0], len(group)) for _, same in groupby(events, key=to_json) if (group := list(same))]


def price_curve(bill: Bill, tariff: Tariff) -> Points:
    """(ε, δ) at a ladder of δ, ε rising; every point holds at once, because pricing releases nothing."""
    deltas = sorted({*DELTAS, tariff.delta}, reverse=True)
    points = ((replace(tariff, delta=delta).charge(bill), delta) for delta in deltas)
    return tuple((epsilon, delta) for epsilon, delta in points if math.isfinite(epsilon))


def price_beginnings(runs: Runs, tariff: Tariff) -> Points:
    """(events so far, ε at the budget's δ), from nothing to now."""
    total = sum(count for _, count in runs)
    moments = sorted({round(total * part / MOMENTS) for part in range(MOMENTS + 1)})
    spent = ((float(moment), tariff.price(take_first(runs, moment))) for moment in moments)
    return tuple((moment, epsilon) for moment, epsilon in spent if math.isfinite(epsilon))


def take_first(runs: Runs, length: int) -> Runs:
    """Return the first `length` events, each kind of event with its count."""
    taken: dict[str, tuple[DpEvent, int]] = {}
    for event, count in runs:
        part = min(count, length)
        if part <= 0:
            break
        length -= part
        text = to_json(event)
        taken[text] = (event, part + (taken[text][1] if text in taken else 0))
    return list(taken.values())


def list_noises(runs: Runs) -> Points:
    """(event, noise multiplier) of every Gaussian in the ledger, at the first and last event of each run."""
    points, done = [], 0
    for event, count in runs:
        noise = _read_noise(event)
        if noise is not None:
            points += [(done + 1.0, noise), (float(done + count), noise)]
        done += count
    return tuple(dict.fromkeys(points))


def thin(points: Sequence[tuple[float, float]], most: int) -> Points:
    """Keep about `most` of the points, evenly spread, including the first and the last."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(k * (len(points) - 1) / (most - 1))] for k in range(most))


def _read_noise(event: DpEvent) -> float | None:
    if isinstance(event, Filtered | PoissonSampledDpEvent):
        return _read_noise(event.event)
    return float(event.noise_multiplier) if isinstance(event, GaussianDpEvent) else None


@dataclass(frozen=True)
class Opinion:
    """One accountant's price of the ledger."""

    accountant: str
    basis: Basis
    epsilon: float


def ask_all_accountants(bill: Bill, tariff: Tariff, basis: Basis) -> tuple[Opinion, ...]:
    """Ask every accountant that can price these events; none can improve the `basis` of the recipe."""
    found = []
    for accountant in pricing.ACCOUNTANTS.values():
        try:
            price = replace(tariff, accountant=accountant.name).charge(bill)
        except InvalidInput:
            continue
        found.append(Opinion(accountant.name, weaken(basis, accountant.basis), price))
    return tuple(sorted(found, key=lambda opinion: opinion.accountant != tariff.accountant))


def bound_detection(points: Points, false_alarms: float) -> float:
    """Bound the share of present records that any test finds, if it raises `false_alarms` for absent ones.

    (ε, δ)-privacy in both directions bounds the power β of a test of level α by β ≤ e^ε·α + δ and by
    1 − β ≥ e^−ε·(1 − α − δ) (Kairouz, Oh & Viswanath 2015, Thm. 2.1); the least over all points of the curve holds.
    """
    bounds = [1.0]
    for epsilon, delta in points:
        bounds.append(_exp(epsilon) * false_alarms + delta)
        bounds.append(1 - _exp(-epsilon) * (1 - false_alarms - delta))
    return max(min(bounds), false_alarms)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
