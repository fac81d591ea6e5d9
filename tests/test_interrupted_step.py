"""Ctrl-C before any line of a step, torch's own lines included: the next step runs, and torch is as it was before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from sordino import Private, Recipe
from tests.helpers import private

OURS = ("/sordino/", "/torch/")
EVERY = 53
"""A prime: it falls on other lines than loops repeat."""


def interrupt_at(line: int, step: Callable[[], Any]) -> int:
    """Run `step` and raise KeyboardInterrupt before its line number `line`; how many lines there were until its end.

    Where torch is interrupted between two of its lines it may end in an error of its own, with the interrupt behind.
    """
    count = 0

    def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        if count == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace_lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return trace_lines if any(part in frame.f_code.co_filename for part in OURS) else None

    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
    finally:
        sys.settrace(None)
    return count


def check(run: Private, lines: range) -> None:
    for line in lines:
        interrupt_at(line, run.step)
        assert torch.is_grad_enabled(), line
        assert not _get_current_function_mode_stack(), line
        run.step()


@pytest.mark.parametrize("engine", ["auto", pytest.param("vmap", marks=pytest.mark.slow)])
def test_the_step_after_an_interrupt_runs(engine: str) -> None:
    run = private(Recipe(batch_size=8, steps=5000, noise_multiplier=1.0).for_records(64), engine=engine)
    run.step()
    total = interrupt_at(0, run.step)
    assert total > 500
    check(run, range(1, total, EVERY))


@pytest.mark.slow
def test_the_step_after_an_interrupt_before_any_line_runs() -> None:
    run = private(Recipe(batch_size=8, steps=50_000, noise_multiplier=1.0).for_records(64))
    for _ in range(8):  # steps 1, 2, 4 and 8 probe the model, in eight times as many lines
        run.step()
    check(run, range(1, interrupt_at(0, run.step)))
