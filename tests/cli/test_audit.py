"""`sordino audit`: recipes and runs, words and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Sordino = Callable[..., Result]


def test_a_recipe_by_name(sordino: Sordino) -> None:
    result = sordino("audit", "--recipe", "dpsgd", "--trials", 600, "--seed", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert 0 < found["epsilon_lower"] <= found["epsilon_claimed"]
    assert len(found["attacks"]) == 4


def test_a_saved_run(sordino: Sordino, small: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = sordino(*small, "--epsilon", 3, "--held-out", 0.4, "--run", run)
    assert trained.exit_code == 0, trained.output
    result = sordino("audit", run, "--trials", 400, "--seed", 1)
    assert result.exit_code == 0, result.output
    assert "claim kept" in result.stdout
    assert "loss threshold: AUC" in result.stdout
    assert "do not publish" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "what to audit is missing"),
        (("--recipe", "dpfoo"), "recipe='dpfoo' must be one of"),
        (("--recipe", "missing.toml"), "cannot read recipe missing.toml"),
        (("nowhere",), "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(sordino: Sordino, arguments: tuple[str, ...], said: str) -> None:
    result = sordino("audit", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
