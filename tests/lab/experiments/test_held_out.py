"""Settings are tried on held-out training records: the test set is not looked at, and nothing is run twice."""

from __future__ import annotations

import pytest
import torch

from benchmarks import held_out
from sordino.errors import InvalidInput
from sordino.lab.experiments.problem import Problem, problem_of
from tests.lab.experiments.cases import small


def test_the_last_training_records_are_held_out_and_the_test_set_is_gone():
    x, y = torch.arange(20.0)[:, None], torch.arange(20) % 2
    problem = Problem((x, y), (x + 100, y), (x[:0], y[:0]), ("a caveat",))
    split = held_out.split_training(problem)
    assert split.train[0].flatten().tolist() == list(range(18))
    assert split.test[0].flatten().tolist() == [18, 19]
    assert split.caveats == ("a caveat",)
    with pytest.raises(InvalidInput, match="leaves none"):
        held_out.split_training(problem, 0.0)


def test_a_search_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    cases, tried = [small(seed=seed) for seed in range(2)], tmp_path / "tried.jsonl"
    first = next(held_out.try_cases(cases, tried))
    assert 0 <= first["accuracy"] <= 1
    run: list[str] = []
    monkeypatch.setattr(held_out, "problem_of", lambda case: run.append(case.label) or problem_of(case))
    rows = list(held_out.try_cases(cases, tried))
    assert run == [cases[1].label]
    assert rows[0] == first
    assert len(tried.read_text().splitlines()) == 2
