"""What a case trains on is made once, and no more of it than the case asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.lab import data
from sordino.lab.data.infinite_mnist import InfiniteMnist
from sordino.lab.experiments import problem_of
from tests.lab.experiments.cases import small


class Counted(InfiniteMnist):
    """Ten digits deformed to a thousand records, which notes what was asked for."""

    asked: list[int]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.asked.extend(indices)
        return super().batch(indices)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    images = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    made = Counted(images, torch.arange(10), 2500)
    made.asked = []
    test = TensorDataset(images, torch.arange(10))
    loaded = data.Data("infinite-mnist", made, test, tuple("0123456789"))
    monkeypatch.setattr(data, "load", lambda name, **options: loaded)
    return made


def test_only_the_records_that_are_asked_for_are_made_and_only_once(digits: Counted) -> None:
    for _ in range(2):
        problem = problem_of(small(dataset="infinite-mnist", records=35))
        assert digits.asked == list(range(35))
    expected = InfiniteMnist.batch(digits, range(35))
    assert torch.equal(problem.train[0], expected[0])
    assert torch.equal(problem.train[1], expected[1])


def test_all_records_are_made_where_the_case_does_not_say_how_many(digits: Counted) -> None:
    x, y = problem_of(small(dataset="infinite-mnist", records=None)).train
    assert digits.asked == list(range(2500))
    assert torch.equal(x[2499], digits[2499][0])
    assert torch.equal(y, torch.arange(2500) % 10)


def test_another_seed_is_another_file(digits: Counted) -> None:
    first = problem_of(small(dataset="infinite-mnist", records=35)).train[0]
    digits.seed = 1
    assert not torch.equal(problem_of(small(dataset="infinite-mnist", records=35)).train[0], first)


def test_a_try_computes_the_features_of_its_own_records_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `--records 400` nobody waits for the features of 50,000; each record's are its own."""
    pytest.importorskip("kymatio")
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    features = {"kind": "scatter", "groups": 27}
    x, y = problem_of(small(features=features, records=40)).train
    sizes = {len(np.load(path, mmap_mode="r")) for path in tmp_path.rglob("*.npy")}
    everything = problem_of(small(features=features, records=None)).train
    assert 40 in sizes
    assert len(everything[1]) not in sizes
    torch.testing.assert_close(x, everything[0][:40])
    assert torch.equal(y, everything[1][:40])
