"""Audit a saved run: attack its recipe, and ask its model about its own records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sordino.audit.mechanisms import Progress, mechanism
from sordino.audit.membership.learnt import loss_threshold, white_box
from sordino.audit.membership.partition import Partition
from sordino.audit.membership.scoring import Membership
from sordino.audit.membership.signals import Examples
from sordino.audit.result import Audit
from sordino.errors import InvalidInput
from sordino.private import Private

MOST = 10_000
"""Attack models learn from at most so many members and others."""
FEWEST = 16


@dataclass(frozen=True)
class RunAudit:
    """What attackers found about a run. `membership` speaks of the private records: no guarantee covers it."""

    epsilon: float
    delta: float
    mechanism: Audit
    membership: tuple[Membership, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "mechanism": self.mechanism.to_dict(),
            "membership": [attack.to_dict() for attack in self.membership],
        }


def audit_run(
    private: Private,
    members: Examples,
    others: Examples,
    *,
    seed: int | None = None,
    trials: int = 2000,
    progress: Progress | None = None,
) -> RunAudit:
    """Attack the recipe of a run, and its model by loss and by an attack model that knows half of the members.

    `members` are records that were trained on, `others` were held out.
    """
    guarantee, model = private.guarantee(), private.bench.objective.model
    examples, partition = _asked(members, others)
    audit = mechanism(private.bench.recipe, seed=seed, trials=trials, progress=progress, check=False)
    attacks: list[Callable[[], Membership]] = [
        lambda: loss_threshold(model, examples, partition),
        lambda: white_box(model, examples, partition, seed=seed or 0),
    ]
    found = []
    for number, attack in enumerate(attacks):
        found.append(attack())
        if progress is not None:
            progress("membership", number + 1, len(attacks))
    return RunAudit(guarantee.epsilon, guarantee.delta, audit, tuple(found))


def _asked(members: Examples, others: Examples) -> tuple[Examples, Partition]:
    """At most `MOST` of each, and who is who."""
    if len(others[1]) < FEWEST:
        raise InvalidInput(
            f"{len(others[1])} records were held out, must be >= {FEWEST} to tell members from: use --held-out"
        )
    sizes = [min(MOST, len(part[1])) for part in (members, others)]
    inputs, labels = (torch.cat([members[i][: sizes[0]], others[i][: sizes[1]]]) for i in (0, 1))
    nobody, places = torch.zeros(0, dtype=torch.int64), torch.arange(sum(sizes))
    return (inputs, labels), Partition(places[: sizes[0]], places[sizes[0] :], nobody, nobody)
