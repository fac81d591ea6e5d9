"""What a hostile review of following broke: calls that a rule mistook, and owned rows that a rule took for examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.following import Follower
from sordino.gradients.bookkeeping.moves import MOVES
from sordino.gradients.bookkeeping.places import Place
from sordino.gradients.bookkeeping.recording import Recording
from sordino.gradients.engine import Batch, Objective
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.bookkeeping.test_moves import assert_apart, follow
from tests.gradients.bookkeeping.test_soundness import agree, doubles
from tests.gradients.oracle import assert_matches, singles, squared

N = 3


def square(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_in_another_order(mode: str) -> None:
    """As many bags as examples, but not in their order: each example's tokens and gradients are its own."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        order = tokens[:, 0].argsort(stable=True)
        return torch.tanh(m.a(tokens[order]))[order.argsort()]

    torch.manual_seed(0)
    model = Apply(forward, a=nn.EmbeddingBag(9, 4, mode=mode, padding_idx=2)).double()
    agree(model, [(torch.tensor([[7, 1, 2], [3, 3, 3], [5, 0, 1], [1, 2, 4]]),)], squared)


HIDDEN = [0, 1, 2]
MIXED: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any], list[Place | None]]] = {
    "a dimension that numpy counts": (torch.sort, [square(N, N), np.int64(0)], {}, [Place()]),
    "a dimension that a tensor counts": (torch.sort, [square(N, N), torch.tensor(0)], {}, [Place(), None]),
    "a list for a tuple": (Tensor.__getitem__, [square(N, N, N, N), [HIDDEN, HIDDEN]], {}, [Place(1)]),
    "a list of numbers for a tuple": (
        Tensor.__getitem__,
        [square(N, N, N, N), [torch.tensor(0), torch.tensor(1)]],
        {},
        [Place(1), None, None],
    ),
    "weights of classes": (
        F.multilabel_soft_margin_loss,
        [square(N, N), torch.ones(N, N, dtype=torch.float64), square(N)],
        {"reduction": "none"},
        [None, None, Place()],
    ),
    "a variance without the last dimension": (
        F.gaussian_nll_loss,
        [square(N, N), square(N, N), square(N)],
        {"reduction": "none"},
        [None, None, Place()],
    ),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_calls_that_mix_examples(name: str) -> None:
    """Whatever is followed is right: nothing, for these."""
    function, args, kwargs, places = MIXED[name]
    results, leaves = follow(function, args, kwargs, places)
    assert_apart(results, leaves, [place for place in places if place is not None])


def test_distances_of_the_user() -> None:
    """No mode sees what a function that the user hands to torch does with the examples."""
    assert F.triplet_margin_with_distance_loss not in MOVES


def one_result(y: Tensor) -> Tensor:
    return torch.native_dropout(y, 0.0, True)[0]


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "a tuple of results": one_result,
    "factors by place and name": lambda y: torch.addmm(y.new_zeros(N), y[:, 0], mat2=torch.eye(N, dtype=y.dtype)),
    "no pieces": lambda y: y + len(y[:, :0].unbind(1)),
    "a ragged list": lambda y: y[[list(range(len(y))), [0]]],
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_calls_that_no_rule_expects(name: str) -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: UNUSUAL[name](m.a(x)), a=nn.Linear(N, N)).double()
    agree(model, [(doubles(N, N, N),)], squared)


class Adding(Tensor):
    """Adds the rows of its neighbour to each other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.as_subclass(Tensor) if isinstance(each, Adding) else each for each in args]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain, **(kwargs or {}))
        return result + result.sum(0) if func is torch.add else result


def test_tensors_with_functions_of_their_own() -> None:
    """A constant may turn an addition into anything."""
    follower = Follower(N, None, {})
    x = square(N, N).requires_grad_() * 1
    follower.put(x, Place())
    other = torch.ones(()).as_subclass(Adding)
    result = torch.add(x, other)
    follower.follow(follower.look([x, other]), MOVES[torch.add], result, (x, other), {})
    assert follower.place(result) is None


class Summing:
    """No tensor, and yet torch asks it what an addition is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] + args[0].sum(0)


def test_objects_with_functions_of_their_own() -> None:
    x = square(N, N)
    weight = nn.Parameter(square(N, N))
    recording = Recording([weight], [], x, N, frozenset())
    with recording:
        hidden = F.linear(x, weight)
        losses = torch.add(hidden, Summing()).sum(1)  # type: ignore[call-overload]
    assert recording.follower is not None
    assert recording.follower.place(hidden) is not None
    assert not recording.follower.reaches(losses)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_as_data() -> None:
    torch.manual_seed(0)
    rows = [doubles(2, N), doubles(3, N), doubles(1, N)]
    model = Apply(lambda m, x: m.a(x.to_padded_tensor(0.0)[:, :1]), a=nn.Linear(N, N)).double()
    batch = Batch((torch.nested.nested_tensor(rows),), N, lambda i: (torch.nested.nested_tensor(rows[i : i + 1]),))
    found = BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch)
    assert_matches(found, singles(model, squared, batch), 1e-9)
