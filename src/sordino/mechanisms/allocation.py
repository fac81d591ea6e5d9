"""Random allocation: every record takes part in one step of each epoch, which its own secret coin chooses.

An ordinary epoch shows every record once; Poisson draws show it 0, 1, 2, … times. If each record is dealt to a
uniformly random one of the epoch's t steps ("balls into bins", Chua et al. 2025; Feldman & Shenfeld 2025), an observer
who does not know the step sees

    (1/t) Σ_i N(e_i, σ²·I)    against    N(0, σ²·I),

which hides a record about as well as Poisson draws at rate 1/t, and a little better in every case that we tried. The
draws are those of `Shuffled`, which is priced as if the step were known. Here it is secret, and the epoch is one
`RandomAllocation` (proof in docs/proofs/allocation.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

from dp_accounting import GaussianDpEvent

from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.accounting.random_allocation import RandomAllocation
from sordino.combinations import Needs
from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.mechanisms.shuffled import Shuffled
from sordino.noise import Independent
from sordino.parts import Always, Exact, Terms
from sordino.recipe import Common, Optimizer, Recipe


def _unproven(slot: str, proven: type, use: str) -> Needs:
    return Needs(slot, f"{slot}={{part!r}} has no proof with random allocation: use {use}", (proven,), subclasses=True)


@dataclass(frozen=True)
class Allocated(Shuffled):
    """In each epoch every record picks one of `batches` steps by its own secret coin, and is only in that step.

    Guarantees: an epoch is one `RandomAllocation` with its smallest noise, charged before its first step.
    Edge cases: those of `Shuffled`. An epoch that ends early stays paid for in full, and the next has fresh coins.
    """

    apart: ClassVar[bool] = True
    needs: ClassVar[tuple[Needs, ...]] = (
        _unproven("norms", Exact, "Exact()"),
        _unproven("noise", Independent, "Independent()"),
        _unproven("selection", Always, "Always()"),
        _unproven("rdp_filter", type(None), "none: an epoch is priced as a whole"),
    )

    def for_records(self, records: int, batch_size: int) -> Allocated:
        return replace(self, batches=-(-records // batch_size))

    def terms(self, terms: Terms, state: Any) -> Terms:
        terms = super().terms(terms, state)
        if isinstance(terms.event, PaidByEpoch):
            return terms
        assert isinstance(terms.event, GaussianDpEvent)
        return replace(terms, event=RandomAllocation(terms.event.noise_multiplier, self.covers))


def allocation(*, clip: float = 1.0, lr: float = 0.5, momentum: float = 0.0, **common: Unpack[Common]) -> Recipe:
    """DP-SGD that deals each record to one secret step of every epoch (random allocation).

    >>> from sordino import Budget, recipes
    >>> recipe = recipes.allocation(batch_size=600, epochs=2).calibrate(Budget(3, 1e-5), records=60_000)
    >>> recipe.steps, recipe.plan()[0][0].steps
    (200, 100)
    """
    if common.get("sampler") is not None:
        raise InvalidInput(f"sampler={common['sampler']!r} cannot be given: random allocation is a way to sample")
    own: Common = {**common, "sampler": Allocated()}
    return Recipe(name="allocation", clip=clip, optimizer=Optimizer("sgd", lr=lr, momentum=momentum), **own)


MECHANISMS = (
    Mechanism(
        "allocation",
        title="random allocation",
        summary="every record is in one step of each epoch, chosen by a secret coin",
        paper="Chua et al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025; Feldman, Shenfeld, Privacy Amplification "
        "by Random Allocation, 2025",
        recipe=allocation,
        parts={"Sampler": {"allocated": Allocated}},
    ),
)
