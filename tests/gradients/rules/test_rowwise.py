"""Weights made row by row go back in closed form, with the gradients of autograd; others go back by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune as pruning
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from sordino.gradients.rules import formulas, pulled, rowwise
from sordino.gradients.rules.linear import Outer
from tests.gradients.oracle import assert_matches, batch_of, check, singles

Make = Callable[[Tensor, Tensor], Tensor]


def standardise(weight: Tensor, gain: Tensor) -> Tensor:
    mean = weight.mean(dim=(1, 2, 3), keepdim=True)
    variance = weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
    return (weight - mean) * (gain * torch.rsqrt(variance * weight[0].numel() + 1e-4))


def bend(weight: Tensor, gain: Tensor) -> Tensor:
    """Entries that are not scaled alike, one number made from another, and a gain that is used twice."""
    longest = (weight.tanh() * gain).square().sum((1, 2, 3), keepdim=True)
    return (weight * longest.sqrt()).tanh() + gain - torch.linalg.vector_norm(weight, dim=(1, 2, 3), keepdim=True) / 3


BY_ROWS: dict[str, Make] = {
    "standardised": standardise,
    "bent": bend,
    "normalised": lambda w, g: w / (torch.linalg.vector_norm(w, dim=(1, 2, 3), keepdim=True) + 1),
    "scaled": lambda w, g: 2.0 * w * g,
    "centred twice": lambda w, g: standardise(w - w.mean(dim=(1, 2, 3), keepdim=True), g.exp()),
    "by a constant": lambda w, g: w * g * torch.ones(1),
    "by a mask alone": lambda w, g: w * (torch.arange(27).reshape(3, 3, 3) % 2) + 0 * g,
    "by all": lambda w, g: w / (w.norm() + g.sum()),
    "a number made in any way": lambda w, g: w / (w.sort(1)[0][0, 1].prod() + g.flip(0).cumsum(0)[2].squeeze()),
    "without a weight": lambda w, g: (w * 0.0) + w.amax(dim=(1, 2, 3), keepdim=True) * g,
}
OTHERWISE: dict[str, Make] = {
    "by columns": lambda w, g: w - w.mean(dim=0, keepdim=True),
    "by all and by rows": lambda w, g: w / (w.norm() + 1) * g,
    "by one dimension of several": lambda w, g: w - w.mean(dim=(2, 3), keepdim=True),
    "a number of another row": lambda w, g: w * g.flip(0),
    "rearranged": lambda w, g: w.flip(1) * g,
    "sorted": lambda w, g: w.sort(1)[0] * g,
    "multiplied by a matrix": lambda w, g: (w * g) @ torch.ones(3, 3, dtype=w.dtype).tril(),
}


class Convolution(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.rand(4, 1, 1, 1) + 0.5)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.make(self.weight, self.gain), padding=1)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The ways back that are found, or None where there is none."""
    found: list[object] = []
    real = formulas.find_rows

    def look(*args: Any) -> object:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr("sordino.gradients.bookkeeping.book.find_rows", look)
    return found


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    found = watch(monkeypatch)
    for size in (6, 1):
        check(BookKeeping(), Convolution(BY_ROWS[name]).double(), torch.randn(size, 3, 5, 5).double(), size, rtol=1e-9)
    check(BookKeeping(), Convolution(BY_ROWS[name]), torch.randn(6, 3, 5, 5), 6)
    assert found
    assert all(each is not None for each in found)


