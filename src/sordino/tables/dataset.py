"""What every loader returns: the records, the public held-out set, and what preprocessing read."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from sordino.errors import InvalidInput

Pairs = Dataset[tuple[Tensor, ...]]
"""Records as (input, class), by index."""


@dataclass(frozen=True)
class Preprocessing:
    """One preprocessing step. If it `reads_private` records, no guarantee covers it; `alternative` names a way out."""

    what: str
    reads_private: bool = False
    alternative: str = ""


@dataclass(frozen=True, eq=False)
class Data:
    """A benchmark: private training records, held-out records, class names and the preprocessing.

    `train_set` and `test_set` are torch datasets for loaders; `train` and `test` are the same records as two tensors.
    """

    name: str
    train_set: Pairs
    test_set: Pairs
    classes: tuple[str, ...]
    preprocessing: tuple[Preprocessing, ...] = ()

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """All training inputs and classes; records that are made on the fly are made now."""
        return tensors(self.train_set)

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """All held-out inputs and classes."""
        return tensors(self.test_set)

    @property
    def caveats(self) -> tuple[str, ...]:
        """The steps that read private records, for the assumptions of a guarantee."""
        return tuple(f"{s.what} (instead: {s.alternative})" for s in self.preprocessing if s.reads_private)


def tensors(records: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Return the records as (inputs, classes)."""
    if isinstance(records, TensorDataset):
        inputs, targets = records.tensors
        return inputs, targets
    if not isinstance(records, Sized):
        raise InvalidInput(f"{type(records).__name__} must have a length: records are read by index")
    parts = [default_collate(_fetch(records, part)) for part in torch.arange(len(records)).split(1000)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _fetch(records: Dataset[Any], indices: Tensor) -> list[Any]:
    """Fetch many records at once if the dataset can, as torch's own loader does."""
    many = getattr(records, "__getitems__", None)
    wanted: list[int] = indices.tolist()
    return list(many(wanted)) if many else [records[i] for i in wanted]


def spread(count: int) -> Tensor:
    """Return a fixed order that mixes sorted records, so a prefix has all classes; only their number decides it."""
    golden = int(0.618 * count)
    stride = next(s for s in range(golden, golden + count + 1) if math.gcd(s, count) == 1)
    return torch.arange(count) * stride % count


def split(count: int) -> tuple[Tensor, Tensor]:
    """Indices of a fixed 80/20 split that looks at no record: (training, held out)."""
    order = spread(count)
    return order[count // 5 :], order[: count // 5]
