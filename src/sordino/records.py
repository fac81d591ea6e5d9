"""The private records: any map-style dataset or plain tensors, fetched by index and collated on the model's device.

A step draws units of protection. Here a unit is a record; in `sordino.units` it owns several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from sordino.augmentation import Views, is_alone
from sordino.errors import InvalidInput
from sordino.gradients.engine import Batch, Groups, counts_examples
from sordino.noise import Source

Collate = Callable[[list[Any]], Any]


class Records:
    """A dataset whose length must not change during training.

    `count` is how many units there are to draw, `length` how many records. With `views`, a step sees several random
    views of every drawn record; they belong to the record's unit.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, views: Views | None = None) -> None:
        dataset = _read_arrays(dataset)
        self.dataset = TensorDataset(*dataset) if collate and _is_rows(dataset) else dataset
        self.collate = collate
        self.views = views
        self._tensors = None if collate else find_tensors(dataset)
        self.count = self.length = self._length()
        self.by_rows = collate is None or self._collates_rows()

    @property
    def runs_code(self) -> bool:
        """Whether the user's code makes a batch; otherwise batches are rows of tensors."""
        return self._tensors is None or self.views is not None

    def _length(self) -> int:
        if self._tensors is not None:
            if not len(self._tensors[0]):
                raise InvalidInput("dataset has 0 records: nothing can be learnt from it")
            return len(self._tensors[0])
        return count_records(self.dataset)

    def _collates_rows(self) -> bool:
        """Whether the user's collate function puts examples first; tried at two sizes, to rule out an accident."""
        if self.views is None:
            return all(counts_examples(self.raw(torch.zeros(n, dtype=torch.int64)), n) for n in (2, 3))
        view = self._see(torch.zeros(1, dtype=torch.int64))[0]
        return all(counts_examples(self._collate([copy.deepcopy(view) for _ in range(n)]), n) for n in (2, 3))

    def check_unchanged(self) -> None:
        """Refuse a dataset that grew or shrank: the sampling rate was fixed for its number of records."""
        if (now := self._length()) != self.length:
            raise InvalidInput(f"dataset length is {now}, was {self.length} at the start: records must not come or go")

    # -- what is drawn: here a record is its own unit of protection, `sordino.units` has others ----------------

    def group(self, indices: Tensor, choice: int = 0) -> tuple[Tensor, Groups | None]:
        """Return the rows of the units at `indices`, each a record or a view, and who owns each unless all own one.

        If a unit has more records than are used, `choice` says which.
        """
        rows, groups = self.list_owned(indices, choice)
        return (rows, groups) if self.views is None else self.views.spread(rows, groups)

    def weigh(self, indices: Tensor) -> Tensor | None:
        """How many rows each unit contributes, or None for one each."""
        counts = self.count_owned(indices)
        if self.views is None:
            return counts
        return self.views.count * (torch.ones_like(indices) if counts is None else counts)

    def list_owned(self, indices: Tensor, choice: int) -> tuple[Tensor, Groups | None]:
        """Return the records of the units at `indices`."""
        return indices, None

    def count_owned(self, indices: Tensor) -> Tensor | None:
        """How many records each unit contributes, or None for one each."""
        return None

    def prepare(self, source: Source) -> None:
        """Prepare for a draw: views get their coins from the run."""
        if self.views is not None:
            self.views.prepare(source)

    def describe(self, unit: str) -> str:
        """Return the end of the ledger's note on how records are drawn."""
        return "" if self.views is None else f", {self.views.count} random views of each record are averaged"

    def fetch(self, indices: Tensor | Sequence[int], device: torch.device, choice: int = 0) -> Batch:
        """Collate the records of the units at `indices`, in that order."""
        where, groups = self.group(torch.as_tensor(indices, dtype=torch.int64), choice)
        batch = self.gather(where, device) if self.views is None else self._gather_views(where, device, choice)
        return batch if groups is None else replace(batch, groups=groups.to(device))

    # -- records ------------------------------------------------------------------------------------------------

    def gather(self, indices: Tensor | Sequence[int], device: torch.device) -> Batch:
        """Collate the records at `indices`, in that order."""
        where = torch.as_tensor(indices, dtype=torch.int64)
        if self.by_rows:
            data = _move(self.raw(where), device)
            return Batch(data, len(where), lambda i: _move(self.raw(where[i : i + 1]), device))
        return self.collate_items(
            self._items(where), device
        )  # kept, because an augmentation would give other views the next time

    def _gather_views(self, where: Tensor, device: torch.device, choice: int) -> Batch:
        """Collate the views for `rows`, in which each record stands as often as it has views."""
        items = self._see(where, choice)
        if not self.by_rows:
            return self.collate_items(items, device)
        data = _move(self._collate(items), device)
        return Batch(data, len(items), lambda i: _move(self._collate(items[i : i + 1]), device))

    def _see(self, rows: Tensor, choice: int = 0) -> list[Any]:
        """Return a view for each of `rows`, made one record at a time."""
        assert self.views is not None
        return self.views.make(self._load_one, rows, choice)

    def sees_alone(self) -> bool:
        """Whether a test saw that records, or views of them, depend only on the record and its coins."""
        if self.views is not None:
            return self.views.is_alone(self._load_one, self.length)
        return self._tensors is not None or is_alone(self._load_one, self.length)

    def _load_one(self, row: int) -> Any:
        """Load one record as the dataset gives it."""
        if self._tensors is None:
            (item,) = self._items(torch.tensor([row]))
            return item
        picked = tuple(t[row] for t in self._tensors)
        return picked[0] if isinstance(self.dataset, Tensor) else picked

    def collate_items(self, items: Sequence[Any], device: torch.device) -> Batch:
        """Collate loaded records with a function that does not put examples first."""

        def regroup(places: Sequence[int]) -> Any:
            return _move(self._collate([items[i] for i in places]), device)

        return Batch(_move(self._collate(items), device), len(items), lambda i: regroup([i]), False, regroup)

    def load(self, indices: Tensor, choice: int = 0) -> Any:
        """Load what a loader's worker sends: a batch that can be cut by rows, or else single records."""
        if self.views is not None:
            items = self._see(indices, choice)
            return self._collate(items) if self.by_rows else items
        return self.raw(indices) if self.by_rows else self._items(indices)

    def raw(self, indices: Tensor) -> Any:
        """Return the collated records, wherever the dataset keeps them."""
        if self._tensors is not None:
            picked = tuple(rows(t, indices.to(t.device)) for t in self._tensors)
            return picked[0] if isinstance(self.dataset, Tensor) else picked
        return self._collate(self._items(indices))

    def _items(self, indices: Tensor) -> Any:
        where = indices.tolist()
        many = getattr(self.dataset, "__getitems__", None)  # torch's protocol to fetch several records at once
        return many(where) if many else [self.dataset[i] for i in where]

    def _collate(self, items: Any) -> Any:
        return (self.collate or default_collate)(items)

    def make_fetcher(self, device: torch.device) -> Callable[[Sequence[int]], Batch]:
        """Return a function like `gather` that loads every record only once, so it is the same beside any others.

        Otherwise a dataset with its own generator could not be probed. A dataset with its own method for several
        records may mix them there, so it is asked for all of them each time.
        """
        if self.views is None and (self._tensors is not None or _fetches_several(self.dataset)):
            return lambda indices: self.gather(indices, device)
        loaded: dict[int, Any] = {}

        def fetch(indices: Sequence[int]) -> Batch:
            for i in indices:
                if i not in loaded:
                    where = torch.tensor([i])
                    (loaded[i], *_) = self._items(where) if self.views is None else self._see(where)

            def regroup(places: Sequence[int]) -> Any:
                # Copies, because a collate function may change in place what it is given.
                return _move(self._collate([copy.deepcopy(loaded[indices[i]]) for i in places]), device)

            whole = regroup(range(len(indices)))
            return Batch(whole, len(indices), lambda i: regroup([i]), self.by_rows, regroup)

        return fetch


