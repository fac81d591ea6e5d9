"""Per-example gradients of a recurrent layer's parameters: pieces of S_iᵀ G_i, of what the steps saw and their gates.

All parameters of a layer share one product, formed for every example, or one comparison of steps with steps. Both read
the steps where the pass over time left them, [time, directions, examples, …]: an example's rows are far apart there,
which costs a matrix product less than a copy would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.gradients.rules.base import (
    RUN,
    Examples,
    Formed,
    Kind,
    PerExample,
    Settle,
    precise,
    squares,
    zero_rows,
)
from sordino.gradients.rules.kernels import multiply
from sordino.gradients.rules.linear import Gram, Outer, Way, choose_way, compare, round_up
from sordino.gradients.rules.recurrent.layer import RecurrentLayer


@dataclass(frozen=True)
class Slot:
    """Where a parameter's gradient is in [inputs + 1 + state, blocks, size] of a direction; biases are one row."""

    direction: int
    blocks: tuple[int, ...]
    seen: slice
    squeeze: bool = False

    def of(self, products: Tensor) -> Tensor:
        """The piece of [..., seen, blocks, size], as the parameter [..., blocks * size, seen] or a bias."""
        mine = products[..., self.seen, :, :]
        if self.blocks != tuple(range(mine.shape[-2])):
            mine = mine[..., list(self.blocks), :]
        piece = mine.flatten(-2)
        return piece.squeeze(-2) if self.squeeze else piece.transpose(-2, -1)


class Joint(ABC):
    """The gradients of all parameters of a layer together; their weighted sum is computed once."""

    size: int
    shape: tuple[int, int, int]
    manner: str

    def __init__(self) -> None:
        self._last: tuple[Tensor, list[Tensor]] | None = None
        self._finite: tuple[Tensor, Joint] | None = None

    @abstractmethod
    def squared_norms(self, place: Slot) -> Tensor:
        """Of the parameter at this place, [size]."""

    @abstractmethod
    def mass(self, place: Slot) -> Tensor:
        """See `PerExample.mass`."""

    @abstractmethod
    def form(self, direction: int, start: int, stop: int) -> Tensor:
        """[stop - start, seen, blocks, size]"""

    @abstractmethod
    def sum(self, weights: Tensor) -> list[Tensor]:
        """The weighted sum, [seen, blocks, size] for each direction."""

    @abstractmethod
    def drop(self, bad: Tensor) -> Joint:
        """The same, with nothing left of the examples in the mask."""

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        """`sum`, remembered for the layer's next parameter."""
        if self._last is None or self._last[0] is not weights:
            self._last = (weights, self.sum(weights))
        return self._last[1]

    def without(self, bad: Tensor) -> Joint:
        """`drop`, remembered likewise."""
        if self._finite is None or self._finite[0] is not bad:
            self._finite = (bad, self.drop(bad))
        return self._finite[1]


class FormedJoint(Joint):
    """Products [directions, examples, seen, blocks, size] that are kept."""

    manner = "gates: formed"

    def __init__(self, products: Tensor) -> None:
        super().__init__()
        self.products, self.size = products, products.shape[1]
        self.shape = (products.shape[2], products.shape[3], products.shape[4])
        self._lengths: dict[int, Tensor] = {}

    def squared_norms(self, place: Slot) -> Tensor:
        if place.direction not in self._lengths:  # squares over `size`, in runs, for all places at once
            runs = self.products[place.direction].split(RUN, -1)
            lengths = [torch.linalg.vector_norm(run, dim=-1).square_() for run in runs]
            self._lengths[place.direction] = lengths[0] if len(lengths) == 1 else torch.stack(lengths).sum(0)
        return place.of(self._lengths[place.direction].unsqueeze(-1)).flatten(1).sum(1)

    def mass(self, place: Slot) -> Tensor:
        return self.squared_norms(place).sqrt()

    def form(self, direction: int, start: int, stop: int) -> Tensor:
        return self.products[direction, start:stop]

    def sum(self, weights: Tensor) -> list[Tensor]:
        return [(weights.to(one.dtype) @ one.flatten(1)).reshape(one.shape[1:]) for one in self.products]

    def drop(self, bad: Tensor) -> FormedJoint:
        return FormedJoint(torch.stack([zero_rows(one, bad) for one in self.products]))


