"""What is changed in place after a use, or through a view, and parameters that only lend their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.engine import Objective
from sordino.gradients.vmapped import Vmapped
from tests.gradients.oracle import assert_matches, batch_of, check, singles, squared


class Written(nn.Module):
    """`write` changes an activation in place, with parameters."""

    def __init__(self, write: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.shift, self.number = (nn.Parameter(torch.randn(n)) for n in ((4,), (4,), ()))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x * self.scale).tanh()


def column(model: Written, a: Tensor) -> Tensor:
    a[:, 2].add_(model.number)
    return a


def whole(model: Written, a: Tensor) -> Tensor:
    a.view(-1, 2, 2).add_(model.shift.reshape(2, 2))
    return a


def overlapping(model: Written, a: Tensor) -> Tensor:
    a[:, 2:].add_(model.number)
    a[:, :3].mul_(model.shift[:3])
    return a


def folded(model: Written, a: Tensor) -> Tensor:
    made = nn.functional.linear(a.reshape(-1, 2, 2), model.matrix[:2, :2], model.shift[:2])  # a view of a product
    return nn.functional.relu(made, inplace=True).flatten(1)


def transposed(model: Written, a: Tensor) -> Tensor:
    return torch.einsum("bi,ij->jb", a, model.matrix).mul_(2).t()


@pytest.mark.parametrize("write", [column, whole, overlapping, folded, transposed])
def test_a_gradient_is_found_though_a_view_is_changed_in_place(write: Callable[[Written, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Written(write), torch.randn(3, 4)
    assert isinstance(check(BookKeeping(), model, x, 3), Book)
    batch, parameters = batch_of(x, 3), list(model.parameters())
    recorder = BookKeeping().record(Objective(model, squared), parameters, batch)
    with recorder:
        losses = squared(model, x)
    assert_matches(recorder.differentiate(losses), singles(model, squared, batch), 1e-4)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)),
        (nn.Conv1d(7, 7, 2, bias=False), nn.InstanceNorm1d(7, affine=True), nn.ReLU(inplace=True)),
    ],
)
def test_layers_before_an_in_place_activation_are_trained(layers: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(0)
    assert isinstance(check(BookKeeping(), nn.Sequential(*layers), torch.randn(3, 7, 4), 3), Book)


@pytest.mark.parametrize(
    "lend",
    [
        lambda m: m.shift.expand_as(m.matrix),
        lambda m: m.matrix.reshape_as(m.other),
        lambda m: m.matrix.t().reshape_as(m.other) * m.shift.type_as(m.number),
    ],
)
def test_a_parameter_that_only_lends_its_shape_has_no_gradient(lend: Callable[[Written], Tensor]) -> None:
    torch.manual_seed(0)
    model = Written(lambda model, a: a @ lend(model))
    model.other = nn.Parameter(torch.randn(4, 4))
    assert isinstance(check(BookKeeping(), model, torch.randn(3, 4), 3), Book)


def test_a_parameter_written_into_what_others_made_is_refused_in_a_loop_of_the_users() -> None:
    """Its gradient would be dropped: what was made would not be known to be made from it."""

    def write(model: Written, a: Tensor) -> Tensor:
        made = model.matrix.clone()
        made.mul_(model.shift)
        return a @ made

    torch.manual_seed(0)
    model, x = Written(write), torch.randn(3, 4)
    check(BookKeeping(), model, x, 3)  # by vmap
    recorder = BookKeeping().record(Objective(model, squared), list(model.parameters()), batch_of(x, 3))
    with pytest.raises(UnsupportedModel, match="without in-place changes"), recorder:
        squared(model, x)


def test_distances_between_parameters_are_not_left_to_vmap() -> None:
    """Of which torch's own rule is wrong there."""
    model, x = Written(lambda model, a: a @ torch.cdist(model.matrix, model.matrix + 1)), torch.randn(3, 4)
    with pytest.raises(UnsupportedModel, match="cdist"):
        Vmapped().differentiate(Objective(model, squared), list(model.parameters()), batch_of(x, 3))


class Scale(torch.autograd.Function):
    """A function of the user's own that uses a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


def test_a_record_that_is_not_finite_leaves_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its batch cannot be book-kept, which nobody may learn: the line would tell that it was drawn (law 7)."""
    torch.manual_seed(0)
    model, x = Written(lambda model, a: Scale.apply(a, model.shift)), torch.randn(3, 4)  # type: ignore[no-untyped-call]
    engine, objective, parameters = BookKeeping(), Objective(model, squared), list(model.parameters())
    assert isinstance(engine.differentiate(objective, parameters, batch_of(x, 3)), Book)
    before = len(caplog.records)
    x[1] = torch.inf
    found = engine.differentiate(objective, parameters, batch_of(x, 3))
    assert not isinstance(found, Book)
    assert torch.isfinite(found.norms[[0, 2]]).all()
    assert caplog.records[before:] == []


def rotated(model: Written, a: Tensor) -> Tensor:
    """As orthogonal fine-tuning makes its rotation: a skew matrix, and a series of its powers."""
    skew = torch.zeros(4, 4, dtype=a.dtype)
    skew[torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])] = model.matrix.flatten()[:3]
    skew = skew - skew.T
    made = torch.eye(4, dtype=a.dtype)
    made.add_(skew, alpha=2.0)
    made.add_(skew @ skew)
    return a @ made


def viewed_before(model: Written, a: Tensor) -> Tensor:
    """A view of a tensor that parameters are then written into sees them too."""
    made = torch.ones(4, 4, dtype=a.dtype)
    made[0] = model.shift
    row = made[1]
    made[1] += model.scale
    return a @ made + row


def used_between(model: Written, a: Tensor) -> Tensor:
    """What was used before the second writing has the gradients of before it."""
    made = torch.eye(4, dtype=a.dtype)
    made[1] = model.shift
    first = (a.unsqueeze(1) + made).sum(1)
    made.add_(model.number)
    return first + a @ made


@pytest.mark.parametrize("write", [rotated, viewed_before, used_between])
def test_parameters_written_into_a_constant(
    write: Callable[[Written, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Written(write)
    check(BookKeeping(), model.double(), torch.randn(6, 4, dtype=torch.float64), 6, rtol=1e-9)
    assert ("cannot run this model" in caplog.text) is (write is not rotated)
