"""The words of torch and of a user's model may name labels and the size of a draw: no command prints or stores them."""

from __future__ import annotations

import pytest

from sordino.cli import progress

MODEL = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self, inputs, classes, fine):
        super().__init__()
        self.layer, self.fine = nn.Linear(inputs, classes), fine

    def forward(self, x):
        if len(x) not in self.fine:
            raise IndexError(f"Target 17171 is out of bounds in a batch of {len(x)} and 90909 more")
        return self.layer(x)


def at_once():
    return Odd(3, 2, ())


def in_a_draw():
    return Odd(3, 2, range(1, 33))  # what the probe looks at; a draw of 55 has more
"""


@pytest.mark.parametrize(("function", "code"), [("at_once", 2), ("in_a_draw", 2)])
def test_an_error_of_the_model_is_told_without_its_words(sordino, small, tmp_path, function, code):
    (tmp_path / "odd.py").write_text(MODEL)
    run = tmp_path / "run"
    model = f"{tmp_path / 'odd.py'}:{function}"
    result = sordino(*small, "--batch-size", 55, "--epsilon", 3, "--model", model, "--run", run)
    assert result.exit_code == code
    assert result.stderr.count("error: ") == 1
    assert "is not shown" in result.stderr or "labels and indices must lie in" in result.stderr
    assert ("IndexError in odd.py:" in result.stderr) == (function == "in_a_draw")
    stored = "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())
    for words in ("17171", "90909", "out of bounds"):
        assert words not in result.output + result.stderr + stored


def test_whoever_asks_for_a_traceback_gets_it(sordino, small, tmp_path, monkeypatch):
    """The twin: the words are there, and only kept back."""
    monkeypatch.setenv("SORDINO_TRACEBACK", "1")
    (tmp_path / "odd.py").write_text(MODEL)
    model = f"{tmp_path / 'odd.py'}:in_a_draw"
    result = sordino(*small, "--batch-size", 55, "--epsilon", 3, "--model", model, "--run", tmp_path / "run")
    assert "Target 17171 is out of bounds" in str(result.exception)


def test_check_tells_no_words_either(sordino, tmp_path):
    (tmp_path / "odd.py").write_text(MODEL)
    for more in ([], ["--json"]):
        result = sordino("check", f"{tmp_path / 'odd.py'}:at_once", *more)
        assert result.exit_code == 1
        assert "17171" not in result.output + result.stderr


def test_small_things_of_the_display():
    assert progress.draw_sparkline([0.1, 0.5, 0.9]) == "▁▅█"
    assert progress.draw_sparkline([0.5, 0.5]) == "▁▁"
    assert [progress.format_clock(s) for s in (0, 65, 3725)] == ["0:00", "1:05", "1:02:05"]
