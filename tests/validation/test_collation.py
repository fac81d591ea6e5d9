"""Collate functions and random datasets: what they do to the others is found, what is harmless passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.validation.probes import (
    CLASSES,
    Augmented,
    Centred,
    around,
    findings,
    kinds,
    vectors,
)


class Sentences(Dataset[Any]):
    def __init__(self, n: int = 9) -> None:
        generator = torch.Generator().manual_seed(6)
        self.records = [torch.randint(1, 11, (3 + i % 4,), generator=generator) for i in range(n)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.records[index], index % CLASSES


def padded(records: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([r for r, _ in records], batch_first=True)
    return x, torch.tensor([len(r) for r, _ in records]), torch.tensor([y for _, y in records])


def time_first(records: list[Any]) -> Any:
    x, lengths, y = padded(records)
    return x.T.contiguous(), lengths, y


class Bag(nn.Module):
    def __init__(self, masked: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.masked = masked

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        e = self.dropout(self.embedding(x))
        if not self.masked:
            return self.head(e.mean(1))
        return self.head((e * (x > 0)[..., None]).sum(1) / lengths[:, None])


def bag_loss(model: nn.Module, batch: Any) -> Tensor:
    x, lengths, y = batch
    return functional.cross_entropy(model(x, lengths), y, reduction="none")


def bag_loss_time_first(model: nn.Module, batch: Any) -> Tensor:
    x, lengths, y = batch
    return bag_loss(model, (x.T, lengths, y))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_padding_that_changes_the_others_is_found(dropout: float) -> None:
    assert kinds(Bag(masked=False, dropout=dropout), Sentences(), bag_loss, padded) == {"collation"}
    assert kinds(Bag(masked=True, dropout=dropout), Sentences(), bag_loss, padded) == set()


@pytest.mark.parametrize("length", [3, 4, 5])
def test_time_first_batches_pass_and_their_mixing_is_found(length: int) -> None:
    dataset = Sentences()
    dataset.records = [r.repeat(2)[:length] for r in dataset.records]
    assert kinds(Bag(masked=True, dropout=0.5), dataset, bag_loss_time_first, time_first) == set()
    mixing = Bag(masked=True, dropout=0.5)
    mixing.head = nn.Sequential(Centred(), mixing.head)
    (finding,) = findings(mixing, dataset, bag_loss_time_first, time_first)
    assert (finding.kind, finding.where) == ("mixing", "Centred 'head.0'")
    mixing.head[0] = nn.BatchNorm1d(8)
    assert findings(mixing, dataset, bag_loss_time_first, time_first)[0].where == "BatchNorm1d 'head.0'"


def test_batches_of_lists_are_checked_through_the_collate_function() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack(
            [functional.cross_entropy(model(x[None], torch.tensor([len(x)]))[0], torch.tensor(y)) for x, y in batch]
        )

    def mixing(model: nn.Module, batch: Any) -> Tensor:
        losses = loss(model, batch)
        return losses * losses.detach().sum()

    assert kinds(Bag(masked=True), Sentences(), loss, list) == set()
    assert kinds(Bag(masked=True), Sentences(), mixing, list) == {"mixing"}


@pytest.mark.parametrize(
    "draw",
    [lambda: float(torch.rand(())), random.random, np.random.rand, np.random.default_rng(0).random],
    ids=["torch", "python", "numpy", "own generator"],
)
def test_random_augmentation_passes_and_hides_nothing(draw: Callable[[], float]) -> None:
    assert kinds(around(nn.LayerNorm(8)), Augmented(draw)) == set()
    assert "mixing" in kinds(around(nn.BatchNorm1d(8)), Augmented(draw))


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
def test_random_augmentation_does_not_hide_a_collate_function_that_mixes(draw: Callable[[], float]) -> None:
    def scaled(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x / len(records), y

    assert kinds(around(nn.LayerNorm(8)), Augmented(draw), collate=scaled) == {"collation"}


def test_targets_that_cannot_be_rescaled_are_no_objection() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.binary_cross_entropy(torch.sigmoid(model(batch[0])), batch[1], reduction="none").mean(1)

    dataset = TensorDataset(vectors().tensors[0], torch.eye(CLASSES).repeat(3, 1))
    assert kinds(around(nn.LayerNorm(8)), dataset, loss) == set()
    assert "mixing" in kinds(around(Centred()), dataset, loss)


def test_a_record_that_cannot_be_loaded() -> None:
    class Broken(Sentences):
        def __getitem__(self, index: int) -> Any:
            raise OSError("file is gone\nreally")

    (finding,) = findings(Bag(masked=True), Broken(), bag_loss)
    assert finding.kind == "data"
    assert "gone" not in finding.message
    assert "\n" not in finding.message
