"""How good a model is: losses on a draw, and the difference that a proposal makes to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.gradients.engine import FullPrecision
from sordino.records import Records
from sordino.sampling import Draw, Poisson

if TYPE_CHECKING:
    from sordino.selection.rollback import Rollback
    from sordino.step import Attempt, Bench

AT_ONCE = 1024
"""Losses without gradients need little memory: more examples at once than an engine takes."""

Array = NDArray[np.float64]


def validation_draw(attempt: Attempt, rate: float) -> Draw:
    """A fresh Poisson draw of the private records, independent of the one that made the proposal."""
    bench = attempt.bench
    return Poisson(rate).draw(bench.records.count, bench.source, bench.memory)


def losses(bench: Bench, records: Records, indices: Tensor) -> Tensor:
    """One loss per record of the model as it stands, in eval mode, in float64; each process computes its part.

    Autocast around the step is off and products are in full float32: coarser ones round a record's loss in another way
    in another company.
    """
    size = bench.microbatch or AT_ONCE
    found = torch.zeros(len(indices), dtype=torch.float64)
    mine = torch.arange(len(indices))[bench.team.own(len(indices))]
    with torch.no_grad(), FullPrecision(bench.device), evaluating(bench.objective.model):
        for part in mine.split(size) if len(mine) else ():
            batch = records.fetch(indices[part], bench.device)
            found[part] = bench.objective.losses(batch.data, batch.size).double().cpu()
    return bench.team.sum([found])[0]


def difference(
    before: Rollback, bench: Bench, records: Records, indices: Tensor, record_clip: float = math.inf
) -> float:
    """The sum of loss(proposed) − loss(before), both on the same records (DPSUR, Alg. 2, lines 10-11).

    Each record's own difference is clipped to ±`record_clip`, so that one record moves the sum by no more.
    Edge cases: no records make 0; a record whose loss was not finite before counts 0; where the proposal makes a loss
    NaN the difference is +∞.
    """
    proposed = losses(bench, records, indices)
    with before.in_place():
        current = losses(bench, records, indices)
    worse = torch.nan_to_num(proposed, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) - current
    each = torch.where(torch.isfinite(current), worse, torch.zeros_like(worse)).clamp(-record_clip, record_clip)
    total = float(each.sum())
    return total if total == total else float("inf")


def bounded(energy: Array, clip: float) -> Array:
    """Clip to ±C_v: whatever the records, the result moves by at most 2·C_v (DPSUR, Alg. 2, line 12)."""
    return np.clip(energy, -clip, clip)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and with every module's mode as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