@pytest.mark.parametrize("name", BY_ROWS)
def test_no_gradient_grows_by_more_than_the_gain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of what a row drops is multiplied by it: too small a gain lets that swallow other records."""
    torch.manual_seed(0)
    found = watch(monkeypatch)
    check(BookKeeping(), Convolution(BY_ROWS[name]).double(), torch.randn(4, 3, 5, 5).double(), 4, rtol=1e-9)
    (rows,) = found
    assert isinstance(rows, rowwise.RowMap)
    entries = torch.eye(4 * 27, dtype=torch.float64)
    gradients = torch.cat(
        [
            entries,
            torch.randn(64, 4 * 27).double(),
            entries.view(-1, 4, 27).sum(2, keepdim=True).expand(-1, 4, 27).flatten(1),
        ]
    )
    pulled = [gradients.new_empty(len(gradients), *p.shape) for p in rows.parameters]
    rows.pull(gradients, pulled)
    for place, each in enumerate(pulled):
        growth = float((each.flatten(1).norm(dim=1) / gradients.norm(dim=1)).max())
        assert growth <= rows.gain(place) * (1 + 1e-9)
        assert rows.gain(place) <= 10 * growth


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_made_by_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    found = watch(monkeypatch)
    check(BookKeeping(), Convolution(OTHERWISE[name]).double(), torch.randn(4, 3, 5, 5).double(), 4, rtol=1e-9)
    assert not any(found)


def test_a_constant_that_was_written_into_is_refused_as_by_torch() -> None:
    model, limit = Convolution(lambda w, g: w.clamp(min=limit) * g), torch.zeros(3, 3, 3)
    parameters, x = list(model.parameters()), torch.randn(4, 3, 5, 5)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses = model(x).flatten(1).square().mean(1)
        limit.add_(1)
        return losses

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(model, x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        BookKeeping().differentiate(Objective(model, loss), parameters, batch_of(x, 4))


@pytest.mark.parametrize("frozen", ["weight", "gain"])
def test_one_of_two_is_frozen(frozen: str) -> None:
    torch.manual_seed(0)
    model = Convolution(standardise)
    getattr(model, frozen).requires_grad_(False)
    check(BookKeeping(), model, torch.randn(4, 3, 5, 5), 4)


def test_weight_norm_goes_back_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    found = watch(monkeypatch)
    check(BookKeeping(), weight_norm(nn.Linear(6, 5)), torch.randn(8, 6), 8)
    check(BookKeeping(), weight_norm(nn.Linear(6, 5), dim=1), torch.randn(8, 6), 8)
    assert [each is None for each in found] == [False, True]


def prune(layer: nn.Linear) -> nn.Module:
    pruned: nn.Module = pruning.random_unstructured(layer, "weight", 0.3)
    return pruned


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (2 * self.weight / self.weight.square().mean().sqrt()).tanh()


LINEAR: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": weight_norm,
    "weight_norm of the whole": lambda layer: weight_norm(layer, dim=None),
    "the old weight_norm": torch.nn.utils.weight_norm,
    "spectral_norm": spectral_norm,
    "pruned": prune,
    "the other way round": lambda layer: Centred(layer.out_features, layer.in_features),
}


@pytest.mark.parametrize("name", LINEAR)
def test_products_are_measured_without_being_formed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = LINEAR[name](nn.Linear(40, 30)).eval()  # or the spectral norm would move on
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), made)
    found = watch(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Outer, "form", lambda *_: pytest.fail("a gradient was formed"))
        check(BookKeeping(), model, torch.randn(6, 8), 6)
    check(BookKeeping(), model.double(), torch.randn(6, 8).double(), 6, rtol=1e-9)
    assert len([each for each in found if each is not None]) == 2


def test_a_direction_that_a_row_drops_is_not_measured_too_short() -> None:
    """An input along the row leaves nothing but rounding: the sum must not be longer than what was measured."""
    torch.manual_seed(0)
    layer = weight_norm(nn.Linear(300, 5, bias=False))
    layer.parametrizations.weight.original0.requires_grad_(False)
    rows = layer.weight.detach()
    x = 1e3 * rows / rows.norm(dim=1, keepdim=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    loss = lambda m, x: m(x).diagonal()  # noqa: E731
    found = BookKeeping().differentiate(Objective(layer, loss), parameters, batch_of(x, 5))
    for i in range(5):
        weights = torch.zeros(5)
        weights[i] = 1
        (total,) = found.weighted_sum(weights)
        assert float(total.norm()) <= float(found.norms[i]) < 2e-3


class Rewritten(nn.Linear):
    """Torch needs nothing more of the constant, so that it may be written after the weight was made."""

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(self.in_features, dtype=x.dtype)
        made = (self.weight + shift).tanh()
        shift.add_(1)
        return F.linear(x, made)


def test_a_constant_that_was_written_since_is_not_read_again() -> None:
    torch.manual_seed(0)
    check(BookKeeping(), Rewritten(40, 30), torch.randn(6, 40), 6)


class Balanced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True))


@pytest.mark.parametrize("size", [1e5, 1e7, 1e8])
def test_squares_that_cancel_are_not_measured_too_short_in_float64(size: float) -> None:
    """Of long inputs that are nearly the same everywhere, squares in doubles left a norm of 1/40 of the true one."""
    torch.manual_seed(0)
    model, x = Balanced(300, 100, bias=False).double(), size + 0.01 * torch.randn(64, 300).double()
    objective = Objective(model, lambda m, x: m(x).sum(1))
    found = BookKeeping().differentiate(objective, list(model.parameters()), batch_of(x, 64))
    lengths = 10 * (x - x.mean(1, keepdim=True)).norm(dim=1)
    assert bool((found.norms >= lengths * (1 - 1e-6)).all())


def test_several_blocks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many gradients are pulled back at a time changes no numbers."""
    torch.manual_seed(0)
    model, x = Convolution(standardise), torch.randn(7, 3, 5, 5)
    weights, sums = torch.rand(7), []
    for entries in (2**19, 250, 27):
        monkeypatch.setattr(rowwise, "CACHED", entries)
        monkeypatch.setattr(rowwise, "CLOSE", entries // 2)
        monkeypatch.setattr(rowwise, "KEPT", 3 * (entries > 100))
        found = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch_of(x, 7))
        sums.append([found.norms, *found.weighted_sum(weights)])
    for whole, *others in zip(*sums, strict=True):
        for parts in others:
            torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)


