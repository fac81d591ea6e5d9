"""Weights that are made row by row: each entry from the same entry of a weight, and from numbers of its row.

A standardised or normalised kernel is ``made[o, e] = f(weight[o, e], s_1[o], s_2[o], ...)``, where the numbers s_k of a
row (its mean, deviation or length, a gain) are made from that row of the parameters alone. For a gradient g of it

    gradient[o, e] = a[o, e] g[o, e] + sum_k c_k[o, e] sum_j b_k[o, j] g[o, j],

with a = df/dweight, b_k = df/ds_k and c_k[o, e] = ds_k[o]/dweight[o, e]: a few passes over the gradients of all
examples, where autograd makes one for each operation and each of its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.gradients.rules.base import Formed, PerExample, squares
from sordino.gradients.rules.linear import FORM_BYTES, round_up

CACHED = 2**19
"""Entries of gradients that are formed at a time, 2 MB."""

CLOSE = 2**18
"""Entries of rows that are pulled back at a time, 1 MB: a cache still has them in the next operation."""

KEPT = 3
"""Gradients that take up to so many times what they are made of are kept: to sum them costs less than to make them."""

NUMBERS = 4
"""A row with more numbers of its own than this goes back by autograd."""

ELEMENTWISE = """
    add sub subtract rsub mul multiply div divide true_divide neg negative pow sqrt rsqrt square exp log abs reciprocal
    clamp clip clamp_min clamp_max maximum minimum tanh sigmoid __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __rdiv__ __pow__ __neg__ __abs__
"""
REDUCTIONS = "mean sum var std norm vector_norm amax amin logsumexp"
OWNERS: tuple[Any, ...] = (torch, Tensor, torch.linalg)


def find_functions(names: str) -> frozenset[Any]:
    """The functions of these names, wherever torch has them."""
    found = (getattr(owner, name, None) for name in names.split() for owner in OWNERS)
    return frozenset(function for function in found if callable(function))


BY_ENTRIES, OF_ROWS = find_functions(ELEMENTWISE), find_functions(REDUCTIONS)


@dataclass(frozen=True)
class Formula:
    """The operation that made a tensor from parameters alone."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def values(self) -> Iterable[Any]:
        """All that it was given."""
        return (*self.args, *self.kwargs.values())


class Made(Protocol):
    """What a recording knows of a tensor that was made from parameters alone."""

    @property
    def attached(self) -> Tensor: ...

    @property
    def formula(self) -> Formula | None: ...


class NotByRows(Exception):
    """The tensor may be made in another way than row by row."""


