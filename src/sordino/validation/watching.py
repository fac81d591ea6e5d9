"""Probes real draws: now and then, a step's own examples are compared with themselves beside other examples.

The probe at the start sees a few records. A model may mix examples only in a batch as large as a draw, only for some
records or only by the toss of a coin. So at attempts 1, 2, 4, 8, ... of every opening of a run, before the noise is
drawn, half of the examples of the draw's first part are left out. The other half must keep its losses, and at the first
two attempts a few of them their gradients, with coins that all examples share. If coins may choose what is computed,
half is also replaced by copies of one example, with the coins of a real step; masks like dropout's choose nothing.

What a refusal reveals. The attempt is charged before the draw is made, and the refusal comes before its release; its
one line names no record and no size. If the loss computes every example from itself alone, as a guarantee assumes,
there is never a refusal, whatever the records, except for rounding beyond what the comparison allows. So the check
reveals nothing about them. For any other loss no guarantee holds. That it was refused at this step, and not at another,
may then depend on the draw, but the run has ended.

What a guarantee rests on is said before the first draw, from the few records of the probe. A later line would tell
which draw first held a record of some kind. So a loss is refused like one that mixes records if, for some records, it
draws other kinds of numbers than for the probed ones, or works in another precision.

Limits: the check misses mixing that shows at none of the checked attempts. The schedule is public and does not depend
on the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from sordino.accounting.guarantee import CONDITION
from sordino.accounting.ledger import ASSUMPTION, Ledger
from sordino.distributed.team import Team
from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.validation.probing import How, Mode, ProbeFailed, Prober, preserve_randomness
from sordino.validation.randomness import Randomness
from sordino.validation.trial import Finding, Rows, Swap, Trial

SUMMED = 4
"""How many examples' gradients are compared; losses are compared for all that are watched."""

THOROUGH = 2
"""At this many attempts everything is compared: also at the second, as a head of zeros gives equal losses at first."""

UNSLICEABLE = "no examples mix in the batches of your loader, which cannot be taken apart"
"""What must hold if it could not be checked: the guarantee says so in its headline."""

SEEN = "seen in a draw, which is paid for and was not released"

OTHERWISE = (
    "for some records the loss uses half precision, or a random number that they share, and for those that were probed "
    "it did not, so that no guarantee says so: draw the same kinds of numbers, in the same precision, for all records"
)

IN_ANY_COMPANY = "in half precision, what is computed for a record does not depend in any digit on those beside it"
"""What a guarantee rests on if half precision was seen, or nobody looked: docs/proofs/rounding.md."""

HALF_IN_LOOP = f"where a loop of your own works {IN_ANY_COMPANY}"
"""What it rests on in a user's loop, whose losses nobody sees before the first draw: autocast may be around them."""

ONE_COIN = "a coin that all records of one pass share, as LayerDrop's, falls the same way however a draw is split"
"""What a guarantee rests on if such a coin was seen: one more record may move others into the next microbatch."""


def list_assumptions(randomness: Randomness) -> tuple[str, ...]:
    """List what a guarantee rests on if a loss was seen to draw such numbers and to work in such precision."""
    seen = ((randomness.halved, IN_ANY_COMPANY), (randomness.common, ONE_COIN))
    return tuple(line for was, line in seen if was)


class Watch:
    """Counts attempts, checks some of their batches, and lets all processes refuse together.

    If a selector `evaluates` the model in eval mode, and its price relies on that, this mode is checked too.
    """

    def __init__(self, evaluates: bool = False) -> None:
        self.modes: tuple[Mode, ...] = ("given", "eval") if evaluates else ("given",)
        self.random = False  # what the probe saw of the loss
        self.attempts = 0
        self.unchecked: tuple[str, ...] = ()
        self._assumed: dict[str, None] = {}
        self._finding: Finding | None = None
        self._waiting = False

    @property
    def due(self) -> bool:
        """Whether this attempt is checked: those with powers of two are."""
        return self.attempts > 0 and self.attempts & (self.attempts - 1) == 0

    def begin(self) -> None:
        """Begin another attempt."""
        self.attempts += 1
        self._waiting, self._finding = self.due, None

    def look(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> None:
        """Examine the first part of a draw, if it is due; a finding waits for `settle`."""
        if not self._waiting or batch.size < 2:
            return
        self._waiting = False
        if not batch.sliceable and batch.regroup is None:
            self.unchecked = (UNSLICEABLE,)
            return
        try:
            with preserve_randomness(objective) as seed:
                start = int(torch.randint(2**31, ())) + self.attempts
                seed(start)
                names = {id(p): name for name, p in objective.named_parameters()}
                prober = Prober(objective, [names[id(p)] for p in parameters], seed, light=True)
                hows = (How(mode, start) for mode in self.modes)
                found = (self._examine(prober, batch, how) for how in hows)
                self._finding = next(filter(None, found), None)
        except ProbeFailed as failure:
            self._finding = replace(Finding.of(failure), cause=None)  # only its words go to other processes

    def _examine(self, prober: Prober, batch: Batch, how: How) -> Finding | None:
        """Examine a random half of the examples by themselves and, unless that is enough, among copies of one."""
        thorough = self.attempts <= THOROUGH
        order = torch.randperm(batch.size)
        watched: list[int] = order[: (batch.size + 1) // 2].sort().values.tolist()
        places = torch.full((batch.size,), int(order[0]))
        places[watched] = torch.tensor(watched)
        trial = Trial(prober, _regroup(batch, range(batch.size)))
        summed = tuple(watched[-SUMMED:]) if thorough else ()
        alone = replace(how, shared=True)
        here = trial.reference(alone, summed).randomness
        self._assumed.update(dict.fromkeys(list_assumptions(here)))
        alike = trial.agrees(_regroup(batch, watched), [(i, n) for n, i in enumerate(watched)], alone, summed)
        if alike and (here.masks or not (here.used or here.known)):
            return None
        found = None
        if thorough or here.used:
            swap = Swap(_regroup(batch, places.tolist()), tuple(watched), summed)
            found = next(trial.judge(swap, how), None)
        if not alike and (thorough or not here.used):
            found = found or next(trial.judge_alone(lambda some: _regroup(batch, some), tuple(watched), how), None)
        return found

    def settle(self, team: Team, ledger: Ledger) -> None:
        """Refuse on all processes what any of them found: once per attempt, before anything is released.

        If something could not be checked, this is written into the ledger, so that every guarantee about it says so.
        It depends only on the loader and the form of its batches.
        """
        if not self.due:
            return
        everybody = team.gather((self._finding, self.unchecked, tuple(self._assumed)))
        for finding, _, _ in everybody:
            if finding is not None:
                raise UnsupportedModel(f"{finding.message} ({SEEN})")
        for line in dict.fromkeys(line for _, unchecked, _ in everybody for line in unchecked):
            ledger.declare(CONDITION, line)
            ledger.declare(ASSUMPTION, IN_ANY_COMPANY)  # nothing says otherwise
        said = ledger.declared(ASSUMPTION)
        if any(line not in said for *_, assumed in everybody for line in assumed):
            raise UnsupportedModel(f"{OTHERWISE} ({SEEN})")


def _regroup(batch: Batch, places: Sequence[int]) -> Rows:
    if batch.sliceable:
        return Rows(batch.data, batch.size).take(places)
    assert batch.regroup is not None
    return Rows(batch.regroup(places), len(places))
