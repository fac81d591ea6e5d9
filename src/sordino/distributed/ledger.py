"""One ledger for several processes: the leader writes it, the others answer questions from a copy in memory."""

from __future__ import annotations

from sordino.accounting.ledger import Ledger
from sordino.distributed.team import Team


def reflected(team: Team, ledger: Ledger) -> Ledger:
    """The leader's own ledger; for everybody else one in memory with the same events, to which they add what they hear.

    Guarantees: `guarantee()` gives the same answer on every rank without asking the leader.
    """
    if team.size == 1:
        return ledger
    header, events, said = team.lead(lambda: (dict(ledger.header), ledger.events(), ledger.declared("assumption")))
    if team.leads:
        return ledger
    copy = Ledger.in_memory(run_id=header["run_id"], header=header)
    for event, count in events:
        for _ in range(count):
            copy.charge(event)
    for line in said:
        copy.declare("assumption", line)
    return copy
