"""Products, attention and recurrent layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sordino.gradients.bookkeeping.following import Sight
from sordino.gradients.bookkeeping.moves import lookups
from sordino.gradients.bookkeeping.moves.tools import Answer, insist, keep, shift, shift_to
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.bookkeeping.places import Move, Place


def matmul(at: Sight, result: Tensor, input: Tensor, other: Tensor) -> Answer:
    """``input @ other`` of any number of dimensions."""

    def left(place: Place) -> Place:
        insist(place.dim != input.dim() - 1)
        dim = place.dim if other.dim() == 1 else place.dim + result.dim() - input.dim()
        insist(result.shape[dim] == input.shape[place.dim])
        return place.at(dim)

    def right(place: Place) -> Place:
        insist(place.dim != max(0, other.dim() - 2))
        last = place.dim == other.dim() - 1
        missing = 1 if input.dim() == 1 else 0  # the rows that a vector does not have
        dim = result.dim() - 1 if last else place.dim + result.dim() - other.dim() + missing
        insist(result.shape[dim] == other.shape[place.dim])
        return place.at(dim)

    return at.join([(input, left), (other, right)])


def add_product(at: Sight, result: Tensor, input: Tensor, *factors: Tensor, **kwargs: Any) -> Answer:
    """addmm and baddbmm: a product of matrices, or of batches of them, and something that broadcasts to it."""
    left, right = factors or (kwargs.get("mat1", kwargs.get("batch1")), kwargs.get("mat2", kwargs.get("batch2")))
    rows, columns = keep(lambda place: place.dim != result.dim() - 1), keep(lambda place: place.dim != result.dim() - 2)
    return at.join([(input, shift(input, result)), (left, rows), (right, columns)])


def linear(at: Sight, result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Answer:
    """F.linear; a weight that carries examples is not followed."""
    return at.join([(input, keep(lambda place: place.dim < input.dim() - 1))])


def grouped(at: Sight, result: Tensor, mat_a: Tensor, mat_b: Tensor, **kwargs: Any) -> Answer:
    """grouped_mm: rows, each times the matrix of its group."""
    insist(mat_a.dim() == 2 and mat_b.dim() == 3)
    return at.join([(mat_a, keep(lambda place: place.dim == 0))])


def bilinear(at: Sight, result: Tensor, input1: Tensor, input2: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """F.bilinear."""
    return at.join((each, keep(lambda place: place.dim < result.dim() - 1)) for each in (input1, input2))


def attention(
    at: Sight,
    result: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Answer:
    """scaled_dot_product_attention: dimensions before the last two are apart; heads may be fewer in keys."""

    def move(tensor: Tensor) -> Move:
        def moved(place: Place) -> Place:
            insist(place.dim < tensor.dim() - 2)
            return shift(tensor, result)(place)

        return moved

    masks = [(attn_mask, move(attn_mask))] if isinstance(attn_mask, Tensor) else []
    return at.join([*((each, move(each)) for each in (query, key, value)), *masks])


def einsum(at: Sight, result: Tensor, equation: str, *operands: Any) -> Answer:
    """The letter of the examples must stand in the result, and be the same in all factors that have them."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    insist(isinstance(equation, str) and "->" in equation)
    inputs, output = equation.replace(" ", "").split("->")
    letters = spell(output, result.dim())

    def move(tensor: Tensor, term: str) -> Move:
        mine = spell(term, tensor.dim())

        def moved(place: Place) -> Place:
            letter = mine[place.dim]
            insist(letter in letters and mine.count(letter) == 1 and letters.count(letter) == 1)
            return shift_to(tensor, result, letters.index(letter))(place)

        return moved

    return at.join((tensor, move(tensor, term)) for tensor, term in zip(given, inputs.split(","), strict=True))


def spell(term: str, dims: int) -> list[str]:
    """One letter for each dimension; those that dots stand for are counted from the right."""
    before, dots, after = term.partition("...")
    hidden = dims - len(before) - len(after)
    insist(hidden >= 0 and (bool(dots) or hidden == 0))
    return [*before, *(f".{i}" for i in range(hidden, 0, -1)), *after]


def distances(at: Sight, result: Tensor, x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """cdist: batches of points."""
    insist(x1.dim() == x2.dim() == result.dim())
    return at.join((each, keep(lambda place: place.dim < result.dim() - 2)) for each in (x1, x2))


def recurrent(at: Sight, result: Any, input: Tensor, hx: Any, weights: Any, *args: Any, **kwargs: Any) -> list[Answer]:
    """lstm, gru and rnn on padded sequences, or on packed ones."""
    if args and not isinstance(args[0], bool):
        return packed(at, result, input, hx, weights)
    insist(input.dim() == 3 and len(args) == 6 and all(isinstance(args[i], bool) for i in (0, 3, 4, 5)))
    batch_first = args[-1]
    examples = 0 if batch_first else 1
    states = list(find_tensors((hx,), {}))
    place = at.join(
        [
            (input, lambda place: keep(lambda each: each.dim == examples)(place).at(1)),
            *((state, keep(lambda place: place.dim == 1)) for state in states),
        ]
    )
    return [None if place is None else place.at(examples), *[place] * (len(result) - 1)]


def packed(at: Sight, result: Any, data: Tensor, batch_sizes: Tensor, hx: Any) -> list[Answer]:
    """The same on packed sequences: states have the sequences in dimension 1, as they are at the first step."""
    counts = batch_sizes.tolist()
    states = ((state, keep(lambda place: place.dim == 1)) for state in find_tensors((hx,), {}))
    place = at.join([(data, lambda place: lookups.find_sequences(place, counts, 1, at.size, data.device)), *states])
    if place is None:
        return [None] * len(result)
    return [lookups.pack_places(place, counts, at.size, data.device), *[place] * (len(result) - 1)]


def cell(at: Sight, result: Any, input: Tensor, hx: Any, *args: Any, **kwargs: Any) -> Answer:
    """One step of a recurrent layer."""
    insist(input.dim() == 2)
    return at.join((each, keep(lambda place: place.dim == 0)) for each in find_tensors((input, hx), {}))


def multi_head_attention(
    at: Sight, result: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> list[Answer]:
    """multi_head_attention_forward of [time, examples, features]; its weights have the examples first."""
    insist(query.dim() == 3)
    place = at.join((each, keep(lambda place: place.dim == 1)) for each in (query, key, value))
    return [place, None if place is None else place.at(0)]
