"""Weights that are made row by row: each entry from the same entry of a weight, and from numbers of its row.

A standardised or normalised kernel is ``made[o, e] = f(weight[o, e], s_1[o], s_2[o], ...)``, where the numbers s_k of a
row (its mean, deviation or length, a gain) are made from that row of the parameters alone. For a gradient g of it

    gradient[o, e] = a[o, e] g[o, e] + sum_k c_k[o, e] sum_j b_k[o, j] g[o, j],

with a = df/dweight, b_k = df/ds_k and c_k[o, e] = ds_k[o]/dweight[o, e]: a few passes over the gradients of all
examples, where autograd makes one for each operation and each of its derivatives. If the gradients are products of two
vectors, as in a linear layer with one row for each example, a few matrix products measure them, and none is formed.

A weight divided by a number of all its entries, as by its spectral norm, is the same with one row; a pruned weight has
no numbers. `formulas` finds out how a weight was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from sordino.gradients.rules.base import Formed, PerExample, squares
from sordino.gradients.rules.linear import FORM_BYTES, Outer, round_up
from sordino.noise import widen

CACHED = 2**19
"""Entries of gradients that are formed at a time, 2 MB."""

CLOSE = 2**18
"""Entries of rows that are pulled back at a time, 1 MB: a cache still has them in the next operation."""

KEPT = 3
"""Gradients that take up to so many times what they are made of are kept: to sum them costs less than to make them."""


@dataclass(frozen=True)
class RowMap:
    """The way back from rows: `scales` a for each parameter that has one, b in `taken`, and c in `given`.

    All are [rows, entries], or [rows, 1] where a row has only one value.
    """

    shape: tuple[int, int]
    parameters: list[Tensor]
    scales: list[Tensor | None]
    taken: list[Tensor]
    given: list[list[Tensor | None]]

    def parts(self, count: int) -> list[slice]:
        """Ranges of rows of so many gradients that fit the innermost large cache, through all that is done to them."""
        rows, entries = self.shape
        step = max(1, CLOSE // (count * entries))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def pull(self, gradients: Tensor, into: Sequence[Tensor]) -> None:
        """From [n, *made] to [n, *shape] of each parameter."""
        g = gradients.reshape(len(gradients), *self.shape)
        results = [each.view(len(g), self.shape[0], -1) for each in into]
        way = self if g.dtype == self.parameters[0].dtype else self.to(g)
        for part in self.parts(len(g)):
            way.pull_part(g[:, part], part, [each[:, part] for each in results])

    def to(self, gradients: Tensor) -> RowMap:
        """Return the same map in the precision of these gradients, and on their device."""
        return self.change(lambda factor: factor.to(gradients))

    def shorten(self) -> RowMap:
        """Return the same map, with [rows, 1] for rows of one value; a device is asked twice, about all at once."""
        factors = [each for each in (*self.scales, *self.taken, *chain(*self.given)) if each is not None]
        for columns in (slice(-1, None), slice(None)):  # most differ in the last
            alike = [(each[:, columns] == each[:, :1]).all() for each in factors]
            found = torch.stack(alike).tolist() if alike else []
            factors = [each for each, same in zip(factors, found, strict=True) if same]
        short = {id(each): each[:, :1] for each in factors}
        return self.change(lambda factor: short.get(id(factor), factor))

    def change(self, how: Callable[[Tensor], Tensor]) -> RowMap:
        """Return the same map with all its factors changed alike."""
        scales = [None if each is None else how(each) for each in self.scales]
        given = [[None if by is None else how(by) for by in each] for each in self.given]
        return replace(self, scales=scales, taken=[how(each) for each in self.taken], given=given)

    def pull_part(self, g: Tensor, part: slice, into: Sequence[Tensor]) -> None:
        """Some rows [n, rows, entries]; what is multiplied on the way lies where a result will be."""
        room = next((each for each in into if each.shape == g.shape), None)
        sums = self.sum_rows(g, part, torch.empty_like(g) if room is None else room)
        for scale, given, found in zip(self.scales, self.given, into, strict=True):
            if scale is None:
                found.zero_()
            else:
                torch.mul(g, scale[part], out=found)
            for each, by in zip(sums, given, strict=True):
                if by is not None and by.shape[1] == 1:
                    found.add_(each * by[part])
                elif by is not None:
                    found.addcmul_(each, by[part])

    def sum_rows(self, g: Tensor, part: slice, room: Tensor) -> list[Tensor]:
        """[n, rows, 1] for each number of a row: the sum of b ∘ g."""
        plain: Tensor | None = None
        sums = []
        for by in self.taken:
            if by.shape[1] == 1:
                plain = g.sum(2, keepdim=True) if plain is None else plain
                sums.append(plain * by[part])
            else:
                sums.append(torch.mul(g, by[part], out=room).sum(2, keepdim=True))
        return sums

    def gain(self, place: int) -> Tensor:
        """How much longer a gradient may become on its way to one of the parameters."""
        rows, entries = self.shape
        width, scale = self.parameters[place].numel() // rows, self.scales[place]
        longest = self.parameters[0].new_zeros(rows) if scale is None else scale.abs().amax(1)
        for by, taken in zip(self.given[place], self.taken, strict=True):
            if by is not None:
                longest = longest + by.expand(rows, width).norm(dim=1) * taken.expand(rows, entries).norm(dim=1)
        return longest.max()

    def measure_products(self, left: Tensor, right: Tensor) -> list[Tensor]:
        """|gradient_i|² of each parameter for gradients left_i ⊗ right_i of the weight, which are not formed.

        With s_k = <b_k, left ⊗ right> of a row it is |a ∘ left ⊗ right|² + 2 Σ s_k <a ∘ c_k, left ⊗ right> +
        Σ s_k s_l <c_k, c_l>, added up over the rows.
        """
        rows = self.shape[0]

        def multiply(by: Tensor, left: Tensor = left, right: Tensor = right) -> Tensor:
            """[n, rows]: the sum of left ⊗ right ∘ by over each row."""
            if by.shape[1] == 1:
                found = left * (right.sum(1, keepdim=True) * by.T)
            else:
                found = left * (right @ by.reshape(left.shape[1], -1).T)
            return found if rows == left.shape[1] else found.sum(1, keepdim=True)

        sums, results = [multiply(by) for by in self.taken], []
        for parameter, scale, given in zip(self.parameters, self.scales, self.given, strict=True):
            total, width = left.new_zeros(len(left)), parameter.numel() // rows
            moved = [(each, by) for each, by in zip(sums, given, strict=True) if by is not None]
            if scale is not None:
                total += multiply(scale.square(), left.square(), right.square()).sum(1)
            for each, by in moved:
                if scale is not None:
                    total += 2 * (each * multiply(scale * by)).sum(1)
                for other, along in moved:
                    total += (each * other) @ (by * along).expand(rows, width).sum(1)
            results.append(total)
        return results


class Returning:
    """All examples' gradients of a tensor, on their way back to all the parameters that it was made from.

    Lengths are measured where gradients come back, a few examples at a time. Small gradients are kept there. Otherwise
    only the weighted sum goes all the way: in double precision, as a row may drop a direction in which one example is
    longer than all others.
    """

    def __init__(self, inner: PerExample, rows: RowMap) -> None:
        self.inner, self.rows, self.size = inner, rows, inner.size
        self.squares: list[Tensor] = []
        self.kept: list[Formed] = []
        self.left: dict[int, Tensor] = {}
        self.weights: Tensor | None = None

    def measure(self, place: int) -> Tensor:
        """Squared lengths of the gradients of one parameter, and what rounding can have taken from them."""
        if not self.squares:
            self._pull_all()
        return self.squares[place]

    def _pull_all(self) -> None:
        rows, size = self.rows, self.size
        entries = rows.shape[0] * rows.shape[1]
        made_of = sum(each.numel() for each in vars(self.inner).values() if isinstance(each, Tensor))
        keep = size * entries <= min(KEPT * made_of, FORM_BYTES // 4)
        step = max(1, min(CACHED // entries, size))
        count = size if keep else step
        # Squares that cancel lose half the digits: those of doubles are enough for float32, and only for that.
        if not keep and isinstance(self.inner, Outer) and self.inner.rows == 1 and self.inner.x.dtype == torch.float32:
            self.squares = self._measure_products(self.inner)
            return
        room = [p.new_empty(count, *p.shape, requires_grad=False) for p in rows.parameters]
        found: list[list[Tensor]] = [[] for _ in room]
        for start in range(0, size, step):
            stop = min(start + step, size)
            place = slice(start, stop) if keep else slice(0, stop - start)
            pulled = [each[place] for each in room]
            rows.pull(self.inner.form(start, stop), pulled)
            for lengths, each in zip(found, pulled, strict=True):
                lengths.append(squares(each.reshape(stop - start, -1)))
        self.squares = [torch.cat(lengths) for lengths in found]
        if keep:
            self.kept = [Formed(each) for each in room]
            del self.inner
        else:
            self.squares = [round_up(each, self.mass(place)) for place, each in enumerate(self.squares)]

    def _measure_products(self, inner: Outer) -> list[Tensor]:
        """In double precision, so that what a row drops leaves no rounding behind that `mass` does not cover."""
        left, right = widen(inner.g[:, 0]), widen(inner.x[:, 0])
        if inner.transposed:
            left, right = right, left
        found = self.rows.to(left).measure_products(left, right)
        return [round_up(each.to(inner.x), self.mass(place)) for place, each in enumerate(found)]

    def mass(self, place: int) -> Tensor:
        """What is rounded is as long as the gradients of the tensor, unless its own are kept."""
        return self.kept[place].mass() if self.kept else self.inner.mass() * self.rows.gain(place)

    def sum(self, place: int, weights: Tensor) -> Tensor:
        """The weighted sum of one parameter's gradients; those of the others are found along with it.

        Each is handed out once, as noise may be written into it.
        """
        if self.kept:
            return self.kept[place].weighted_sum(weights)
        if self.weights is not weights or place not in self.left:
            total = widen(self.inner.weighted_sum(weights)).unsqueeze(0)
            pulled = [total.new_empty(1, *p.shape) for p in self.rows.parameters]
            self.rows.pull(total, pulled)
            self.left = {i: each.squeeze(0).to(self.rows.parameters[0]) for i, each in enumerate(pulled)}
            self.weights = weights
        return self.left.pop(place)

    def form(self, place: int, start: int, stop: int) -> Tensor:
        """The gradients of some examples."""
        if self.kept:
            return self.kept[place].form(start, stop)
        gradients = self.inner.form(start, stop)
        pulled = [gradients.new_empty(stop - start, *p.shape) for p in self.rows.parameters]
        self.rows.pull(gradients, pulled)
        return pulled[place]


class Rowwise(PerExample):
    """The gradients of one of the parameters of a tensor that was made row by row."""

    manner = "pulled back by rows"

    def __init__(self, way: Returning, place: int) -> None:
        self.way, self.place = way, place
        self.size, self.shape = way.size, way.rows.parameters[place].shape

    def squared_norms(self) -> Tensor:
        return self.way.measure(self.place)

    def mass(self) -> Tensor:
        return self.way.mass(self.place)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.way.sum(self.place, weights)

    def form(self, start: int, stop: int) -> Tensor:
        return self.way.form(self.place, start, stop)

    def without(self, bad: Tensor) -> PerExample:
        if self.way.kept:
            return self.way.kept[self.place].without(bad)
        return Rowwise(Returning(self.way.inner.without(bad), self.way.rows), self.place)
