"""Mechanisms of the user's own, file.py:function, in train, compare and audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sordino.cli import own_recipes
from sordino.cli.compare import Comparison, list_cases
from sordino.errors import InvalidInput
from sordino.lab.experiments.methods import build_recipe
from sordino.lab.importing import call_recipe

CODE = """
from dataclasses import dataclass

from sordino.parts import ROUNDING, drop_not_finite
from sordino.recipe import Optimizer, Recipe


@dataclass(frozen=True)
class Softened:
    def weights(self, norms, clip, draw):
        return drop_not_finite(clip * (1 - ROUNDING) / norms.clamp(min=clip), norms)


def softened(*, batch_size, epochs, **options):
    return Recipe(name="softened", weighing=Softened(), batch_size=batch_size, epochs=epochs, **options)


def wrong(*, batch_size, epochs):
    return "no recipe"


def narrow(*, size):
    return Recipe(batch_size=size)
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}:softened"


@pytest.fixture
def run(sordino, small, code, tmp_path) -> Path:
    made = sordino(*small, "--epsilon", 4, "--recipe", code, "--run", tmp_path / "run", "--json")
    assert made.exit_code == 0, made.stderr
    return tmp_path / "run"


def test_train_keeps_what_others_need(sordino, run, code, npz_file):
    priced = sordino("account", run, "--json")
    assert priced.exit_code == 0, priced.stderr  # the delta of its budget is known, though its parts have no name
    assert json.loads(priced.stdout)["delta"] == 1e-5
    page = sordino("report", run, "--json")
    assert page.exit_code == 0, page.stderr
    assert json.loads(page.stdout)["delta"] == 1e-5
    refused = sordino("resume", run)
    assert refused.exit_code == 2
    assert "has the recipe" in refused.stderr
    assert "--trust-code" in refused.stderr
    again = sordino("resume", run, "--trust-code", "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 6


def test_predicting_needs_no_code_of_the_recipe(sordino, run, csv_file):
    (csv_file.parent / "mine.py").unlink()
    told = sordino("predict", run, "--data", csv_file)
    assert told.exit_code == 0, told.stderr
    assert told.stdout.count("\n") == 61


def test_the_recipe_of_a_run_is_the_one_it_began_with(code):
    from sordino import Budget

    first = call_recipe(code, batch_size=16, epochs=2).calibrate(Budget(4.0, 1e-5), records=60)
    noted = own_recipes.note(code, first)
    again = own_recipes.rebuild(own_recipes.parse_own(noted.to_table(), Path("config.toml")))
    assert again.noise_multiplier == first.noise_multiplier
    assert (again.steps, again.records, again.budget) == (first.steps, 60, first.budget)
    assert type(again.weighing).__name__ == "Softened"


@pytest.mark.parametrize(
    ("function", "words"),
    [("wrong", "returned str, must return a sordino.Recipe"), ("narrow", "let it take batch_size, epochs")],
)
def test_a_function_that_makes_no_recipe_is_refused(code, function, words):
    with pytest.raises(InvalidInput, match=words):
        call_recipe(code.replace("softened", function), batch_size=4, epochs=1)


def test_compare_sets_it_beside_others_on_equal_terms(code):
    cases = list_cases(Comparison(dataset="digits", methods=("dpsgd",), recipes=(code,), epsilons=(3.0,), seeds=1))
    theirs, mine = cases
    assert [case.method for case in cases] == ["dpsgd", "softened"]
    assert (mine.model, mine.features, mine.data) == (theirs.model, theirs.features, theirs.data)
    assert type(build_recipe(mine, mine.recipe, 1000).weighing).__name__ == "Softened"


def test_audit_attacks_it(sordino, code):
    found = sordino("audit", "--recipe", code, "--trials", 40, "--seed", 1, "--noise-multiplier", 1.0)
    assert found.exit_code == 0, found.stderr
    assert "softened" in found.stdout
    for word in ("claimed: ", "certain: ", "implied: "):
        assert word in found.stdout, "every column is explained"
