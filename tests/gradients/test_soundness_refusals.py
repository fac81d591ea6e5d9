"""What a hostile review broke: what a recording cannot see is refused or left to a loop; no message tells a size."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from tests.gradients.oracle import batch_of, check
from tests.gradients.test_bookkeeping import Apply
from tests.gradients.test_soundness import classified, labels


def test_messages_do_not_tell_the_size_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    caplog.set_level(logging.DEBUG)
    mixing = Apply(lambda m, x: m.a(x) + m.a(x).cumsum(0)[: len(x)].flip(0), a=nn.Linear(4, 3))
    ragged = Apply(lambda m, x: m.a(x[x[:, 0] > -9].repeat(2, 1))[: len(x)], a=nn.Linear(4, 3))
    for model in (mixing, ragged):
        data = (torch.randn(47, 4), labels(47))
        BookKeeping().differentiate(Objective(model, classified), list(model.parameters()), batch_of(data, 47))
    assert caplog.records
    assert all("47" not in record.message and "94" not in record.message for record in caplog.records)


def test_gradient_penalty_keeps_its_second_derivatives() -> None:
    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum(1) + y.sum(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    check(BookKeeping(), model, torch.randn(5, 4), 5, penalised)
    recorder = BookKeeping().record(Objective(model, penalised), list(model.parameters()))
    with recorder, pytest.raises(UnsupportedModel, match="differentiates"):
        penalised(model, torch.randn(5, 4))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.t(), x.t() @ gradients[0]


def test_custom_function_of_a_derived_tensor() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: Product.apply(torch.tanh(m.a(x)), m.w.t()), a=nn.Linear(4, 6), w=(3, 6))
    check(BookKeeping(), model, torch.randn(5, 4), 5)
    recorder = BookKeeping().record(Objective(model, classified), list(model.parameters()))
    with recorder:
        losses = classified(model, (torch.randn(5, 4), labels(5)))
    with pytest.raises(UnsupportedModel, match="custom function"):
        recorder.differentiate(losses)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_batch_statistics_are_refused_in_one_line(affine: bool, trained: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 3))
    model[1].requires_grad_(trained)
    before = model[1].running_mean.clone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    data = (torch.randn(5, 4), labels(5))
    with pytest.raises(UnsupportedModel, match="batch_norm"):
        BookKeeping().differentiate(Objective(model, classified), parameters, batch_of(data, 5))
    with BookKeeping().record(Objective(model, classified), parameters), pytest.raises(UnsupportedModel):
        classified(model, data)
    assert torch.equal(before, model[1].running_mean)


def test_frozen_layers_that_remember_records_are_refused() -> None:
    table = nn.Embedding(7, 4, max_norm=1.0).requires_grad_(False)
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    looked = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 3))
    normalised = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 3))
    for model, data, word in (
        (looked, torch.randint(7, (5, 3)), "max_norm"),
        (normalised, torch.randn(5, 3, 4), "running"),
    ):
        before = [tensor.clone() for tensor in (table.weight, norm.running_mean)]
        parameters = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(UnsupportedModel, match=word):
            BookKeeping().differentiate(Objective(model, classified), parameters, batch_of((data, labels(5)), 5))
        assert torch.equal(before[0], table.weight)
        assert torch.equal(before[1], norm.running_mean)
