"""Finds where the examples are in the output of every use: followed there, or proven by backward passes.

What `following` cannot follow is proven by backward passes of differently weighted losses. Backward passes are linear:
where a row of a gradient belongs to example i alone, weighting the losses by c multiplies it by c_i. With powers of two
for weights it does so without any rounding, so a few passes tell every example from every other one, and whatever a
wrong layout, or a loss that mixes examples, gets from another example shows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sordino.gradients.bookkeeping.places import Place, place_of
from sordino.gradients.bookkeeping.recording import Recording, Use
from sordino.gradients.engine import Groups
from sordino.gradients.rules.base import Kind, Layout, NoRule, Owners, Unproven, list_layouts

_log = logging.getLogger("sordino")

DIGIT_BITS = 5
"""Each pass tells 32 kinds of examples apart, by weights 1 … 2**31; half precision has room for weights 1 and 2."""

EXACT = 1e-5
"""Relative difference that counts as equal: powers of two leave none, but some devices add up in any order."""


class SharedCalls(Exception):
    """Some operations on constants looked like one row per example and are shared by all; run again with `calls`."""

    def __init__(self, calls: frozenset[tuple[int, str]]) -> None:
        super().__init__(f"operations {sorted(calls)} are shared by all examples")
        self.calls = calls


@dataclass
class Knowledge:
    """What earlier batches of one objective have shown: layouts by the trace of the loss. A loss is traced from the
    first time that its examples could not be followed. Once a batch was `kept`, what fails is about other
    batches, whose records and sizes are private.
    """

    proven: dict[tuple[object, ...], list[Layout | None]] = field(default_factory=dict)
    shared: frozenset[tuple[int, str]] = frozenset()
    told: set[str] = field(default_factory=set)
    refused: str = ""
    traced: bool = False
    bypassed: bool = False
    differentiates: bool = False
    kept: bool = False

    def tell(self, warning: str) -> None:
        """Log a warning once."""
        if warning not in self.told:
            self.told.add(warning)
            _log.warning(warning)


def arrange(recording: Recording, losses: Tensor, knowledge: Knowledge) -> None:
    """Give every use its layout: followed, proven now, or from an earlier batch on which the loss did exactly the same.

    What backward passes prove of a batch is right for that batch, whichever of the layouts that remain is taken. It is
    right for others if only one remains, was seen at work, and nothing was arranged by the values of data.
    """
    size, uses, trace = len(losses), recording.uses, recording.trace
    if size == 1:
        for use in uses:
            (use.layout,) = list_layouts(use.shape, size, use.batch_dims)
        return
    if arrange_followed(recording, losses):
        return
    # Without a trace, or if something that no mode sees made the losses, nothing is known of any other batch; nor if an
    # operation worked across the examples: it may be a product with a permutation that the data chose.
    crossed = recording.follower is not None and recording.follower.crossed
    known = trace is not None and trace.origin(losses) is not None and not trace.reorders and not crossed
    knowledge.traced = True
    key = (*((use.name, use.call, use.batch_dims) for use in uses), *(trace.key(size) if trace is not None else ()))
    if not known or key not in knowledge.proven:
        probe = Probe({id(use): list_layouts(use.shape, size, use.batch_dims) for use in uses}, size)
        probe.run(recording, losses)
        layouts = [probe.layout(use) for use in uses]
        misplaced = [use for use in uses if not probe.left[id(use)]]
        if misplaced:
            refuse_or_share(misplaced, size, recording.recomputes)
        lasting = known and all(probe.is_certain(use) for use in uses)
        if probe.spoiled and not lasting:
            raise Unproven("gradients that are not finite hide where the examples are")
        if lasting and not probe.spoiled:
            knowledge.proven[key] = layouts
    else:
        layouts = knowledge.proven[key]
    for use, layout in zip(uses, layouts, strict=True):
        use.layout = layout


def arrange_followed(recording: Recording, losses: Tensor) -> bool:
    """Give every use the layout that was found by following the examples from it to the losses.

    A use without a place is not on the way to the losses: no gradient will come to it.
    """
    follower = recording.follower
    if follower is None or not follower.reaches(losses):
        return False
    for use in recording.uses:
        use.layout = None if use.place is None else use.place.layout(len(losses), losses.device)
    return True


def regroup(uses: list[Use], groups: Groups) -> None:
    """The same uses, with units in the place of the examples that they own.

    Entry e of a dimension belongs to example ``(e // inner) % examples``. Where every unit owns `many` examples, one
    after the other, it belongs to unit ``(e // (inner * many)) % units``; otherwise each entry is told its owner.
    """
    examples, many = len(groups.owners), int(groups.counts[0])
    even = bool((groups.counts == many).all())
    known: dict[tuple[int, int], Owners] = {}

    def join(place: Place) -> Layout:
        if even and place.owners is None:
            return Place(place.dim, place.outer, place.inner * many).layout(groups.size, groups.owners.device)
        found = None if place.owners is not None else known.get((place.outer, place.inner))
        if found is None:
            found = Owners(groups.owners[place.list_owners(examples, groups.owners.device)], groups.size)
        if place.owners is None:
            known[place.outer, place.inner] = found
        return Layout(Kind.OWNED, place.dim, found)

    for use in uses:
        if use.layout is not None:
            whole = groups.size == 1
            use.layout = Layout(Kind.WHOLE) if whole else join(place_of(use.layout, use.shape, examples))


def refuse_or_share(misplaced: list[Use], size: int, recomputes: bool) -> None:
    """An operation on no activation may be shared by all examples; anything else mixes examples.

    What is made of the former's result is shared with it, if that has no room for one row per example.
    """
    if recomputes:
        raise NoRule(f"{misplaced[0].name}: shared by all examples in a model with checkpoints")
    closed, mixed = ([use for use in misplaced if use.closed is wanted] for wanted in (True, False))
    if mixed:
        closed = [use for use in closed if not list_layouts(use.shape, size, use.batch_dims)]
    if not closed:
        dims = len(mixed[0].shape)
        raise NoRule(f"{mixed[0].name}: none of the {dims} dimensions of its output holds one example each")
    raise SharedCalls(frozenset((use.call, use.name) for use in closed))


@dataclass
class Probe:
    """Layouts still possible for each use, after backward passes whose losses are weighted by powers of two."""

    left: dict[int, list[Layout]]
    size: int
    plain: dict[int, Tensor] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    spoiled: bool = False
    weights: Tensor | None = None

    def run(self, recording: Recording, losses: Tensor) -> None:
        """One pass with equal weights, then one for each digit of the examples' numbers."""
        recording.on_gradient = self.receive
        recording.backward(losses.sum(), retain_graph=True)
        self.reached = set(self.plain)
        narrow = any(g.dtype == torch.float16 for g in (losses, *self.plain.values()))
        bits = 1 if narrow else DIGIT_BITS
        numbers = torch.arange(self.size, device=losses.device)
        while bool(numbers.any()):
            self.weights = torch.exp2(numbers % 2**bits).to(losses.dtype)
            recording.backward((losses * self.weights).sum(), retain_graph=True)
            numbers = numbers >> bits
        self.plain.clear()

    def receive(self, use: Use, gradient: Tensor) -> None:
        gradient = gradient.detach()
        if self.weights is None:
            self.plain[id(use)] = gradient.clone()
            return
        if gradient.numel() == 0:
            return
        plain = self.plain[id(use)]
        finite = torch.isfinite(gradient) & torch.isfinite(plain)
        self.spoiled = self.spoiled or not bool(finite.all())
        gradient, plain = gradient.where(finite, 0), plain.where(finite, 0)
        possible = [layout for layout in self.left[id(use)] if self.explains(layout, plain, gradient)]
        self.left[id(use)] = possible
        if possible and self.shows_all(possible[0], plain, finite):
            self.seen.add(id(use))

    def explains(self, layout: Layout, plain: Tensor, weighted: Tensor) -> bool:
        """Whether every entry was multiplied by the weight of the example that it belongs to."""
        assert self.weights is not None
        mine, theirs = layout.first(plain, self.size), layout.first(weighted, self.size)
        weights = self.weights.to(mine.dtype).reshape(-1, *[1] * (mine.dim() - 1))
        wanted = mine * weights
        return bool(((theirs - wanted).abs() <= EXACT * wanted.abs() + smallest(plain) * weights).all())

    def shows_all(self, layout: Layout, plain: Tensor, finite: Tensor) -> bool:
        """Whether every example has a gradient here, finite or not: silent ones would let a wrong layout pass."""
        entries = layout.first(plain, self.size).reshape(self.size, -1).abs()
        spoiled = ~layout.first(finite, self.size).reshape(self.size, -1).all(1)
        return bool(((entries.amax(1) > 2 * smallest(plain)) | spoiled).all())

    def layout(self, use: Use) -> Layout | None:
        """Any layout that remains; none for a use that no gradient reached."""
        return self.left[id(use)][0] if id(use) in self.reached and self.left[id(use)] else None

    def is_certain(self, use: Use) -> bool:
        """Whether one layout alone explains gradients of every example, or none ever come."""
        return id(use) not in self.reached or (id(use) in self.seen and len(self.left[id(use)]) == 1)


def smallest(gradient: Tensor) -> float:
    """Smaller values may have lost digits, or everything, to underflow on the way."""
    return 2.0**-20 if gradient.dtype == torch.float16 else 2.0**-106