def test_a_sum_is_handed_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is written into what is handed out."""
    monkeypatch.setattr(rowwise, "KEPT", 0)
    torch.manual_seed(0)
    model, weights = Convolution(standardise), torch.rand(4)
    batch = batch_of(torch.randn(4, 3, 5, 5), 4)
    found = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch)
    first = list(found.weighted_sum(weights))
    copies = [each.clone() for each in first]
    for each in first:
        each.add_(1)
    for copy, again in zip(copies, found.weighted_sum(weights), strict=True):
        torch.testing.assert_close(again, copy)


def test_a_bad_example_stays_alone() -> None:
    torch.manual_seed(0)
    model, x = Convolution(standardise), torch.randn(5, 3, 5, 5)
    x[2, 1] = float("nan")
    found = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch_of(x, 5))
    assert torch.isfinite(found.norms).tolist() == [True, True, False, True, True]
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0])
    good = [0, 1, 3, 4]
    each = singles(model, loss, batch_of(x[good], 4))
    for place, total in enumerate(found.weighted_sum(weights)):
        wanted = sum(weights[i] * row[place] for i, row in zip(good, each, strict=True))
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("by_rows", [True, False])
def test_a_way_back_that_is_not_finite_leaves_a_sum_of_zero(
    kept: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of equal entries has no deviation and no derivative of it: every example is bad, and none contributes."""
    monkeypatch.setattr(rowwise, "KEPT", kept)
    monkeypatch.setattr(pulled, "FORM_BYTES", 2**30 * kept)
    dims = (1, 2, 3) if by_rows else (2, 3)

    def divide(weight: Tensor, gain: Tensor) -> Tensor:
        centred = weight - weight.mean(dims, keepdim=True)
        return weight * gain / (centred.square().mean(dims, keepdim=True).sqrt() + 1)

    model = Convolution(divide)
    nn.init.ones_(model.weight)
    batch = batch_of(torch.randn(4, 3, 5, 5), 4)
    found = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch)
    assert not torch.isfinite(found.norms).any()
    assert all(bool((total == 0).all()) for total in found.weighted_sum(torch.zeros(4)))


def test_a_weight_that_is_used_twice() -> None:
    """Once as it is and once standardised: cross terms are found."""
    torch.manual_seed(0)
    model = Convolution(lambda w, g: standardise(w, g))
    twice = lambda m, x: loss(m, x) + F.conv2d(x, m.weight).flatten(1).square().mean(1)  # noqa: E731
    batch = batch_of(torch.randn(4, 3, 5, 5), 4)
    found = BookKeeping().differentiate(Objective(model, twice), list(model.parameters()), batch)
    assert_matches(found, singles(model, twice, batch), 1e-4)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)
