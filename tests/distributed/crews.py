"""Which crew does what."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import scenarios as s
from tests.distributed.sharded import plain_halves, shards
from tests.helpers import budgeted


def warm() -> None:
    """Price and import once what every rank needs; the ranks are forked and inherit it."""
    s.weighted_sum(Path())
    s.trained("dpsgd", "dpis", "jl")
    s.train(budgeted(steps=8), validate=False)


SAME = [s.weighted_sum, s.noise, s.tiny_draws, s.own_loop, s.budget, s.saved, s.users]
CREWS = {
    "1": (1, [*SAME, s.all_recipes, plain_halves]),
    "2": (
        2,
        [*SAME, s.all_recipes, s.refusals, s.drifting, s.augmented, s.unwritable, s.vaulted, s.other_users, shards],
    ),
    "4": (4, [*SAME[:3], s.some_recipes, s.pairs]),
    "death": (2, [s.death]),
}
