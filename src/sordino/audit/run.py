"""Audit a saved run: attack its recipe, and ask its model about its own records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sordino.audit.mechanisms import Progress, mechanism
from sordino.audit.membership.learnt import loss_threshold, white_box
from sordino.audit.membership.partition import Partition
from sordino.audit.membership.scoring import Membership
from sordino.audit.membership.signals import Examples
from sordino.audit.result import Audit
from sordino.cli.session import Session, reopen
from sordino.errors import InvalidInput

MOST = 10_000
"""Attack models learn from at most so many members and others."""
FEWEST = 16


@dataclass(frozen=True)
class RunAudit:
    """What attackers found about a run. `membership` speaks of the private records: no guarantee covers it."""

    run: str
    epsilon: float
    delta: float
    mechanism: Audit
    membership: tuple[Membership, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report."""
        return {
            "run": self.run,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "mechanism": self.mechanism.to_dict(),
            "membership": [attack.to_dict() for attack in self.membership],
        }


def audit_run(
    directory: Path, *, seed: int | None = None, trials: int = 2000, progress: Progress | None = None
) -> RunAudit:
    """Attack the recipe of a run of `sordino train`, and its model by loss and by an attack model that knows half."""
    session = reopen(directory)
    try:
        guarantee = session.private.guarantee()
        examples, partition = _asked(session)
        audit = mechanism(session.private.bench.recipe, seed=seed, trials=trials, progress=progress, check=False)
        attacks: list[Callable[[], Membership]] = [
            lambda: loss_threshold(session.model, examples, partition),
            lambda: white_box(session.model, examples, partition, seed=seed or 0),
        ]
        found = []
        for number, attack in enumerate(attacks):
            found.append(attack())
            if progress is not None:
                progress("membership", number + 1, len(attacks))
        return RunAudit(str(directory), guarantee.epsilon, guarantee.delta, audit, tuple(found))
    finally:
        session.private.close()


def _asked(session: Session) -> tuple[Examples, Partition]:
    """Members are the records trained on, others those held out."""
    members, others = session.data.train, session.data.test
    if len(others[1]) < FEWEST:
        raise InvalidInput(
            f"{session.run} held {len(others[1])} records out, must be >= {FEWEST} to tell members from: use --held-out"
        )
    sizes = [min(MOST, len(part[1])) for part in (members, others)]
    inputs, labels = (torch.cat([members[i][: sizes[0]], others[i][: sizes[1]]]) for i in (0, 1))
    nobody, places = torch.zeros(0, dtype=torch.int64), torch.arange(sum(sizes))
    return (inputs, labels), Partition(places[: sizes[0]], places[sizes[0] :], nobody, nobody)
