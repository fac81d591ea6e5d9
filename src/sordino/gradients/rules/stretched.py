"""Stretched gradients without forming them: L (Gᵀ X) R = (G L)ᵀ (X R), so that a rule's factors are stretched instead.

Norms and weighted sums are of the same stretched factors. To stretch the finished sum would be cheaper, but a map may
lengthen what rounding left in one direction a thousand times more than the gradient itself.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from sordino.gradients.rules.base import Formed, PerExample
from sordino.gradients.rules.combined import Summed
from sordino.gradients.rules.conv import Convolved
from sordino.gradients.rules.embedding import Bagged, Looked
from sordino.gradients.rules.linear import FORM_BYTES, Outer
from sordino.gradients.stretch import Stretch, stretch_rows


def stretch_kept(kept: PerExample, by: Stretch) -> PerExample:
    """The stretched gradients, in the form in which they cost least."""
    if isinstance(kept, Outer) and kept.formed is None:
        of_x, of_g = (by.left, by.right) if kept.transposed else (by.right, by.left)
        return Outer(stretch_rows(kept.x, of_x), stretch_rows(kept.g, of_g), kept.transposed)
    if isinstance(kept, Summed):
        return Summed([stretch_kept(part, by) for part in kept.parts])
    if isinstance(kept, Formed):
        return Formed(by.apply(kept.gradients))
    if isinstance(kept, Looked | Bagged) and (by.left is None or by.left.dim() == 1):
        return _stretch_tokens(kept, by)
    if isinstance(kept, Convolved) and kept.formed is None and kept.geometry.groups == 1 and not kept.depthwise:
        return StretchedConvolution(kept, by)
    return StretchedForms(kept, by)


def _stretch_tokens(kept: Looked | Bagged, by: Stretch) -> PerExample:
    """Rows of a table: each token's own factor, and the map of its vector."""
    g = stretch_rows(kept.g, by.right)
    scales = None if by.left is None else by.left.to(g.dtype)[kept.tokens]
    if isinstance(kept, Looked):
        return Looked(kept.tokens, g if scales is None else g * scales.unsqueeze(-1), kept.shape[0])
    coefficients = kept.coefficients if scales is None else kept.coefficients * scales
    return Bagged(kept.tokens, coefficients, g, kept.shape[0])


class StretchedConvolution(Convolved):
    """A convolution's gradients from stretched patches and stretched output gradients."""

    def __init__(self, plain: Convolved, by: Stretch) -> None:
        super().__init__(plain.x, plain.g, plain.shape, plain.geometry)
        self.by = by
        self.plain: Convolved | None = plain
        self.channels_last = False  # the map knows patches as the weight has them

    @property
    def side_by_side(self) -> bool:
        return False  # its patches are stretched

    def factors(self, start: int, stop: int, as_weight: bool = False) -> tuple[Tensor, Tensor]:
        patches, g = super().factors(start, stop, as_weight)
        return stretch_rows(patches, self.by.right), stretch_rows(g.mT, self.by.left).mT

    def form_all(self) -> Tensor:
        assert self.plain is not None
        formed, self.plain = self.by.apply(self.plain.form_all()), None  # its factors are let go of
        return formed

    def mass(self) -> Tensor:
        return super().mass() if self.formed is not None else self.by.gain * super().mass()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.formed is not None:
            return self.formed.weighted_sum(weights)
        total = self.g.new_zeros(self.shape[0], prod(self.shape[1:]))
        for start, stop in self.ranges():
            patches, g = self.factors(start, stop)
            scaled = g * weights[start:stop].to(g.dtype).reshape(-1, 1, 1, 1)
            total += scaled.movedim(2, 0).flatten(1) @ patches.flatten(0, 2)
        return total.reshape(self.shape)

    def without(self, bad: Tensor) -> PerExample:
        if self.formed is not None:
            return self.formed.without(bad)
        assert self.plain is not None
        plain = self.plain.without(bad)
        assert isinstance(plain, Convolved)
        return StretchedConvolution(plain, self.by)


class StretchedForms(PerExample):
    """Gradients of any other kind, formed and then stretched: kept where that is little, else a block at a time."""

    def __init__(self, plain: PerExample, by: Stretch) -> None:
        self.plain, self.by = plain, by
        self.size, self.shape = plain.size, plain.shape
        self.formed: Formed | None = None

    @property
    def manner(self) -> str:
        return f"{self.plain.manner}, formed and stretched"

    def squared_norms(self) -> Tensor:
        if 4 * self.size * self.shape.numel() > FORM_BYTES:
            return self.measure_formed()
        if self.formed is None:
            self.formed = Formed(self.form(0, self.size))
            self.plain = self.formed
        return self.formed.squared_norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.sum_formed(weights) if self.formed is None else self.formed.weighted_sum(weights)

    def form(self, start: int, stop: int) -> Tensor:
        return self.by.apply(self.plain.form(start, stop)) if self.formed is None else self.formed.form(start, stop)

    def without(self, bad: Tensor) -> PerExample:
        return StretchedForms(self.plain.without(bad), self.by) if self.formed is None else self.formed.without(bad)