class FormulaReader:
    """Reads how a tensor of this shape was made; numbers of a row keep the other dimensions, with length 1.

    `known` has everything that was made from parameters, and the parameters themselves.
    """

    def __init__(self, shape: torch.Size, known: Mapping[int, Made]) -> None:
        self.known = known
        self.full, self.row = tuple(shape), (shape[0], *[1] * (len(shape) - 1))
        self.checked: set[int] = set()
        self.direct: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}  # as they were made, and spread over the row

    def require_rows(self, tensor: Tensor) -> None:
        """Raise unless the tensor is made row by row.

        A reduction with a result of the row's shape has added up each row alone: nothing else keeps the rows apart.
        """
        if id(tensor) in self.checked:
            return
        shape, found = tuple(tensor.shape), self.known[id(tensor)]
        if shape not in (self.full, self.row) or tensor.dtype not in (torch.float32, torch.float64):
            raise NotByRows
        formula = found.formula
        if formula is not None:
            given = [value for value in formula.values() if isinstance(value, Tensor)]
            plain = all(
                isinstance(value, (int, float, str, tuple, list, type(None))) for value in self._others(formula)
            )
            if not plain or not given or any(id(each) not in self.known for each in given):
                raise NotByRows
            inner = [tuple(each.shape) for each in given]
            if formula.function in OF_ROWS:
                fits = len(given) == 1 and inner[0] == self.full and shape == self.row
            elif formula.function is torch._weight_norm:
                fits = inner == [self.full, self.row] and formula.args[2:] in ((), (0,)) and not formula.kwargs
            else:
                fits = formula.function in BY_ENTRIES and (shape == self.full or self.full not in inner)
            if not fits:
                raise NotByRows
            for each in given:
                self.require_rows(each)
        elif found.attached is not tensor or not tensor.is_leaf:  # not a parameter
            raise NotByRows
        self.checked.add(id(tensor))

    @staticmethod
    def _others(formula: Formula) -> list[Any]:
        return [value for value in formula.values() if not isinstance(value, Tensor)]

    def spread(self, key: int, made: Tensor) -> Tensor:
        """A number of each row as one for each entry, to differentiate by."""
        if key not in self.numbers:
            self.numbers[key] = made, made.detach().expand(self.full).clone().requires_grad_()
        return self.numbers[key][1]

    def evaluate(self, tensor: Any) -> Any:
        """The tensor again, from the weight's entries and the numbers of their rows."""
        if not isinstance(tensor, Tensor):
            return tensor
        key, made = id(tensor), self.known[id(tensor)]
        if tuple(tensor.shape) == self.row:
            return self.spread(key, made.attached)
        if key not in self.values:
            formula = made.formula
            if formula is None:
                self.direct[key] = self.values[key] = tensor.detach().requires_grad_()
            elif formula.function is torch._weight_norm:
                weight, gain = formula.args[:2]
                along = list(range(1, len(self.full)))
                length = torch.linalg.vector_norm(self.known[id(weight)].attached, dim=along, keepdim=True)
                self.values[key] = self.evaluate(weight) * (self.evaluate(gain) / self.spread(-key, length))
            else:
                args = [self.evaluate(each) for each in formula.args]
                kwargs = {name: self.evaluate(each) for name, each in formula.kwargs.items()}
                self.values[key] = formula.function(*args, **kwargs)
        return self.values[key]


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
        way = self if g.dtype == self.taken[0].dtype else self.to(g.dtype)
        for part in self.parts(len(g)):
            way.pull_part(g[:, part], part, [each[:, part] for each in results])

    def to(self, dtype: torch.dtype) -> RowMap:
        """The same in another precision."""
        scales = [None if each is None else each.to(dtype) for each in self.scales]
        given = [[None if by is None else by.to(dtype) for by in each] for each in self.given]
        return replace(self, scales=scales, taken=[each.to(dtype) for each in self.taken], given=given)

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

    def gain(self, place: int) -> float:
        """How much longer a gradient may become on its way to one of the parameters."""
        rows, entries = self.shape
        width, scale = self.parameters[place].numel() // rows, self.scales[place]
        longest = self.taken[0].new_zeros(rows) if scale is None else scale.abs().amax(1)
        for by, taken in zip(self.given[place], self.taken, strict=True):
            if by is not None:
                longest = longest + by.expand(rows, width).norm(dim=1) * taken.expand(rows, entries).norm(dim=1)
        return float(longest.max())


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
        room = [rows.taken[0].new_empty(count, *p.shape) for p in rows.parameters]
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
            total = self.inner.weighted_sum(weights).double().unsqueeze(0)
            pulled = [total.new_empty(1, *p.shape) for p in self.rows.parameters]
            self.rows.pull(total, pulled)
            self.left = {i: each.squeeze(0).to(self.rows.taken[0].dtype) for i, each in enumerate(pulled)}
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


def find_rows(made: Tensor, parameters: Sequence[Tensor], known: Mapping[int, Made]) -> RowMap | None:
    """The way back from a tensor to `parameters`; None unless it was certainly made row by row."""
    if made.dim() < 2 or prod(made.shape[1:]) < 2:
        return None
    reader = FormulaReader(made.shape, known)
    try:
        reader.require_rows(made)
    except NotByRows:
        return None
    rows, entries = made.shape[0], prod(made.shape[1:])

    def flat(values: Tensor) -> Tensor:
        """[rows, entries], or [rows, 1] where that says it all."""
        values = values.detach().reshape(rows, -1)
        alike = torch.equal(values[:, 0], values[:, -1]) and bool((values == values[:, :1]).all())
        return values[:, :1] if alike else values

    with torch.enable_grad():
        again = reader.evaluate(made)
        leaves = [*reader.direct.values(), *(spread for _, spread in reader.numbers.values())]
        if not reader.numbers or len(reader.numbers) > NUMBERS or not again.requires_grad:
            return None
        slopes = torch.autograd.grad(again, leaves, torch.ones_like(again), allow_unused=True)
        scales = dict(zip(reader.direct, slopes, strict=False))
        taken = [again.new_zeros(rows, 1) if each is None else flat(each) for each in slopes[len(scales) :]]
        given: list[list[Tensor | None]] = [[] for _ in parameters]
        for number, _ in reader.numbers.values():
            back = torch.autograd.grad(
                number, list(parameters), torch.ones_like(number), retain_graph=True, allow_unused=True
            )
            for mine, each in zip(given, back, strict=True):
                mine.append(None if each is None else flat(each))
    found = (scales.get(id(parameter)) for parameter in parameters)
    return RowMap(
        (rows, entries),
        list(parameters),
        [None if each is None else flat(each) for each in found],
        taken,
        given,
    )
