"""Reviews a history: was every entry's author allowed to make it, at this price, and did it fit at the time?"""

from __future__ import annotations

import math

from sordino.accounting.events import add_up
from sordino.errors import VaultForged
from sordino.vault import history as kinds
from sordino.vault.composing import ROUNDING
from sordino.vault.history import Entry
from sordino.vault.state import WRITTEN_OFF, Counts, DatasetState


def check_links(entries: list[Entry], chain: bytes) -> None:
    """Check that each entry follows the one before, starting from `chain`."""
    for entry in entries:
        if entry.link(chain) != entry.chain:
            raise VaultForged(f"entry {entry.number} of {entry.dataset!r} was changed: restore the vault from a copy")
        chain = entry.chain


def check_entry(state: DatasetState, entry: Entry) -> None:
    """Check that an entry was allowed when the dataset was in `state`, at the price that it says."""
    who = f"entry {entry.number} of {entry.dataset!r} ({entry.kind} by {entry.person})"
    if entry.kind in kinds.OWNERS and entry.person != state.owner:
        raise VaultForged(f"{who} is the owner's to make")
    if entry.kind in (kinds.RESERVE, kinds.SETTLE):
        _check_run(state, entry, who)
        _check_price(state, entry, who)
    if entry.kind == kinds.RESERVE and (said := dict(entry.said["events"])):
        if not state.may_draw(entry.person) or state.closed:
            raise VaultForged(f"{who} was made without the right to")
        if not state.rule.allows(add_up(state.held, said)):
            raise VaultForged(f"{who} overdraws the budget")


def _check_run(state: DatasetState, entry: Entry, who: str) -> None:
    known = state.runs.get(entry.run)
    allowed = state.may_draw(entry.person) if known is None else entry.person == known.person
    if not allowed and not (entry.kind == kinds.SETTLE and entry.person == state.owner):
        raise VaultForged(f"{who} is about a run that is not theirs")
    if known is not None and known.status == WRITTEN_OFF:
        raise VaultForged(f"{who} is about a run that was written off before")


def _check_price(state: DatasetState, entry: Entry, who: str) -> None:
    said: Counts = dict(entry.said["events"])
    known, rule = state.runs.get(entry.run), state.rule
    before = {} if known is None or entry.kind == kinds.RESERVE else known.held
    cost = rule.cost(said) - rule.cost(before)
    if not math.isclose(cost, float(entry.cost), rel_tol=ROUNDING, abs_tol=ROUNDING):
        raise VaultForged(f"{who} says that it costs {entry.cost}, and it costs {cost:g}: it was not priced by Sordino")
    failing, stated = rule.add_failures(said) - rule.add_failures(before), entry.said.get("failing", 0.0)
    if not math.isclose(failing, stated, rel_tol=ROUNDING, abs_tol=ROUNDING * rule.budget.delta):
        raise VaultForged(f"{who} says that it fails with {stated}, and not with {failing:g}: not priced by Sordino")
