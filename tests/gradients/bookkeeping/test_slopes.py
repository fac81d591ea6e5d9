"""Losses that take gradients by their own activations, with the graph: book-kept, exactly, or given up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.engine import Objective
from tests.gradients.oracle import Loss, batch_of, check, singles

D = 6


def penalise(scores: Callable[[Tensor], Tensor] = lambda found: found.sum(), by_ones: bool = False) -> Loss:
    """As of a critic: how far the slopes of its scores are from 1."""

    def loss(model: nn.Module, data: Any) -> Tensor:
        x = (0.7 * data).detach().requires_grad_()
        found = model(x)
        if by_ones:
            (slope,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True, retain_graph=True)
        else:
            (slope,) = torch.autograd.grad(scores(found), [x], create_graph=True)
        lengths = slope.flatten(1).square().sum(1).add(1e-3).sqrt()
        return found.flatten(1).mean(1) + 3 * (lengths - 1).square()

    return loss


class Tied(nn.Module):
    """One weight, twice, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(D, D), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.layer(x).tanh())
        return output


class ByHand(nn.Module):
    """Parameters in products, sums and quotients."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.rand(D) + 1)

    def forward(self, x: Tensor) -> Tensor:
        h = ((x @ self.w + self.v) * self.v).sigmoid()
        return ((h / self.v - self.v.mean()).pow(2) @ self.w) / D


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Softplus(), nn.Flatten(), nn.LazyLinear(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: stack(nn.Linear(D, 7), nn.LeakyReLU(0.2), nn.Linear(7, 5, bias=False)), (D,)),
    "rows": (lambda: stack(nn.Linear(D, 7), nn.Tanh()), (3, D)),
    "convolutions": (lambda: stack(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ELU(), nn.Conv2d(4, 3, 2)), (2, 6, 7)),
    "groups": (lambda: stack(nn.Conv1d(4, 4, 3, dilation=2, groups=2), nn.GroupNorm(2, 4), nn.Tanh()), (4, 9)),
    "transposed": (lambda: stack(nn.ConvTranspose1d(2, 3, 3, 2, 1, 1), nn.Tanh(), nn.Conv1d(3, 2, 3)), (2, 5)),
    "layer norm": (lambda: stack(nn.Linear(D, 8), nn.LayerNorm(8), nn.Tanh()), (D,)),
    "spectral norm": (lambda: stack(parametrizations.spectral_norm(nn.Linear(D, 7)), nn.Tanh()), (D,)),
    "weight norm": (lambda: stack(parametrizations.weight_norm(nn.Linear(D, 7)), nn.Tanh()), (D,)),
    "slopes": (lambda: stack(nn.Linear(D, 7), nn.PReLU(7), nn.PReLU()), (D,)),
    "tied": (Tied, (D,)),
    "by hand": (ByHand, (D,)),
}


def build(name: str, size: int, double: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(size, *shape)
    model(x)  # lazy layers
    return (model.double(), x.double()) if double else (model, x)


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(MODELS)), size=st.integers(1, 7), double=st.booleans(), by_ones=st.booleans())
def test_slopes_of_scores(name: str, size: int, double: bool, by_ones: bool) -> None:
    model, x = build(name, size, double)
    engine = BookKeeping()
    for _ in range(2):
        result = check(engine, model, x, size, penalise(by_ones=by_ones), 1e-7 if double else 1e-3)
        # A vector as long as the batch may be one number for each example, until a backward pass shows that it is not.
        assert isinstance(result, Book) or (name == "spectral norm" and size in (D, 7))


def slope_of_hidden(model: Any, data: Tensor) -> Tensor:
    """By an activation, of a layer whose own input has no gradient."""
    hidden = model[0](data)
    scores = model[1:](hidden)
    (slope,) = torch.autograd.grad(scores.sum(), hidden, create_graph=True)
    return scores.square().mean(1) + slope.square().sum(1)


def slope_of_slope(model: nn.Module, data: Tensor) -> Tensor:
    """A gradient of a gradient."""
    x = data.detach().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return model(x).mean(1) + second.square().sum(1)


def weighted_slope(model: nn.Module, data: Tensor) -> Tensor:
    """Scores weighted by what the model made of them."""
    x = data.detach().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores, x, scores.softmax(1), create_graph=True)
    return scores.mean(1) + (slope * x).sum(1).square()


def slope_of_losses(model: nn.Module, data: Tensor) -> Tensor:
    """By the inputs, of the losses themselves."""
    x = data.detach().requires_grad_()
    losses = model(x).logsumexp(1)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + slope.norm(dim=1)


@pytest.mark.parametrize("loss", [slope_of_hidden, slope_of_slope, weighted_slope, slope_of_losses])
def test_slopes_of_other_kinds(loss: Loss) -> None:
    model, x = build("layers", 5, double=True)
    assert isinstance(check(BookKeeping(), model, x, 5, loss, 1e-7), Book)


def test_a_size_that_dimensions_share() -> None:
    model, x = build("layers", D, double=True)
    assert isinstance(check(BookKeeping(), model, x, D, penalise(), 1e-7), Book)


def penalise_all(model: nn.Module, data: Tensor) -> Tensor:
    """The slope of a sum that no rule follows: squared, it is no sum of what examples give."""
    x = data.detach().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum().square(), x, create_graph=True)
    return scores.mean(1) + slope.square().sum(1)


def penalise_others(model: nn.Module, data: Tensor) -> Tensor:
    """Slopes of each example's score by all inputs of the batch, which are averaged."""
    x = data.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean(1) + slope.mean(0).square().sum()


