"""Rejected gradients that were paid for in full help the next proposal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sordino.step import Attempt

_KEPT = "selection.rejected_gradients"


def average_with_rejected(attempt: Attempt) -> None:
    """Make the released gradient the mean of it and of all that were rejected at this very model.

    Post-processing of releases that the ledger holds: it costs nothing, and k of them have 1/k of the variance.
    """
    memory, parameters = attempt.bench.memory, attempt.parameters
    released = [parameter.grad for parameter in parameters]
    fresh: list[Tensor] = [gradient.detach().clone() for gradient in released if gradient is not None]
    sums, count = memory.get(_KEPT, (None, 0))
    if sums is not None and [s.shape for s in sums] == [f.shape for f in fresh]:
        fresh = [total + gradient for total, gradient in zip(sums, fresh, strict=True)]
    else:  # the first at this model, or other parameters are trained now
        count = 0
    memory[_KEPT] = (fresh, count + 1)
    for parameter, total in zip(parameters, fresh, strict=True):
        parameter.grad = total / (count + 1)


def forget_rejected(attempt: Attempt) -> None:
    """The model moves on: gradients at the old one are of no use."""
    attempt.bench.memory.pop(_KEPT, None)
