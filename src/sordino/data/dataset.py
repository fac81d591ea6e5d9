"""What every loader returns: the records, the public held-out set, and what the preprocessing read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

Records = Dataset[tuple[Tensor, ...]]
"""Pairs (input, class), by index."""


@dataclass(frozen=True)
class Step:
    """One preprocessing step. If it `reads_private` records, no guarantee covers it; `alternative` says the way out."""

    what: str
    reads_private: bool = False
    alternative: str = ""


@dataclass(frozen=True, eq=False)
class Data:
    """A benchmark: private training records, held-out records, class names and the preprocessing that was done.

    `train_set` and `test_set` are torch datasets for loaders; `train` and `test` are the same records as two tensors.
    """

    name: str
    train_set: Records
    test_set: Records
    classes: tuple[str, ...]
    preprocessing: tuple[Step, ...] = ()

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
    """The records as (inputs, classes)."""
    if isinstance(records, TensorDataset):
        inputs, targets = records.tensors
        return inputs, targets
    pairs = [records[i] for i in range(len(records))]  # type: ignore[arg-type]  # Dataset does not promise a length
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def spread(count: int) -> Tensor:
    """A fixed order that mixes sorted records, so that a prefix has all classes; it depends on the count alone."""
    golden = int(0.618 * count)
    stride = next(s for s in range(golden, golden + count + 1) if math.gcd(s, count) == 1)
    return torch.arange(count) * stride % count


def split(count: int) -> tuple[Tensor, Tensor]:
    """Indices of a fixed 80/20 split that looks at no record: (training, held out)."""
    order = spread(count)
    return order[count // 5 :], order[: count // 5]
