"""Records are fetched as torch's own indexing would, in their own memory layout."""

from __future__ import annotations

import pytest
import torch

from sordino.records import Records, rows

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
