"""Second moments of what a model's parameters see, found by the rules of book-keeping, and the maps that even them out.

The gradient of a matrix is a sum of outer products of output gradients g and inputs x. Kronecker-factored curvature
(Martens and Grosse 2015) describes its second moments by those of the two, G = E[g gᵀ] and A = E[x xᵀ], x being a patch
in a convolution. L = (G + γ)^(−1/2) and R = (A + γ)^(−1/2) make L M R about as long in every direction.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from math import prod

import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping.recording import Use
from sordino.gradients.rules.base import PerExample, precise
from sordino.gradients.rules.conv import Convolved
from sordino.gradients.rules.embedding import Bagged, Looked
from sordino.gradients.rules.linear import Outer
from sordino.gradients.stretch import Stretch
from sordino.noise import widen

LARGEST = 2048
"""Sides longer than this have the mean square of every entry instead of a matrix of moments."""

MOST = 100.0
"""Whole parameters become longer or shorter by at most this factor: gradients that are only rounding, as of a key's
bias in attention, must stay small."""


class Side:
    """Moments along one side of a matrix: a matrix, or its diagonal; every use counts alike, whatever its scale."""

    def __init__(self, length: int, diagonal: bool = False) -> None:
        self.length, self.diagonal = length, diagonal or length > LARGEST
        self.total, self.uses = torch.zeros((length,) if self.diagonal else (length, length), dtype=torch.float64), 0

    def add(self, rows: Tensor) -> None:
        """The moments of [..., length]."""
        flat = precise(rows).reshape(-1, self.length)
        self.add_moments(flat.square().sum(0) if self.diagonal else flat.T @ flat)

    def add_moments(self, moments: Tensor) -> None:
        """A matrix of moments, or mean squares; zeros and values that are not finite count for nothing."""
        moments = widen(moments).cpu()
        squares = moments if moments.dim() == 1 else moments.diagonal()
        mean = float(squares.mean())
        if not (0 < mean < float("inf")):
            return
        if self.total.dim() == 2 and moments.dim() == 1:
            self.total, self.diagonal = self.total.diagonal().clone(), True
        self.total = self.total + (squares if self.total.dim() == 1 else moments) / mean
        self.uses += 1

    def find_root(self, damping: float) -> Tensor | None:
        """c (M + γ)^(−1/2), with M of mean eigenvalue 1 and c such that what has these moments is as long as before."""
        if self.uses == 0:
            return None
        moments = self.total / self.uses
        if moments.dim() == 1:
            scale = (self.length / (moments / (moments + damping)).sum()).sqrt()
            return scale * (moments + damping).rsqrt()
        values, vectors = torch.linalg.eigh(moments)
        values = values.clamp_min(0)
        scale = (self.length / (values / (values + damping)).sum()).sqrt()
        root: Tensor = scale * (vectors * (values + damping).rsqrt()) @ vectors.T
        return root


class Moments:
    """Both sides of every parameter, from all of its uses (`OnUse` of `bookkeeping.keeper`).

    A parameter that is used in another form than its own, such as a slice, is left out.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sides: dict[int, tuple[Side, Side | None]] = {}
        self.squares: dict[int, float] = defaultdict(float)
        for p in parameters:
            if p.dim() == 1:
                self.sides[id(p)] = Side(len(p), diagonal=True), None
            elif p.dim() > 1:
                self.sides[id(p)] = Side(p.shape[0]), Side(prod(p.shape[1:]))

    def __call__(self, use: Use, parameter: Tensor, kept: PerExample) -> None:
        if id(parameter) not in self.sides:
            return
        left, right = self.sides[id(parameter)]
        self.squares[id(parameter)] += float(copy.copy(kept).squared_norms().sum())  # which lets go of its factors
        if right is None:
            for block in kept.blocks():
                left.add(kept.form(*block))
        elif isinstance(kept, Outer):
            rows, columns = (kept.x, kept.g) if kept.transposed else (kept.g, kept.x)
            left.add(rows)
            right.add(columns)
        elif isinstance(kept, Convolved):
            _add_convolution(kept, left, right)
        elif isinstance(kept, Looked | Bagged):
            looked = kept if isinstance(kept, Looked) else kept.looked()
            left.add_moments(torch.bincount(looked.tokens.flatten(), minlength=left.length))
            right.add(looked.g)
        else:
            for block in kept.blocks():
                formed = precise(kept.form(*block)).reshape(-1, left.length, right.length)
                left.add(formed.mT)
                right.add(formed)

    def find_stretches(self, damping: float, balanced: bool = False) -> list[Stretch | None]:
        """One map for each parameter; None if nothing is known about it.

        `balanced` maps also make entries of different parameters about equally long; the whole keeps its length.
        """
        found = [self._find_stretch(p, damping) for p in self.parameters]
        return self._balance(found) if balanced else found

    def _balance(self, found: list[Stretch | None]) -> list[Stretch | None]:
        """Lengths in proportion to the root of the number of entries."""
        known = {
            id(p): self.squares[id(p)]
            for p, by in zip(self.parameters, found, strict=True)
            if by is not None and 0 < self.squares[id(p)] < float("inf")
        }
        entries = sum(p.numel() for p in self.parameters if id(p) in known)

        def find_factor(parameter: nn.Parameter) -> float:
            share = sum(known.values()) * parameter.numel() / entries
            return min(MOST, max(1 / MOST, math.sqrt(share / known[id(parameter)])))

        pairs = zip(self.parameters, found, strict=True)
        return [by if by is None or id(p) not in known else by.scale(find_factor(p)) for p, by in pairs]

    def _find_stretch(self, parameter: nn.Parameter, damping: float) -> Stretch | None:
        sides = self.sides.get(id(parameter), (None, None))
        roots = [None if side is None else side.find_root(damping) for side in sides]
        if all(root is None for root in roots):
            return None
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        left, right = (None if root is None else root.to(parameter.device, wide) for root in roots)
        return Stretch(parameter.shape, left, right)


def _add_convolution(kept: Convolved, left: Side, right: Side) -> None:
    """Patches and output gradients of every position; groups share the moments of their patches."""
    x, g = kept.x.flatten(0, 1), kept.g.flatten(0, 1)
    right.add(kept.geometry.patches(x, g.shape[2:]).mT)
    rows = g.flatten(2).mT
    if kept.geometry.groups == 1:
        left.add(rows)
    else:  # a matrix would mix groups that never meet
        left.add_moments(rows.reshape(-1, left.length).square().sum(0))
