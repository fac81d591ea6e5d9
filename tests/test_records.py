"""Records are counted, and fetched as torch's own indexing would, in their own memory layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sordino.errors import InvalidInput
from sordino.records import Records, count_records, rows
from tests.validation.probes import vectors

LAYOUTS = {
    "plain": torch.randn(5, 3, 4, 2),
    "channels last": torch.randn(5, 3, 4, 2).to(memory_format=torch.channels_last),
    "vector": torch.randn(5),
    "integers": torch.arange(15).reshape(5, 3),
    "rows apart": torch.randn(5, 6)[:, ::2],
    "columns first": torch.randn(3, 5).T,
    "every other row": torch.randn(10, 3)[::2],
    "expanded": torch.randn(5, 1).expand(5, 4),
    "one channel": torch.randn(5, 1, 4, 4).to(memory_format=torch.channels_last),
    "empty rows": torch.zeros(5, 0, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("indices", [[3, 0, 0, 2], [1], []])
def test_rows_are_those_of_plain_indexing(name, indices):
    tensor, where = LAYOUTS[name], torch.tensor(indices, dtype=torch.int64)
    picked = rows(tensor, where)
    assert picked.shape == tensor[where].shape
    assert torch.equal(picked, tensor[where])


def test_rows_that_lie_channels_last_still_do():
    picked = rows(LAYOUTS["channels last"], torch.tensor([1, 4]))
    assert picked.is_contiguous(memory_format=torch.channels_last)
    assert not picked.is_contiguous()


def test_what_is_fetched_is_a_copy():
    tensor = torch.zeros(3, 2)
    batch = Records((tensor, torch.zeros(3))).fetch([0, 1], torch.device("cpu"))
    batch.data[0].add_(1)
    assert torch.equal(tensor, torch.zeros(3, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


BAD_DATASETS: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: TensorDataset(torch.zeros(0, 2)), "0 records"),
    "empty list": (list, "0 records"),
    "iterable": (Stream, "map-style"),
    "generator": (lambda: (i for i in range(3)), "map-style"),
    "number": (lambda: 7, "map-style"),
    "nothing": (lambda: None, "map-style"),
    "mapping": (lambda: {"x": 1}, "map-style"),
    "set": (lambda: {1, 2}, "map-style"),
    "no length": (Endless, "__len__"),
    "scalar tensor": (lambda: torch.tensor(1.0), "__len__"),
    "loader": (lambda: DataLoader(vectors()), "loader.dataset"),
    "list of arrays": (lambda: [np.zeros((9, 2)), np.zeros(9)], "a tuple"),
    "name of a file": (lambda: "patients.csv", "text"),
}


@pytest.mark.parametrize("name", BAD_DATASETS)
def test_unusable_datasets_are_refused_in_one_line(name: str) -> None:
    make, words = BAD_DATASETS[name]
    with pytest.raises(InvalidInput, match=words) as raised:
        count_records(make())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dataset", [vectors(), [1] * 9, torch.zeros(9, 2), [torch.zeros(4)] * 9])
def test_usable_datasets_are_counted(dataset: Any) -> None:
    assert count_records(dataset) == 9


def test_numpy_arrays_are_rows_of_records_and_share_their_memory() -> None:
    x, y = np.arange(18.0).reshape(9, 2), np.arange(9)
    assert Records((x, y)).count == 9, "not two records"
    assert Records((x, torch.arange(9))).count == 9
    assert Records(x).count == 9
    batch = Records((x, y)).raw(torch.tensor([4, 1]))
    assert torch.equal(batch[0], torch.tensor(x[[4, 1]]))
    assert batch[1].tolist() == [4, 1]
    x[4] = -1
    assert Records((x, y)).raw(torch.tensor([4]))[0].tolist() == [[-1.0, -1.0]]


def test_arrays_with_a_collate_function_are_its_records() -> None:
    x, y = np.arange(18.0).reshape(9, 2), np.arange(9)
    records = Records((x, y), collate=lambda items: torch.stack([pair[0] for pair in items]))
    assert records.count == 9
    assert records.raw(torch.tensor([2])).tolist() == [[4.0, 5.0]]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((np.zeros((3, 2)), np.zeros(4)), "lengths"),
        ((np.array(["a", "b"]), np.zeros(2)), "must hold numbers"),
        ((np.array(3.0), np.zeros(2)), "without rows"),
    ],
)
def test_arrays_that_are_no_records_are_refused(dataset: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Records(dataset)