def count_records(dataset: Any) -> int:
    """Count the records of a map-style dataset, or say why it is refused."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise InvalidInput("dataset is a DataLoader: pass loader.dataset, because Sordino draws the batches itself")
    if isinstance(dataset, IterableDataset | Iterator | Mapping) or not hasattr(dataset, "__getitem__"):
        raise InvalidInput(f"dataset of type {kind} has no records by index: use a map-style torch.utils.data.Dataset")
    if isinstance(dataset, str | bytes):
        raise InvalidInput("dataset is text: read the file first, or train on a table with `sordino train --data FILE`")
    if isinstance(dataset, list) and len(dataset) == 2 and all(map(_is_column, dataset)):
        raise InvalidInput("dataset is a list of two arrays, which would be two records: make it a tuple (x, y)")
    try:
        records = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise InvalidInput(f"dataset of type {kind} has no length: define __len__, a draw needs it") from error
    if records == 0:
        raise InvalidInput(f"dataset of type {kind} has 0 records, must have at least 1: check the path or the filter")
    return records


def _is_column(part: Any) -> bool:
    """Whether this is an array or a tensor of several rows, such as all inputs or all labels."""
    return isinstance(part, np.ndarray | Tensor) and part.ndim > 0 and len(part) > 1


def _fetches_several(dataset: Any) -> bool:
    """Whether a dataset has its own method for several records; torch's Subset asks the dataset behind it."""
    if type(dataset) is Subset:
        return _fetches_several(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def _move(data: Any, device: torch.device) -> Any:
    if type(data) is tuple and all(type(x) is Tensor for x in data):  # the most common case, first
        return tuple(x.to(device) for x in data)
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, data)


def rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """``tensor[indices]`` in the same memory layout; each row is copied as one block where its numbers lie together.

    Torch's own indexing walks rows that are stored channels last number by number, which takes three times as long.
    """
    if tensor.dim() == 1 or tensor.is_contiguous():
        return tensor.index_select(0, indices)
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(0, *inner)
    if not dense.is_contiguous():
        return tensor[indices]
    picked = dense.reshape(len(tensor), -1).index_select(0, indices).reshape(len(indices), *dense.shape[1:])
    return picked.permute(0, *(1 + inner.index(d) for d in range(1, tensor.dim())))


def find_tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """Plain tensors are indexed at once instead of record by record."""
    if isinstance(dataset, Tensor):
        return (dataset,)
    if isinstance(dataset, TensorDataset):
        return tuple(dataset.tensors)
    return dataset if _is_rows(dataset) else None


def _is_rows(dataset: Any) -> bool:
    """Whether this is a tuple of tensors, such as inputs and classes, with one row per record each."""
    if not (isinstance(dataset, tuple) and dataset and all(isinstance(x, Tensor) for x in dataset)):
        return False
    lengths = {len(x) for x in dataset}
    if len(lengths) != 1:
        raise InvalidInput(f"dataset tensors have lengths {sorted(lengths)}, must be equal: one row per record")
    return True


def _read_arrays(dataset: Any) -> Any:
    """Replace NumPy arrays by tensors that share their memory: otherwise a tuple of two would count as two records."""
    if isinstance(dataset, np.ndarray):
        return _to_tensor(dataset)
    if isinstance(dataset, tuple) and any(isinstance(x, np.ndarray) for x in dataset):
        return tuple(_to_tensor(x) if isinstance(x, np.ndarray) else x for x in dataset)
    return dataset


def _to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.ndim:
        raise InvalidInput("dataset has an array without rows (a single number): give one row per record")
    try:
        return torch.as_tensor(array)
    except TypeError:
        raise InvalidInput(f"dataset has an array of {array.dtype}, must hold numbers: encode them first") from None