class ComparedJoint(Joint):
    """Steps compared with steps: `seen` [time, directions, examples, n] and `gates` [..., blocks * size] are kept.

    The input weight and the state weight share the comparison of the gates; a bias is a sum over time.
    """

    manner = "gates: Gram matrices"

    def __init__(self, seen: Tensor, gates: Tensor, blocks: int) -> None:
        super().__init__()
        self.seen, self.gates, self.size = seen, gates, gates.shape[2]
        self.shape = (seen.shape[-1], blocks, gates.shape[-1] // blocks)
        self._gram: tuple[tuple[int, ...], Gram] | None = None

    def factors(self, place: Slot) -> tuple[Tensor, Tensor]:
        """What the place's parameter saw and its gates, [examples, time, …]; the order of blocks does not matter."""
        wide = self.shape[2]
        mine = slice(min(place.blocks) * wide, (max(place.blocks) + 1) * wide)
        seen, gates = self.seen[:, place.direction], self.gates[:, place.direction]
        return seen[..., place.seen].transpose(0, 1), gates[..., mine].transpose(0, 1)

    def squared_norms(self, place: Slot) -> Tensor:
        seen, gates = self.factors(place)
        if place.squeeze:
            return round_up(squares(gates.sum(1)), self.mass(place))
        key, kept = (place.direction, *sorted(place.blocks)), self._gram
        gram = Gram.of(gates) if kept is None or kept[0] != key else kept[1]
        self._gram = (key, gram) if kept is None or kept[1] is not gram else None  # the other weight comes next
        return compare(Gram.of(seen), gram, lambda *some: place.of(self.form(place.direction, *some)))

    def mass(self, place: Slot) -> Tensor:
        seen, gates = self.factors(place)
        if place.squeeze:  # the sum over time is one product with that of all other examples
            return (gates.shape[1] * squares(gates.flatten(1))).sqrt()
        return (squares(seen.flatten(1)) * squares(gates.flatten(1))).sqrt()

    def form(self, direction: int, start: int, stop: int) -> Tensor:
        seen, gates = self.seen[:, direction, start:stop], self.gates[:, direction, start:stop]
        formed: Tensor = multiply_steps(seen, gates).unflatten(-1, self.shape[1:])
        return formed

    def sum(self, weights: Tensor) -> list[Tensor]:
        scale, each = weights.to(self.gates.dtype).reshape(1, -1, 1), []
        for seen, gates in zip(self.seen.unbind(1), self.gates.unbind(1), strict=True):
            total = multiply(seen.flatten(0, 1), (gates * scale).flatten(0, 1))
            each.append(total.unflatten(-1, self.shape[1:]))
        return each

    def spread(self, place: Slot) -> PerExample:
        """The place's gradients as rows of their own, to be joined with those of another use."""
        seen, gates = self.seen[:, place.direction], self.gates[:, place.direction]
        mine = gates.unflatten(-1, self.shape[1:])[..., list(place.blocks), :].flatten(-2).transpose(0, 1)
        return Formed(mine.sum(1)) if place.squeeze else Outer(seen[..., place.seen].transpose(0, 1), mine)

    def drop(self, bad: Tensor) -> ComparedJoint:
        seen, gates = (each.masked_fill(bad.reshape(1, 1, -1, 1), 0) for each in (self.seen, self.gates))
        return ComparedJoint(seen, gates, self.shape[1])


def multiply_steps(seen: Tensor, gates: Tensor, out: Tensor | None = None) -> Tensor:
    """[examples, n, m], the sum over time of seen ⊗ gates, for [time, examples, n] and [time, examples, m]."""
    product: Tensor = torch.bmm(seen.permute(1, 2, 0), gates.transpose(0, 1), out=out)
    return product


class Products:
    """Turns the gates' gradients into the shares of a layer's parameters."""

    def __init__(self, layer: RecurrentLayer) -> None:
        self.layer = layer
        self.kept: dict[int, tuple[Tensor, Joint | None]] = {}

    def settle(self, place: Slot) -> Settle:
        """The share of the parameter at this place, given the gates' gradients [examples, time, directions, gates]."""

        def settle(g: Tensor, at: Examples) -> PerExample:
            if id(g) not in self.kept:
                self.kept = {id(g): (g, self.join(g, at))}
            joint = self.kept[id(g)][1]
            return self.outer(place, g, at) if joint is None else Piece(joint, place)

        return settle

    def join(self, g: Tensor, at: Examples) -> Joint | None:
        """All parameters' gradients together, unless rows of steps are to be compared for several sequences at once."""
        blocks, width = self.layer.cell.blocks, self.layer.weights.forth.shape[1]
        way = choose_way(len(g), g.shape[1], width, g.shape[-1])
        if way is Way.PASS or (way is Way.GRAM and at.layout.kind is not Kind.DIMENSION):
            return None
        gates, seen = (each.permute(1, 2, 0, 3) for each in (g, self.layer.seen()))
        if way is Way.GRAM:
            return ComparedJoint(precise(seen), precise(gates), blocks)
        products = g.new_empty(gates.shape[1], len(g), width, g.shape[-1])
        for each, some, same in zip(products, seen.unbind(1), gates.unbind(1), strict=True):
            multiply_steps(some, same, each)
        apart = precise(products).unflatten(-1, (blocks, -1))
        items = [at.items(one) for one in apart]
        return FormedJoint(apart if items[0].shape[1] == 1 else torch.stack([one.sum(1) for one in items]))

    def outer(self, place: Slot, g: Tensor, at: Examples) -> PerExample:
        """Rows of gates and of what was seen."""
        gates = g[:, :, place.direction].unflatten(-1, (self.layer.cell.blocks, -1))
        mine = precise(at.rows(gates[:, :, list(place.blocks)].flatten(2)))
        if place.squeeze:
            return Formed(mine.sum(1))
        return Outer(precise(at.rows(self.layer.seen()[:, :, place.direction, place.seen])), mine)


class Piece(PerExample):
    """One parameter's gradients within those of its layer."""

    def __init__(self, joint: Joint, place: Slot) -> None:
        self.joint, self.place = joint, place
        self.size = joint.size
        seen, _, wide = joint.shape
        outputs = len(place.blocks) * wide
        self.shape = torch.Size((outputs,) if place.squeeze else (outputs, len(range(seen)[place.seen])))

    @property
    def manner(self) -> str:
        return self.joint.manner

    def squared_norms(self) -> Tensor:
        return self.joint.squared_norms(self.place)

    def mass(self) -> Tensor:
        return self.joint.mass(self.place)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.place.of(self.joint.weighted_sum(weights)[self.place.direction])

    def form(self, start: int, stop: int) -> Tensor:
        return self.place.of(self.joint.form(self.place.direction, start, stop))

    def spread(self) -> PerExample:
        """As rows of steps where they were not formed: a layer that is used twice is used once on all of them."""
        return self.joint.spread(self.place) if isinstance(self.joint, ComparedJoint) else self

    def without(self, bad: Tensor) -> Piece:
        return Piece(self.joint.without(bad), self.place)
