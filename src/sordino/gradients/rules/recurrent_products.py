"""Per-example gradients of a recurrent layer's parameters: pieces of one product of gates and what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sordino.gradients.bookkeeping_layout import Examples
from sordino.gradients.rules.base import RUN, Formed, PerExample, Settle, precise, squares, zeroed
from sordino.gradients.rules.linear import Outer
from sordino.gradients.rules.recurrent.layer import Layer
from sordino.gradients.rules.ways import Way, cheapest


@dataclass(frozen=True)
class Place:
    """Where a parameter's gradient is in [directions, inputs + 1 + state, blocks, size]; biases are one row."""

    direction: int
    blocks: tuple[int, ...]
    seen: slice
    squeeze: bool = False

    def of(self, products: Tensor) -> Tensor:
        """The piece of [..., directions, seen, blocks, size], as the parameter [..., blocks * size, seen] or a bias."""
        mine = products.select(-4, self.direction)[..., self.seen, :, :]
        if self.blocks != tuple(range(mine.shape[-2])):
            mine = mine[..., list(self.blocks), :]
        piece = mine.flatten(-2)
        return piece.squeeze(-2) if self.squeeze else piece.transpose(-2, -1)


class Products:
    """S_iᵀ G_i for every example, S what the steps saw: one batched product for all parameters of the layer.

    Formed for a few examples at a time, whose gates are copied side by side and stay in the cache meanwhile.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.formed: dict[int, tuple[Tensor, Joint]] = {}

    def settle(self, place: Place) -> Settle:
        """The share of the parameter at this place, given the gates' gradients [examples, time, directions, gates]."""

        def settle(g: Tensor, at: Examples) -> PerExample:
            width = self.layer.weights.forth.shape[1]
            if cheapest(len(g), g.shape[1], width, g.shape[-1]) is not Way.FORM:
                return self.outer(place, g, at)
            if id(g) not in self.formed:
                self.formed = {id(g): (g, Joint(self.form(g, at)))}
            return Piece(self.formed[id(g)][1], place)

        return settle

    def form(self, g: Tensor, at: Examples) -> Tensor:
        """[examples, directions, width, blocks, size] from gate gradients and what was seen."""
        cell, seen = self.layer.cell, self.layer.seen()
        rows, directions, width = len(g), g.shape[2], seen.shape[-1]
        products = g.new_empty(rows, directions, width, g.shape[-1])
        step = max(1, 2**18 // max(1, prod(g.shape[1:])))
        for start in range(0, rows, step):
            some = slice(start, start + step)
            gates = g[some].transpose(1, 2).contiguous().flatten(0, 1)
            inputs = seen[some].transpose(1, 2).contiguous().flatten(0, 1)
            torch.bmm(inputs.transpose(1, 2), gates, out=products[some].flatten(0, 1))
        items = at.items(products.unflatten(3, (cell.blocks, -1)))
        return precise(items[:, 0] if items.shape[1] == 1 else items.sum(1))

    def outer(self, place: Place, g: Tensor, at: Examples) -> PerExample:
        """For long weights and short sequences: rows of gates and of what was seen, for Gram matrices."""
        gates = g[:, :, place.direction].unflatten(-1, (self.layer.cell.blocks, -1))
        mine = precise(at.rows(gates[:, :, list(place.blocks)].flatten(2)))
        if place.squeeze:
            return Formed(mine.sum(1))
        return Outer(precise(at.rows(self.layer.seen()[:, :, place.direction, place.seen])), mine)


class Joint:
    """Formed products of a whole layer, whose weighted sum is computed once for all of its parameters."""

    def __init__(self, products: Tensor) -> None:
        self.products = products
        self.last: tuple[Tensor, Tensor] | None = None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not weights:
            flat = self.products.flatten(1)
            self.last = (weights, (weights.to(flat.dtype) @ flat).reshape(self.products.shape[1:]))
        return self.last[1]


class Piece(PerExample):
    """One parameter's gradients within the products of its layer."""

    manner = "gates: formed"

    def __init__(self, joint: Joint, place: Place) -> None:
        self.joint, self.place = joint, place
        self.size = len(joint.products)
        self.shape = place.of(joint.products[0]).shape

    def squared_norms(self) -> Tensor:
        piece = self.place.of(self.joint.products)
        if piece.dim() > 2:
            runs = piece.split(RUN, 1)  # an entry's gates are side by side in memory
            piece = torch.cat([torch.linalg.vector_norm(run, dim=1) for run in runs], 1)
        return squares(piece)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.place.of(self.joint.weighted_sum(weights))

    def form(self, start: int, stop: int) -> Tensor:
        return self.place.of(self.joint.products[start:stop])

    def without(self, bad: Tensor) -> Piece:
        return Piece(Joint(zeroed(self.joint.products, bad)), self.place)
