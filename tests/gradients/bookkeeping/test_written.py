"""Functions of the user's own, of which only the way back is known: exact, or left to vmap or a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping, unseen, written
from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.engine import Objective
from sordino.gradients.rules.linear import FORM_BYTES
from tests.gradients.oracle import batch_of, check, singles, squared


class Affine(torch.autograd.Function):
    """A linear layer by hand, with a bias and a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * (x @ weight.t()) + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        rows, inputs = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        return ctx.scale * g @ weight, None, ctx.scale * rows.t() @ inputs, rows.sum(0)


class Changing(Affine):
    """The same, which changes what it is given and keeps its input as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.x, ctx.weight, ctx.scale = x, weight, scale
        return scale * (x @ weight.t()) + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        g = gradients[0].clone().mul_(ctx.scale)
        return g @ ctx.weight, None, g.t() @ ctx.x, g.div_(ctx.scale).sum(0)


class Cut(Affine):
    """With a mask of which entries pass, as of a unit that is cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        output = x @ weight.t() + bias
        ctx.save_for_backward(x, weight, output > 0)
        return output.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, passes = ctx.saved_tensors
        g = torch.where(passes, gradients[0], 0)
        return g @ weight, None, g.t() @ x, g.sum(0)


class Folded(Affine):
    """What it saves has no dimension for examples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x.t().contiguous(), weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (turned, weight) = gradients, ctx.saved_tensors
        return g @ weight, None, (turned @ g).t(), g.sum(0)


class Choosing(Affine):
    """A backward pass that asks for values, which vmap cannot."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if float(gradients[0].abs().sum()) == 0:
            return None, None, None, None
        return Affine.backward(ctx, *gradients)


class Mixing(Affine):
    """The gradient of the weight has a part of the other examples, but none for the first input."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        return ctx.scale * g @ weight, None, ctx.scale * g.t() @ (x - x.mean(0)), g.sum(0)


class ByHand(nn.Module):
    def __init__(self, function: Any, before: int, after: int, uses: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(before, before), nn.Linear(after, 2)
        self.weight, self.bias = nn.Parameter(torch.randn(after, before)), nn.Parameter(torch.randn(after))
        self.idle = nn.Parameter(torch.randn(3))
        self.function, self.uses = function, uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.uses):
            h = self.function.apply(h, 1.5, self.weight, self.bias).tanh()
        output: Tensor = self.last(h)
        return output


@settings(max_examples=40)
@given(
    size=st.integers(1, 5),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    rows=st.integers(0, 3),
    double=st.booleans(),
    blocks=st.booleans(),
)
def test_each_example_alone(size: int, before: int, after: int, rows: int, double: bool, blocks: bool) -> None:
    torch.manual_seed(0)
    model, shape = ByHand(Affine, before, after), (size, *([rows] if rows else []), before)
    dtype = torch.float64 if double else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        if blocks:  # as if the gradients were too large to keep
            patch.setattr(written, "FORM_BYTES", 0)
            patch.setattr(unseen, "WHOLE_BYTES", 0)
        engine = BookKeeping()
        for _ in range(2):
            result = check(engine, model.to(dtype), torch.randn(shape, dtype=dtype), size)
    # One number for each weight of a row leaves two layouts, of which vmap's loop is right.
    assert isinstance(result, Book) or min(before, after) == 1 or blocks


def manner_of(model: nn.Module, x: Tensor) -> set[str]:
    found = BookKeeping().describe(Objective(model, squared), list(model.parameters()), batch_of(x, len(x)))
    return {row.rule for row in found if row.operation == unseen.UNSEEN}


@pytest.mark.parametrize("function", [Affine, Changing, Cut])
@pytest.mark.parametrize("bound", [FORM_BYTES, 0])
def test_by_vmap_over_what_was_saved(function: Any, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(written, "FORM_BYTES", bound)
    monkeypatch.setattr(unseen, "pull_each", None)  # nothing is run for one example after the other
    model, x = ByHand(function, 4, 6), torch.randn(5, 4)
    assert isinstance(check(BookKeeping(), model, x, 5), Book)
    assert manner_of(model, x) == {"sums" if bound else "its backward by vmap"}


@pytest.mark.parametrize("function", [Folded, Choosing])
def test_what_cannot_be_run_so_is_run_for_each_example(function: Any) -> None:
    torch.manual_seed(0)
    assert isinstance(check(BookKeeping(), ByHand(function, 4, 6), torch.randn(5, 4), 5), Book)


def test_uses_of_one_parameter_are_added() -> None:
    torch.manual_seed(0)
    assert isinstance(check(BookKeeping(), ByHand(Affine, 4, 4, uses=2), torch.randn(5, 4), 5), Book)


@pytest.mark.parametrize("sizes", [(5, 5), (4, 5), (5, 4)])
def test_a_weight_as_long_as_the_batch_is_not_cut(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    check(BookKeeping(), ByHand(Affine, *sizes), torch.randn(5, sizes[0]), 5)


def test_examples_that_have_part_in_each_other_are_not_taken_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the way back mixes, so that a loop has another answer: what counts is what the function does to all."""
    torch.manual_seed(0)
    model, x = ByHand(Mixing, 4, 6), torch.randn(5, 4)
    asked: list[bool] = []
    pull_each: Callable[..., Any] = unseen.pull_each

    def ask(*given: Any) -> Any:
        asked.append(True)
        return pull_each(*given)

    monkeypatch.setattr(unseen, "pull_each", ask)
    BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch_of(x, 5))
    assert asked


def test_a_bad_example_stays_alone() -> None:
    torch.manual_seed(0)
    model, x = ByHand(Affine, 4, 6), torch.randn(5, 4)
    expected = singles(model, squared, batch_of(x, 5))
    x[2, 1] = torch.nan
    result = BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch_of(x, 5))
    assert (~torch.isfinite(result.norms)).tolist() == [False, False, True, False, False]
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    for place, total in enumerate(result.weighted_sum(weights)):
        torch.testing.assert_close(total, sum(row[place] for i, row in enumerate(expected) if i != 2))


def test_an_empty_draw() -> None:
    model = ByHand(Affine, 4, 6)
    result = BookKeeping().differentiate(
        Objective(model, squared), list(model.parameters()), batch_of(torch.zeros(0, 4), 0)
    )
    assert len(result.norms) == 0
    assert all(not total.any() for total in result.weighted_sum(torch.zeros(0)))
