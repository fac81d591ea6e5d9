"""What is kept of one batch: every parameter's per-example gradients in implicit form, and their squared norms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping.recording import Recording, Tracked, Use
from sordino.gradients.bookkeeping.unseen import UNSEEN, sum_all
from sordino.gradients.engine import FullPrecision, accumulation_dtype, choose_weights
from sordino.gradients.looped import refuse_reentrant
from sordino.gradients.rules.base import Examples, Kind, Layout, NoRule, PerExample
from sordino.gradients.rules.combined import Summed, combine
from sordino.gradients.rules.formulas import find_rows
from sordino.gradients.rules.pulled import WayBack, pull_back
from sordino.gradients.rules.recurrent import OVER_TIME
from sordino.gradients.rules.stretched import stretch_kept
from sordino.gradients.stretch import Stretches
from sordino.gradients.vmapped import InChunks, choose_microbatch


class Book:
    """One batch after the backward pass (`engine.Differentiated`).

    A parameter with one use is measured as soon as its gradient arrives, so that what is no longer needed is freed
    during the backward pass; parameters with several uses are measured at the end, with their cross terms, and so are
    all where `blocks` are measured apart. Gradients that `stretches` has maps for are stretched first. `layout`
    overrules what was found about the uses.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        recording: Recording,
        size: int,
        layout: Layout | None = None,
        blocks: Sequence[int] | None = None,
        stretches: Stretches | None = None,
    ) -> None:
        self.parameters, self.recording, self.size, self.layout = parameters, recording, size, layout
        precise = any(p.dtype == torch.float64 for p in parameters)
        device = parameters[0].device if parameters else None
        self.squares = torch.zeros(size, dtype=torch.float64 if precise else torch.float32, device=device)
        self.blocks = blocks
        self.block_squares = self.squares.new_zeros(0 if blocks is None else max(blocks) + 1, size)
        self.precisely = FullPrecision(self.squares.device)
        self.kept: dict[int, list[PerExample]] = defaultdict(list)
        self.wanted = {id(p) for p in parameters}
        maps = [None] * len(parameters) if stretches is None else stretches.maps
        self.maps = {id(p): by for p, by in zip(parameters, maps, strict=True) if by is not None}
        self.single = self._find_single() if blocks is None else set()
        self.totals: list[PerExample | None] = []
        self.unseen: dict[int, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        self.bytes, self.recurrent = 0, False
        self.watch: Callable[[Use, Tensor, PerExample], None] = lambda use, parameter, kept: None

    def _find_single(self) -> set[int]:
        """Tracked tensors whose one use is all there is of their parameter, or a piece apart from all other uses."""
        uses: dict[int, int] = defaultdict(int)
        for use in self.recording.uses:
            for share in use.shares:
                uses[id(share.parameter)] += 1
        alone: set[int] = set()
        for parameter, made in zip(self.parameters, self.made_from(uses), strict=True):
            if id(parameter) in self.maps and any(each.handle is not parameter for each in made):
                continue  # what was made from it must be put together before it can be stretched
            if are_apart(made) and all(uses[id(each.handle)] == 1 for each in made):
                alone.update(id(each.handle) for each in made)
        return alone

    def made_from(self, keys: Iterable[int]) -> list[list[Tracked]]:
        """For each parameter, what was made from it among these tracked tensors, itself included."""
        made: dict[int, list[Tracked]] = defaultdict(list)
        for key in keys:
            for root in self.recording.tracked[key].roots:
                made[id(root)].append(self.recording.tracked[key])
        return [made[id(parameter)] for parameter in self.parameters]

    def receive(self, use: Use, gradient: Tensor) -> None:
        """The gradient of a use's output: settle what it means for its parameters and let go of the rest."""
        use.unchanged()
        unseen = use.name == UNSEEN
        if unseen and self.layout is not None:
            return  # one example: autograd has its gradient
        self.bytes += gradient.numel() * gradient.element_size()
        self.recurrent |= use.name in OVER_TIME
        layout = self.layout or use.layout
        if layout is None:
            raise NoRule(f"{use.name}: a gradient came where none came before")
        at = Examples(layout, self.size)
        with torch.no_grad(), self.precisely:
            for share in use.shares:
                if not any(id(root) in self.wanted for root in self.recording.tracked[id(share.parameter)].roots):
                    continue
                assert share.parameter is not None
                kept = share.settle(gradient, at)
                self.watch(use, share.parameter, kept)
                self.kept[id(share.parameter)].append(kept)
                if unseen:
                    whole = sum_all(kept, torch.ones_like(self.squares))
                    self.unseen[id(share.parameter)] = self.unseen[id(share.parameter)] + whole
                if id(share.parameter) in self.single:
                    if (by := self.maps.get(id(share.parameter))) is not None:
                        kept = stretch_kept(kept, by)
                        self.kept[id(share.parameter)] = [kept]
                    kept.stand_alone()
                    self.squares += kept.squared_norms()
        if not self.recording.lenient:
            use.shares, use.versions = [], []

    def close(self) -> Book:
        """After the backward pass: measure the parameters with several uses."""
        with torch.no_grad(), self.precisely:
            combined = {key: combine(parts) for key, parts in self.kept.items()}
            ways = {key: self._find_way(self.recording.tracked[key]) for key in combined}
            pairs = zip(self.parameters, self.made_from(combined), strict=True)
            for place, (parameter, made) in enumerate(pairs):
                total = combine_pieces(parameter, made, combined, ways)
                measured = all(id(each.handle) in self.single for each in made)
                if total is not None and not measured and (by := self.maps.get(id(parameter))) is not None:
                    total = stretch_kept(total, by)
                self.totals.append(total)
                if total is not None and not measured:
                    total.stand_alone()
                    found = total.squared_norms()
                    self.squares += found
                    if self.blocks is not None:
                        self.block_squares[self.blocks[place]] += found
        self.kept.clear()
        self.recording.ignore()  # or the two would hold each other, and what was kept, until the garbage collector
        return self

    def _find_way(self, made: Tracked) -> WayBack:
        parameters = [root for root in made.roots if id(root) in self.wanted]
        rows = find_rows(made.handle, parameters, self.recording.tracked) if made.path is None else None
        return WayBack(made.attached, parameters, rows)

    @property
    def isolated(self) -> bool:
        """Whether a bad example touched only its own norm: one alone has touched no other.

        Gradients are kept apart, but losses may share a number without one: 0 · NaN makes all of them bad.
        """
        return self.finite or int(torch.isfinite(self.squares).sum()) >= self.size - 1

    @cached_property
    def finite(self) -> bool:
        """Whether every example's norm is a number; asked once, because a device has to be waited for."""
        return math.isfinite(self.squares.sum().item())  # a finite sum has no term that is not

    @property
    def norms(self) -> Tensor:
        return self.squares.clamp_min(0).sqrt()

    @property
    def block_norms(self) -> Tensor:
        return self.block_squares.clamp_min(0).sqrt()

    def weighted_sum(self, weights: Tensor) -> Iterator[Tensor]:
        """One at a time, so that nobody needs to hold a second set of sums as large as the network."""
        bad, some_bad, all_bad = weights, False, False
        if not self.finite:
            unused = weights == 0 if self.blocks is None else (weights == 0).all(0)
            bad = ~torch.isfinite(self.squares) & unused
            some_bad, all_bad = bool(bad.any()), bool(bad.all())
        for place, (parameter, total) in enumerate(zip(self.parameters, self.totals, strict=True)):
            if total is None or all_bad:  # a way back that is not finite makes no zeros of zeros
                yield torch.zeros_like(parameter, dtype=accumulation_dtype(parameter), requires_grad=False)
                continue
            with torch.no_grad(), self.precisely:
                finite = total.without(bad) if some_bad else total
                own = choose_weights(weights, self.blocks, place)
                found = finite.weighted_sum(own).to(accumulation_dtype(parameter))
            yield found


def are_apart(made: list[Tracked]) -> bool:
    """Whether these are one tensor, or different pieces of cuts of one parameter, rearranged at most."""
    if any(each.path is None for each in made):
        return False
    return all(left.apart_from(right) for i, left in enumerate(made) for right in made[:i])


def combine_pieces(
    parameter: Tensor, made: list[Tracked], combined: dict[int, PerExample], ways: dict[int, WayBack]
) -> PerExample | None:
    """A parameter's gradients from all tensors that were made from it, itself included."""
    parts = [
        combined[id(each.handle)]
        if each.handle is parameter
        else pull_back(combined[id(each.handle)], ways[id(each.handle)], parameter, each.path is not None)
        for each in made
    ]
    if len(parts) < 2:
        return parts[0] if parts else None
    return Summed(parts, are_apart(made))


class OneByOne:
    """A recorded loss vector (`engine.Differentiated`) that cannot be book-kept whole: one backward pass per example.

    In the backward pass of one loss every recorded output belongs to one example, so rules need no layout; parameters
    that were left to autograd get their gradients from it.
    """

    def __init__(self, recording: Recording, losses: Tensor, parameters: list[nn.Parameter]) -> None:
        refuse_reentrant(losses)
        self.recording, self.losses, self.parameters = recording, losses, parameters
        self.rows = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
        self.gradients = InChunks(len(losses), choose_microbatch(parameters), self.compute)
        self.norms = self.gradients.norms

    def compute(self, chunk: range) -> list[Tensor]:
        """[examples, *shape] for each parameter."""
        if not self.losses.requires_grad:
            return [torch.zeros(len(chunk), *p.shape, dtype=p.dtype, device=p.device) for p in self.parameters]
        with torch.autocast(self.losses.device.type, enabled=False):
            each = [self.gradient(row) for row in self.rows[chunk.start : chunk.stop]]
        return [torch.stack(column) for column in zip(*each, strict=True)]

    def gradient(self, row: Tensor) -> list[Tensor]:
        """The gradient of the loss that `row` of the identity picks, by one backward pass."""
        book = Book(self.parameters, self.recording, 1, Layout(Kind.WHOLE))
        self.recording.on_gradient = book.receive
        made = [each.handle for each in self.recording.tracked.values() if each.handle is not each.attached]
        inputs = [*self.parameters, self.recording.anchor, *made]
        left = torch.autograd.grad(self.losses, inputs, row, retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in left[len(self.parameters) + 1 :]):
            raise NoRule("autograd.Function: a tensor made from parameters is used by a custom function")
        kept = book.close().weighted_sum(torch.ones(1, device=row.device))
        pairs = zip(kept, left, strict=False)
        return [mine if theirs is None else mine + theirs.to(accumulation_dtype(theirs)) for mine, theirs in pairs]

    @property
    def isolated(self) -> bool:
        """Whether every example is finite; in a graph of the user's a NaN reaches the other examples' gradients."""
        return bool(torch.isfinite(self.norms).all())

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        return self.gradients.weighted_sum(weights)
