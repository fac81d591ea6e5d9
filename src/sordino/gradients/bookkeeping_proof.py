"""Proves where the examples are in the output of every use, by backward passes of single examples' losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sordino.gradients.bookkeeping_layout import Examples, Layout, candidates
from sordino.gradients.recording import Recording, Use
from sordino.gradients.rules.base import NoRule

PATIENCE = 8
"""Batches in which a use may have an all-zero gradient (a zero-initialised layer) before its guess is accepted."""


class Shared(Exception):
    """Some operations on constants looked like one row per example and are shared by all; run again with `calls`."""

    def __init__(self, calls: frozenset[int]) -> None:
        super().__init__(f"operations {sorted(calls)} are shared by all examples")
        self.calls = calls


@dataclass
class Knowledge:
    """What earlier batches of one objective have shown."""

    proven: dict[tuple[object, ...], list[Layout]] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()
    attempts: int = 0
    told: set[str] = field(default_factory=set)
    refused: str = ""


def arrange(recording: Recording, losses: Tensor, knowledge: Knowledge) -> None:
    """Give every use its layout: known from earlier batches, or guessed from shapes and proven now."""
    size, uses = len(losses), recording.uses
    key = tuple(use.key for use in uses)
    known = knowledge.proven.get(key)
    if size > 1 and known and all(layout.fits(use.shape, size) for layout, use in zip(known, uses, strict=True)):
        for use, layout in zip(uses, known, strict=True):
            use.layout = layout
        return
    probe = Probe({id(use): candidates(use.shape, size, use.batch_dims) for use in uses}, size)
    if size > 1:
        probe.run(recording, losses)
    misplaced = [use for use in uses if not probe.left[id(use)]]
    if misplaced and recording.recomputes:
        raise NoRule(f"{misplaced[0].name}: shared by all examples in a model with checkpoints")
    if misplaced:
        refuse_or_share(misplaced)
    for use in uses:
        use.layout = probe.left[id(use)][0]
    knowledge.attempts += 1
    if size > 1 and (all(id(use) in probe.seen for use in uses) or knowledge.attempts >= PATIENCE):
        knowledge.proven[key] = [probe.left[id(use)][0] for use in uses]


def refuse_or_share(misplaced: list[Use]) -> None:
    """An operation on no activation may be shared by all examples; anything else mixes examples."""
    mixed = [use for use in misplaced if not use.closed]
    if mixed:
        raise NoRule(f"{mixed[0].name}: no dimension of its output {tuple(mixed[0].shape)} holds one example each")
    raise Shared(frozenset(use.call for use in misplaced))


@dataclass
class Probe:
    """Layouts still possible for each use, and the uses whose gradients were seen to be non-zero."""

    left: dict[int, list[Layout]]
    size: int
    seen: set[int] = field(default_factory=set)
    example: int = 0

    def run(self, recording: Recording, losses: Tensor) -> None:
        """One backward pass each for the loss of the last and of a middle example."""
        recording.on_gradient = self.receive
        for example in sorted({self.size - 1, self.size // 2}):
            self.example = example
            recording.backward(losses[example], retain_graph=True)

    def receive(self, use: Use, gradient: Tensor) -> None:
        gradient = gradient.nan_to_num(nan=0.0)
        if gradient.count_nonzero():
            self.seen.add(id(use))
        possible = [each for each in self.left[id(use)] if Examples(each, self.size).owns_only(gradient, self.example)]
        self.left[id(use)] = possible
