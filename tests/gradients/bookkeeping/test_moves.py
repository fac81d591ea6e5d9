"""Every rule that follows the examples is held against gradients: an example's part of a result is made from its own.

All lengths are equal, so that whatever mistakes one dimension for another is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.bookkeeping.following import Follower
from sordino.gradients.bookkeeping.moves import MOVES
from sordino.gradients.bookkeeping.operations import find_tensors
from sordino.gradients.bookkeeping.places import Place
from sordino.gradients.rules.base import name_of

N = 3
FOLDS = [Place(), Place(inner=2), Place(outer=2), Place(outer=2, inner=2), Place(owners=torch.tensor([1, 0, 0, 2, 1]))]


def length(place: Place) -> int:
    return place.outer * N * place.inner if place.owners is None else len(place.owners)


def owners(tensor: Tensor, place: Place) -> Tensor:
    """Whose every entry is."""
    each = place.list_owners(N, tensor.device)
    assert len(each) == tensor.shape[place.dim]
    return each.reshape([-1 if dim == place.dim else 1 for dim in range(tensor.dim())]).expand(tensor.shape)


def follow(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], places: list[Place | None]
) -> tuple[list[tuple[Tensor, Place]], list[Tensor]]:
    """Run a function on leaves with places, in place if it works so, and follow it: results with places, and leaves."""
    follower = Follower(N, None, {})
    tensors = list(find_tensors(args, kwargs))
    leaves = [
        t.detach().clone().requires_grad_() for t, place in zip(tensors, places, strict=True) if place is not None
    ]
    fresh = iter(leaves)
    copies = {id(t): t if place is None else next(fresh).clone() for t, place in zip(tensors, places, strict=True)}
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None:
            follower.put(copies[id(tensor)], place)
    given, named = renew(args, copies), renew(kwargs, copies)
    sight = follower.look(list(find_tensors(given, named)))
    result = function(*given, **named)
    if function is Tensor.__setitem__:
        result = given[0]
    follower.follow(sight, MOVES[function], result, given, named)
    found = [(each, follower.place(each)) for each in find_tensors((result,), {})]
    return [(each, place) for each, place in found if place is not None and each.requires_grad], leaves


def renew(value: Any, copies: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return copies[id(value)]
    if isinstance(value, dict):
        return {name: renew(each, copies) for name, each in value.items()}
    return type(value)(renew(each, copies) for each in value) if isinstance(value, (list, tuple)) else value


def assert_apart(results: list[tuple[Tensor, Place]], leaves: list[Tensor], places: list[Place]) -> None:
    """An example's part of every result has no gradient in other examples' parts of the arguments."""
    for result, place in results:
        weights = torch.randn(result.shape, dtype=result.dtype)
        for example in range(N):
            mine = (result * weights * (owners(result, place) == example)).sum()
            total = mine.real if mine.is_complex() else mine
            gradients = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            for leaf, gradient, where in zip(leaves, gradients, places, strict=True):
                if gradient is not None:
                    others = gradient[owners(leaf, where) != example].nan_to_num()  # a division by zero says nothing
                    if others.any():
                        raise Mixed(f"example {example} of the result at {place}")


def shapes(place: Place) -> list[tuple[tuple[int, ...], int]]:
    """Tensors of one to four dimensions with the examples in each of them."""
    every = [(dims, dim) for dims in range(1, 5) for dim in range(dims)]
    return [(tuple(length(place) if each == dim else N for each in range(dims)), dim) for dims, dim in every]


def arguments(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """What functions may be given besides their first argument."""
    n = shape[0]
    numbers = [(), (0,), (1,), (-1,), (2,), (0, 1), (1, 0), (2, 1), (1, 2), ((0, 1),), ((1, 2),), (2, 1, True)]
    lists = [(shape[::-1],), ((-1,),), ((-1, N),), ((N, -1),), ((n, -1),), (2, 0, 1), (1, 2, 0), ([0, 2],), (1, 0, 2)]
    others = [(2.0, 1), (2, 0), (2, -1), (None, 0), ((1, 1),), ((1, 0, 0, 1),), ((0, 0, 1, 1),), (3, 2), ("bij->bji",)]
    return [*numbers, *lists, *others]


class Mixed(Exception):
    """An example's part of a result has a gradient in another example's part of an argument."""


FUNCTIONS = list({name_of(function): function for function in MOVES}.values())
SHARES = [pytest.param(0.01, id="some"), pytest.param(1.0, id="all", marks=pytest.mark.slow)]


def follows(function: Callable[..., Any], args: list[Any], places: list[Place | None]) -> bool:
    """Whether torch takes these arguments and the examples were followed, after holding that against gradients."""
    try:
        results, leaves = follow(function, args, {}, places)
        assert_apart(results, leaves, [place for place in places if place is not None])
    except Mixed as error:
        raise AssertionError(f"{name_of(function)}{args[1:]} on {tuple(args[0].shape)} at {places}: {error}") from error
    except Exception:  # noqa: BLE001 – torch refuses these arguments, in any way
        return False
    return bool(results)


@pytest.mark.parametrize("fold", range(len(FOLDS)))
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.filterwarnings("ignore")
def test_functions_of_one_tensor(fold: int, share: float) -> None:
    """Every function, on every shape, with all kinds of arguments; most combinations are refused by torch."""
    torch.manual_seed(0)
    chance, followed = Random(fold), 0
    for function, (shape, dim), rest in product(FUNCTIONS, shapes(FOLDS[fold]), range(len(arguments((N,))))):
        if chance.random() < share:
            tensor = torch.rand(shape, dtype=torch.float64) + 0.1
            followed += follows(function, [tensor, *arguments(shape)[rest]], [FOLDS[fold].at(dim)])
    assert followed > 3000 * share


@pytest.mark.parametrize("fold", range(len(FOLDS)))
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.filterwarnings("ignore")
def test_functions_of_two_tensors(fold: int, share: float) -> None:
    """Every function of two tensors with the examples in any dimension of each, or in one of them alone."""
    torch.manual_seed(0)
    chance, followed = Random(fold), 0
    every = [(dims, dim) for dims in range(1, 5) for dim in range(-1, dims)]
    for function, left, right in product(FUNCTIONS, every, every):
        if chance.random() < share and max(left[1], right[1]) >= 0:
            long = length(FOLDS[fold])
            tensors = [
                torch.rand([long if each == dim else N for each in range(dims)], dtype=torch.float64) + 0.1
                for dims, dim in (left, right)
            ]
            followed += follows(
                function, tensors, [None if dim < 0 else FOLDS[fold].at(dim) for _, dim in (left, right)]
            )
    assert followed > 1000 * share


X = torch.rand(N, N, N, dtype=torch.float64)
ROWS = torch.arange(N)
INDICES: dict[str, Any] = {
    "pairs that keep the examples": (ROWS, torch.tensor([2, 0, 1])),
    "pairs with a dimension": (ROWS.unsqueeze(1), torch.tensor([[2, 0], [1, 1], [0, 2]])),
    "another dimension": (slice(None), torch.tensor([2, 0, 0])),
    "numbers between": (ROWS, 0, torch.tensor([2, 0, 1])),
    "something between": (torch.tensor([0, 1]), slice(None), torch.tensor([2, 0])),
    "a permutation": torch.tensor([2, 0, 1]),
    "a mask": torch.tensor([[True, False, True], [False, False, True], [True, True, True]]),
    "a mask of rows": torch.tensor([True, False, True]),
    "a part": slice(1, None),
    "a new dimension": (None, ..., 0),
    "a list": [2, 0, 1],
    "tensors far apart": (ROWS, None, torch.tensor([1, 2, 0])),
}


@pytest.mark.parametrize("dim", range(N))
@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str, dim: int) -> None:
    for index in (INDICES[name], (..., *INDICES[name]) if isinstance(INDICES[name], tuple) and dim else INDICES[name]):
        try:
            results, leaves = follow(Tensor.__getitem__, [X, index], {}, index_places_of(index, Place(dim)))
        except IndexError:
            continue
        assert_apart(results, leaves, [Place(dim)])
        if dim == 0 and name != "something between":
            assert results


def index_places_of(index: Any, place: Place) -> list[Place | None]:
    return [place, *(None for _ in find_tensors((index,), {}))]


def test_values_decide_along_the_examples() -> None:
    """The same index tensor keeps the examples or moves them, by what it holds; both are known."""
    for order in ([0, 1, 2], [2, 0, 1]):
        ((_, place),), _ = follow(Tensor.__getitem__, [X, torch.tensor(order)], {}, [Place(), None])
        assert place.list_owners(N, X.device).tolist() == order


@pytest.mark.parametrize("value_dim", [0, 1])
def test_assignment_keeps_or_loses_the_examples(value_dim: int) -> None:
    """A value whose examples are elsewhere makes the whole tensor, and its views, unknown."""
    follower = Follower(N, None, {})
    target, value = torch.zeros(N, N, N), torch.rand(N, N, requires_grad=True) * 1
    view = target.transpose(0, 1)
    follower.put(target, Place(0))
    follower.put(view, Place(1))
    follower.put(value, Place(value_dim))
    sight = follower.look([target, value])
    target[:, 0] = value
    follower.follow(sight, MOVES[Tensor.__setitem__], target, (target, (slice(None), 0), value), {})
    assert (follower.place(target) is not None) is (value_dim == 0)
    assert follower.place(view) is None  # it was written to, and what became of it is not known


CALLS: dict[str, tuple[Callable[..., Any], list[Any], list[Place | None]]] = {
    "where": (torch.where, [X > 0.5, X, 1 - X], [None, Place(), Place()]),
    "attention": (F.scaled_dot_product_attention, [X, X + 1, X + 2], [Place(), Place(), Place()]),
    "einsum": (torch.einsum, ["bij,bjk->bik", X, X + 1], [Place(), Place()]),
    "einsum with dots": (torch.einsum, ["...ij,...jk->...ik", X, X + 1], [Place(), Place()]),
    "concatenated": (torch.cat, [[X, X + 1], 1], [Place(), Place()]),
    "stacked": (torch.stack, [[X, X + 1], 1], [Place(), Place()]),
    "gathered": (torch.gather, [X, 1, torch.randint(N, (N, 2, N))], [Place(), None]),
    "taken": (torch.take_along_dim, [X, torch.randint(N, (N, 2, N)), 1], [Place(), None]),
    "scattered": (torch.scatter_add, [X * 0, 1, torch.randint(N, (N, N, N)), X], [None, None, Place()]),
    "added by rows": (torch.index_add, [X * 0, 0, ROWS, X], [None, None, Place()]),
    "entropy": (F.cross_entropy, [X, torch.randint(N, (N, N)), None, None, -100, None, "none"], [Place(), None]),
    "lookup": (torch.baddbmm, [X, X + 1, X + 2], [Place(), Place(), Place()]),
    "layer norm": (F.layer_norm, [X, (N,)], [Place(1)]),
    "convolution": (F.conv1d, [X, torch.rand(N, N, 2, dtype=torch.float64)], [Place(), None]),
    "roll": (torch.roll, [X, 1, 1], [Place()]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_followed(name: str) -> None:
    function, args, places = CALLS[name]
    results, leaves = follow(function, args, {}, places)
    assert results
    assert_apart(results, leaves, [place for place in places if place is not None])


LOST: dict[str, tuple[Callable[..., Any], list[Any], list[Place | None]]] = {
    "a sum over the examples": (torch.sum, [X, 0], [Place()]),
    "softmax over the examples": (torch.softmax, [X, 0], [Place()]),
    "a gather along the batch": (torch.gather, [X, 0, torch.randint(N, (N, N, N))], [Place(), None]),
    "a transposed sum": (torch.add, [X, X + 1], [Place(0), Place(1)]),
    "a product over the examples": (torch.matmul, [X, X + 1], [Place(2), None]),
    "examples times examples": (torch.matmul, [X[0], X[1]], [Place(0), Place(1)]),
    "rows added to others": (torch.index_add, [X * 0, 0, torch.tensor([1, 0, 2]), X], [None, None, Place()]),
    "rolled examples": (torch.roll, [X, 1, 0], [Place()]),
    "flipped examples": (Tensor.flip, [X, 1, 0], [Place()]),
    "all entries rolled": (torch.roll, [X, 1], [Place()]),
    "statistics of the batch": (F.batch_norm, [X, None, None, None, None, True], [Place()]),
    "a mean of losses": (F.cross_entropy, [X[0], torch.randint(N, (N,))], [Place(), None]),
    "normalised over the examples": (F.layer_norm, [X, (N, N, N)], [Place()]),
    "one example": (Tensor.__getitem__, [X, 1], [Place()]),
}


@pytest.mark.parametrize("name", LOST)
def test_calls_that_lose_the_examples(name: str) -> None:
    function, args, places = LOST[name]
    results, _ = follow(function, args, {}, places)
    assert not results
