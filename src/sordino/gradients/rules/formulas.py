"""Reads from the operations how a tensor was made from parameters: entry by entry, with a few numbers (`rowwise`).

Constants may take part entry by entry: the mask of a pruned weight, a fixed scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.gradients.rules.rowwise import RowMap

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
    """The operation that made a tensor from parameters alone, and how often its tensors had been written by then."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    versions: tuple[int, ...]

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Formula:
        """The formula of an operation that has just run."""
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return Formula(function, args, kwargs, tuple(tensor._version for tensor in given))

    def values(self) -> Iterable[Any]:
        """All that it was given."""
        return (*self.args, *self.kwargs.values())

    def tensors(self) -> list[Tensor]:
        """Those of them that are tensors."""
        return [value for value in self.values() if isinstance(value, Tensor)]

    def can_repeat(self) -> bool:
        """Whether its tensors are as they were, and all else that it was given is plain."""
        others = (value for value in self.values() if not isinstance(value, Tensor))
        plain = all(isinstance(value, (int, float, str, tuple, list, type(None))) for value in others)
        return plain and self.versions == tuple(tensor._version for tensor in self.tensors())


class Made(Protocol):
    """What a recording knows of a tensor that was made from parameters alone."""

    @property
    def attached(self) -> Tensor: ...

    @property
    def formula(self) -> Formula | None: ...


class NotByRows(Exception):
    """The tensor may be made in another way than row by row."""


class FormulaReader:
    """Reads how a tensor of shape `full` was made, from entries and from numbers of shape `row`.

    Numbers of a row keep the other dimensions, with length 1; a number of the whole tensor has no dimension. `known`
    has everything that was made from parameters, and the parameters themselves; what else a formula was given is
    constant.
    """

    def __init__(self, full: tuple[int, ...], row: tuple[int, ...], known: Mapping[int, Made]) -> None:
        self.full, self.row, self.known = full, row, known
        self.checked: set[int] = set()
        self.direct: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}  # as they were made, and spread over the row

    def require_rows(self, tensor: Tensor) -> None:
        """Raise unless the tensor is made row by row.

        A reduction with a result of the row's shape has added up each row alone: nothing else keeps the rows apart. A
        number of the whole may be made in any way.
        """
        if id(tensor) in self.checked:
            return
        shape, found = tuple(tensor.shape), self.known[id(tensor)]
        if shape not in (self.full, self.row) or tensor.dtype not in (torch.float32, torch.float64):
            raise NotByRows
        formula = found.formula
        if shape == ():
            pass
        elif formula is not None:
            tracked = [each for each in formula.tensors() if id(each) in self.known]
            inner = [tuple(each.shape) for each in tracked]
            alone = len(tracked) == len(formula.tensors())
            if formula.function in OF_ROWS:
                fits = alone and inner == [self.full] and shape == self.row
            elif formula.function is torch._weight_norm:
                whole = ((-1,),) if self.row == () else ((), (0,))
                fits = inner == [self.full, self.row] and formula.args[2:] in whole and not formula.kwargs
            else:
                fits = formula.function in BY_ENTRIES and (shape == self.full or self.full not in inner)
            if not fits or not formula.can_repeat():
                raise NotByRows
            for each in tracked:
                self.require_rows(each)
        elif found.attached is not tensor or not tensor.is_leaf:  # not a parameter
            raise NotByRows
        self.checked.add(id(tensor))

    def spread(self, key: int, made: Tensor) -> Tensor:
        """A number of each row as one for each entry, to differentiate by."""
        if key not in self.numbers:
            self.numbers[key] = made, made.detach().expand(self.full).clone().requires_grad_()
        return self.numbers[key][1]

    def evaluate(self, tensor: Any) -> Any:
        """The tensor again, from the weight's entries and the numbers of their rows."""
        if not isinstance(tensor, Tensor) or id(tensor) not in self.known:
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
                along = list(range(1, len(self.full))) if self.row else None
                length = torch.linalg.vector_norm(self.known[id(weight)].attached, dim=along, keepdim=bool(self.row))
                self.values[key] = self.evaluate(weight) * (self.evaluate(gain) / self.spread(-key, length))
            else:
                args = [self.evaluate(each) for each in formula.args]
                kwargs = {name: self.evaluate(each) for name, each in formula.kwargs.items()}
                self.values[key] = formula.function(*args, **kwargs)
        return self.values[key]


def find_rows(made: Tensor, parameters: Sequence[Tensor], known: Mapping[int, Made]) -> RowMap | None:
    """The way back from a tensor to `parameters`; None unless it was certainly made so, by rows or as a whole."""
    full = tuple(made.shape)
    if len(full) < 2 or prod(full[1:]) < 2 or any(each.dtype != made.dtype for each in parameters):
        return None
    for row in ((full[0], *[1] * (len(full) - 1)), ()):
        reader = FormulaReader(full, row, known)
        try:
            reader.require_rows(made)
        except NotByRows:
            continue
        return differentiate(reader, made, parameters)
    return None


def differentiate(reader: FormulaReader, made: Tensor, parameters: Sequence[Tensor]) -> RowMap | None:
    """The derivatives of what was made by its entries and numbers, and of the numbers by `parameters`."""
    rows = reader.row[0] if reader.row else 1
    entries = made.numel() // rows

    def flat(values: Tensor) -> Tensor:
        """Return [rows, entries]."""
        return values.detach().reshape(rows, -1)

    with torch.enable_grad():
        again = reader.evaluate(made)
        leaves = [*reader.direct.values(), *(spread for _, spread in reader.numbers.values())]
        if len(reader.numbers) > NUMBERS or not again.requires_grad:
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
    scaled = [None if each is None else flat(each) for each in found]
    return RowMap((rows, entries), list(parameters), scaled, taken, given).shorten()
