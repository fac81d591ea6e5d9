"""Checkpoints, mixed precision, compiled modules, and parameters that reach autograd past the recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from tests.gradients.oracle import assert_matches, assert_same_state, batch_of, check, singles, squared, state_of


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 6))
        self.last = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.tanh(self.first(x))
        return self.last(checkpoint(self.middle, steps, use_reentrant=self.reentrant))


def test_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    engine, model = BookKeeping(), Checkpointed(reentrant=False)
    for size in (4, 5):
        check(engine, model, torch.randn(size, 5), size)
    assert not caplog.records


def test_reentrant_checkpoint_is_refused_and_leaves_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = Checkpointed(reentrant=True)
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match="use_reentrant=False"):
        BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch_of(torch.randn(4, 5), 4))
    assert_same_state(before, state_of(model))
    assert "reentrant" in caplog.text


class Doubled(torch.autograd.Function):
    """A custom function, invisible to the recording."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * g * weight, (2 * g * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.linear(x), self.weight)


class Rounded(torch.autograd.Function):
    """A weight of few digits, whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.mul(4).round().div(4)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantised(nn.Module):
    """Of a weight, of an input, and of a weight that is as long as some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, Rounded.apply(self.first.weight), self.first.bias)
        return self.last(Doubled.apply(hidden, self.scale)) * Rounded.apply(self.scale) + self.scale


@pytest.mark.parametrize("build", [Custom, Quantised])
def test_a_custom_function_alone_is_run_example_by_example(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A gradient that bypasses the recording would escape clipping; only that one function leaves the books."""
    torch.manual_seed(0)
    engine, model = BookKeeping(), build()
    for size in (4, 1, 3, 8, 4):
        check(engine, model, torch.randn(size, 5), size)
    assert not caplog.records


def test_a_bad_example_in_a_custom_function_stays_alone() -> None:
    torch.manual_seed(0)
    model, x = Quantised(), torch.randn(4, 5)
    x[1] = float("nan")
    found = BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch_of(x, 4))
    rows = singles(model, squared, batch_of(x, 4))
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    assert torch.isfinite(found.norms).tolist() == [True, False, True, True]
    torch.testing.assert_close(found.norms[[0, 2, 3]], norms[[0, 2, 3]])


class Twice(nn.Module):
    """A result that one function made is given to another one before any operation sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(5, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        once = Doubled.apply(self.linear(x), self.weight)
        twice = Doubled.apply(once, self.weight)
        return twice + once


def test_ways_that_are_found_twice_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check(BookKeeping(), Twice(), torch.randn(4, 5), 4)
    assert "not all ways" in caplog.text


@pytest.mark.parametrize("build", [Custom, Quantised])
def test_parameter_in_a_custom_function_is_recorded_in_a_loop_of_ones_own(build: Any) -> None:
    torch.manual_seed(0)
    engine, model = BookKeeping(), build()
    objective = Objective(model, squared)
    for _ in range(2):
        data = torch.randn(4, 5)
        recorder = engine.record(objective, list(model.parameters()), batch_of(data, 4))
        with recorder:
            losses = squared(model, data)
        assert_matches(recorder.differentiate(losses), singles(model, squared, batch_of(data, 4)), 1e-4)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(5 * 2, 2, 8, 0.0, batch_first=True)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(self.conv(x).transpose(1, 2))
        return self.last(self.attention(torch.cat([steps, steps], -1))[..., :5])


def test_autocast_has_float32_norms(caplog: pytest.LogCaptureFixture) -> None:
    def mixed(model: nn.Module, data: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squared(model, data)

    torch.manual_seed(0)
    model, batch = Steps(), batch_of(torch.randn(4, 3, 8), 4)
    parameters = list(model.parameters())
    exact = BookKeeping().differentiate(Objective(model, squared), parameters, batch)
    result = BookKeeping().differentiate(Objective(model, mixed), parameters, batch)
    assert result.norms.dtype == torch.float32
    torch.testing.assert_close(result.norms, exact.norms, rtol=0.05, atol=0)
    for mine, wanted in zip(result.weighted_sum(torch.ones(4)), exact.weighted_sum(torch.ones(4)), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, wanted, rtol=0.1, atol=0.05 * float(wanted.abs().max()) + 1e-3)
    assert not caplog.records


def test_compiled_module(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    check(BookKeeping(), torch.compile(model, backend="eager"), torch.randn(4, 5), 4)
    assert not [record for record in caplog.records if record.name == "sordino"]


def test_description_names_every_parameter_and_its_rule() -> None:
    torch.manual_seed(0)
    model, batch = Steps(), batch_of(torch.randn(4, 3, 8), 4)
    parameters = list(model.parameters())
    rows = BookKeeping().describe(Objective(model, squared), parameters, batch)
    assert {row.parameter for row in rows} == {name for name, _ in model.named_parameters()}
    assert all(row.bytes_per_example > 0 and row.rule and row.operation for row in rows)


def test_description_of_a_model_without_rules_says_why() -> None:
    model = Twice()
    rows = BookKeeping().describe(Objective(model, squared), list(model.parameters()), batch_of(torch.randn(4, 5), 4))
    assert len(rows) == 1
    assert "not all ways" in rows[0].operation


def test_microbatch_follows_the_memory_of_an_example() -> None:
    def chosen(length: int) -> int:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine, parameters = BookKeeping(), list(model.parameters())
        engine.differentiate(Objective(model, squared), parameters, batch_of(torch.randn(2, length, 8), 2))
        return engine.microbatch(parameters)

    assert chosen(4) == 2048
    assert chosen(2_000) == 128
    assert 16 <= chosen(50_000) < 128


@pytest.mark.slow
def test_microbatch_of_a_recurrent_model_is_larger() -> None:
    def chosen(length: int) -> int:
        model = nn.GRU(8, 8, batch_first=True)
        engine, parameters = BookKeeping(), list(model.parameters())
        objective = Objective(model, lambda model, batch: model(batch)[0].square().sum((1, 2)))
        engine.differentiate(objective, parameters, batch_of(torch.randn(2, length, 8), 2))
        return engine.microbatch(parameters)

    assert chosen(1_000) == 512
    assert 16 <= chosen(50_000) < 128


def test_microbatch_of_a_wide_first_layer_is_held_by_its_inputs() -> None:
    def chosen(width: int) -> int:
        model = nn.Linear(width, 2)
        engine, parameters = BookKeeping(), list(model.parameters())
        engine.differentiate(Objective(model, squared), parameters, batch_of(torch.randn(2, width), 2))
        return engine.microbatch(parameters)

    assert chosen(8) == chosen(4_000) == 2048
    assert chosen(16_384) == 1024
    assert chosen(1_000_000) == 128