def penalise_neighbours(model: nn.Module, data: Tensor) -> Tensor:
    """Slopes that go to the next example."""
    x = data.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean(1) + slope.roll(1, 0).square().sum(1) * model(x)[:, 0]


def penalise_changed_sum(model: nn.Module, data: Tensor) -> Tensor:
    """A sum over the examples that is something else by the time it is differentiated."""
    x = data.detach().requires_grad_()
    scores = model(x)
    total = scores.sum()
    total *= scores.sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    return scores.mean(1) + slope.square().sum(1)


def penalise_common(model: nn.Module, data: Tensor) -> Tensor:
    """The slope of all scores by what is added to all inputs."""
    common = torch.zeros(1, D, requires_grad=True)
    scores = model(data + common)
    (slope,) = torch.autograd.grad(scores.sum(), common, create_graph=True)
    return scores.mean(1) + slope.square().sum()


def penalise_by_first(model: nn.Module, data: Tensor) -> Tensor:
    """The same, by the first example's inputs, which are added to all."""
    first = data[:1].detach().requires_grad_()
    scores = model(data + first)
    (slope,) = torch.autograd.grad(scores.sum(), first, create_graph=True)
    return scores.mean(1) + slope.square().sum()


MIXTURES = [
    penalise_all,
    penalise_others,
    penalise_neighbours,
    penalise_changed_sum,
    penalise_common,
    penalise_by_first,
]


@pytest.mark.parametrize("loss", MIXTURES)
def test_slopes_that_mix_examples_are_not_kept(loss: Loss) -> None:
    """What is done instead is that of one example alone: the probe refuses the model."""
    model, x = build("layers", 4)
    result = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch_of(x, 4))
    assert not isinstance(result, Book)


@pytest.mark.parametrize("start", [False, True])
def test_a_permuted_slope_is_proven_or_given_up(start: bool) -> None:
    """Examples are put into another order and back: nothing mixes."""

    def loss(model: nn.Module, data: Tensor) -> Tensor:
        order = data[:, 0].argsort()
        x = data[order].detach().requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores, x, torch.ones_like(scores) if start else scores, create_graph=True)
        return (scores.mean(1) + slope.square().sum(1))[order.argsort()]

    model, x = build("layers", 5, double=True)
    check(BookKeeping(), model, x, 5, loss, 1e-7)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.LSTM(D, 3, batch_first=True)),
    "rms norm": lambda: nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D)),
    "bilinear": lambda: Bilinear(),
}


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.body = nn.Bilinear(D, D, 2), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.pair(x, self.body(x).tanh())
        return output


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_way_back_is_left_to_a_loop(name: str) -> None:
    torch.manual_seed(0)
    model, x = REFUSED[name](), torch.randn(4, D)
    picked = penalise()
    loss: Loss = picked
    if name == "recurrent":

        def loss(model: nn.Module, data: Any) -> Tensor:
            return picked(lambda x: model(x)[0].flatten(1), data)  # type: ignore[arg-type]

    assert not isinstance(check(BookKeeping(), model, x, 4, loss, 1e-3), Book)


class Functional(nn.Module):
    """A weight that the data made, of which only the bias is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.bias = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(x).mean(0).diag(), self.bias)


def test_a_gradient_that_a_way_back_would_lose_is_not_kept() -> None:
    torch.manual_seed(0)
    model = Functional()
    result = BookKeeping().differentiate(
        Objective(model, penalise()), list(model.parameters()), batch_of(torch.randn(4, D), 4)
    )
    assert not isinstance(result, Book)


def test_a_bad_example_stays_alone_and_nothing_is_left_behind() -> None:
    model, x = build("layers", 5)
    expected = singles(model, penalise(), batch_of(x, 5))
    x[2, 1] = torch.nan
    result = BookKeeping().differentiate(Objective(model, penalise()), list(model.parameters()), batch_of(x, 5))
    assert (~torch.isfinite(result.norms)).tolist() == [False, False, True, False, False]
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    for place, total in enumerate(result.weighted_sum(weights)):
        wanted = sum(row[place] for i, row in enumerate(expected) if i != 2)
        torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-4)


def test_nothing_waits_for_the_garbage_collector() -> None:
    model, x = build("layers", 5)
    engine, objective, seen = BookKeeping(), Objective(model, penalise()), list[ref[Tensor]]()

    class Watched(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(ref(hidden))
            return hidden

    assert isinstance(model, nn.Sequential)
    model.insert(1, Watched())
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # the first one fails before it is known what the loss does
            engine.differentiate(objective, list(model.parameters()), batch_of(x, 5)).weighted_sum(torch.ones(5))
            if len(seen) > 2:
                assert seen[-1]() is None
    finally:
        gc.enable()
    assert len(seen) == 3


def test_batches_of_any_size_one_after_the_other() -> None:
    engine = BookKeeping()
    model, _ = build("layers", 2)
    for size in (1, 4, 2, 1, 6):
        x = torch.randn(size, D)
        check(engine, model, x, size, penalise(), 1e-3)
    result = engine.differentiate(
        Objective(model, penalise()), list(model.parameters()), batch_of(torch.zeros(0, D), 0)
    )
    assert len(result.norms) == 0
