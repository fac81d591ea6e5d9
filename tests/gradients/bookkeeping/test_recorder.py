"""A forward pass that the user runs, recorded: the same norms and sums, also where parts cannot be book-kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from tests.gradients.bookkeeping.test_bookkeeping import MODELS, Apply
from tests.gradients.oracle import assert_matches, assert_same_state, batch_of, singles, squared, state_of


def check(model: nn.Module, data: Any, size: int) -> None:
    expected = singles(model, squared, batch_of(data, size))
    before = state_of(model)
    recorder = BookKeeping().record(Objective(model, squared), list(model.parameters()), batch_of(data, size))
    with recorder:
        losses = squared(model, data)
    assert_matches(recorder.differentiate(losses), expected, 1e-4)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_equals_loop(name: str, size: int) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    check(build(), draw(size), size)


def by_rows(m: Any, x: Tensor) -> Tensor:
    return m.l(torch.stack([m.w * row for row in x]))


def test_parts_that_cannot_be_kept_are_differentiated_singly(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check(Apply(by_rows, w=(5,), l=nn.Linear(5, 3)), torch.randn(4, 5), 4)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("forward", [by_rows, lambda m, x: m.l(x * m.w)])
def test_bad_example_is_isolated_or_says_that_it_is_not(forward: Any) -> None:
    torch.manual_seed(0)
    model, data = Apply(forward, w=(5,), l=nn.Linear(5, 3)), torch.randn(4, 5)
    data[1] = float("nan")
    recorder = BookKeeping().record(Objective(model, squared), list(model.parameters()), batch_of(data, 4))
    with recorder:
        losses = squared(model, data)
    result = recorder.differentiate(losses)
    assert result.isolated is (forward is not by_rows)
    assert not torch.isfinite(result.norms[1])
    assert not result.isolated or torch.isfinite(result.norms).sum() == 3


def test_error_inside_leaves_no_mode_behind() -> None:
    model = nn.Linear(3, 2)
    before = state_of(model)
    recorder = BookKeeping().record(Objective(model, squared), list(model.parameters()), batch_of(torch.ones(2, 3), 2))
    with pytest.raises(KeyError), recorder:
        raise KeyError
    assert_same_state(before, state_of(model))
