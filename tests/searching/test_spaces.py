"""Spaces: what is drawn lies where it should, and what makes no sense is refused before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.errors import InvalidInput
from sordino.searching import Space, choices, integers, log_uniform, make_space, read_space, uniform


def test_draws_follow_their_laws() -> None:
    rng = np.random.default_rng(0)
    space = Space({"a": uniform(2, 3), "b": log_uniform(0.01, 100), "c": integers(1, 3), "d": choices("x", 7, True)})
    drawn = [space.draw(rng.random) for _ in range(3000)]
    a, b, c = (np.array([each[name] for each in drawn], float) for name in "abc")
    assert a.min() >= 2
    assert a.max() <= 3
    assert a.mean() == pytest.approx(2.5, abs=0.02)
    assert np.log10(b).mean() == pytest.approx(0, abs=0.1)
    assert b.min() >= 0.01
    assert b.max() <= 100
    assert [np.mean(c == k) for k in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.05)
    assert {each["d"] for each in drawn} == {"x", 7, True}


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_chance_are_within(chance: float) -> None:
    assert integers(1, 3).draw(chance) in (1, 2, 3)
    assert choices(1, 2).draw(chance) in (1, 2)
    whole = make_space({"n": {"low": 1, "high": 100, "log": True, "whole": True}}).laws["n"].draw(chance)
    assert isinstance(whole, int)
    assert 1 <= whole <= 100


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('[space]\nlr = { low = 0.01, high = 1, log = true }\nsize = [64, 128]\nway = { choices = ["a"] }\n')
    assert read_space(path) == Space({"lr": log_uniform(0.01, 1), "size": choices(64, 128), "way": choices("a")})
    path.write_text("lr = [0.1, 0.2]\n")
    assert read_space(path).describe() == {"lr": "0.1, 0.2"}


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({}, "the space is empty"),
        ({"lr": 3}, "lr = 3 is not a distribution"),
        ({"lr": []}, "lr: choices is empty"),
        ({"lr": {"low": 2, "high": 1}}, "lr: low=2.0 must be below"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "lr: low=0.0 must be > 0"),
        ({"lr": {"low": 0.5, "high": 1, "whole": True}}, "whole numbers"),
        ({"lr": {"low": 0, "high": 1, "lg": True}}, "is not a distribution"),
        ({"lr": {"low": "a", "high": 1}}, "is not a distribution"),
        ({"lr": [[1]]}, "must be a number"),
        ({"lr": {"low": 0, "high": float("inf")}}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(plain: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_space(plain)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(InvalidInput, match="'depth', which the learner does not have: use lr"):
        make_space({"depth": [1]}).require_known(("lr",), "the learner")
