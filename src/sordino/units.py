"""Units of protection that own several records: one person's rows, one author's texts, one device's sessions.

A step draws units instead of records. At most `per_unit` records of each drawn unit are used, different ones in every
draw; the unit's loss is their mean, and the gradient of that mean is clipped. Whatever a unit's records are, and
however many, the unit moves a sum by one clipped gradient. So everything that is proven for records holds for units
(docs/proofs/units.md).

The chosen records depend only on the unit itself (its name and the order of its records) and on the public number of
the draw. The choice looks random, but the price does not need it to be: no other unit affects it. Who owns what is
private: no identifier is shown, logged or written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from sordino.augmentation import Views
from sordino.errors import InvalidInput
from sordino.gradients.engine import Groups
from sordino.records import Collate, Records

Unit = str | Sequence[Hashable] | Tensor | NDArray[Any]
"""One owner for each record, or the name of the dataset's column that says so."""

PER_UNIT = 8
"""Records of a unit used in a draw by default: more make its gradient less noisy, and a step slower."""

RECORD, USER = "record", "user"
MOST_LETTERS = 40

SEVERAL = (list, tuple, set, frozenset, dict, np.ndarray, Tensor)


class Units(Records):
    """The records of a dataset by their owners. There are `count` owners to draw from; each owns at least one record.

    `unit` says who owns which record, and `per_unit` how many records of a unit a draw uses at most.
    """

    def __init__(
        self,
        dataset: Any,
        unit: Unit,
        per_unit: int | None = None,
        collate: Collate | None = None,
        views: Views | None = None,
    ) -> None:
        self.per_unit = PER_UNIT if per_unit is None else per_unit
        if not (isinstance(self.per_unit, int) and self.per_unit >= 1):
            raise InvalidInput(f"per_unit={per_unit} must be a whole number >= 1: how many records of a unit are used")
        self._column = unit if isinstance(unit, str) else None
        super().__init__(dataset, collate, views)
        owners, self._names = number_owners(find_owners(dataset, unit, self.length), self.length)
        self._order = owners.argsort(stable=True)
        self._counts = torch.bincount(owners)
        self._starts = self._counts.cumsum(0) - self._counts
        self.count = len(self._counts)

    def count_owned(self, indices: Tensor) -> Tensor:
        return self._counts[indices].clamp(max=self.per_unit)

    def list_owned(self, indices: Tensor, choice: int) -> tuple[Tensor, Groups | None]:
        counts = self._counts[indices]
        owners = torch.arange(len(indices)).repeat_interleave(counts)
        ranks = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        rows = self._order[self._starts[indices][owners] + ranks]
        if bool((counts > self.per_unit).any()):
            marks = mark(self._names[indices.numpy()][owners.numpy()], ranks.numpy(), choice)
            kept = keep_lowest(marks, owners.numpy(), self.per_unit)
            rows, owners = rows[kept], owners[kept]
        return rows, None if len(rows) == len(indices) else Groups(owners, len(indices))

    def describe(self, unit: str) -> str:
        return f", at most {self.per_unit} records of a {unit} are used in a draw{super().describe(unit)}"

    def digest_owners(self) -> str:
        """Return a short digest of who owns which record, for several processes to compare."""
        parts = (self._order.numpy(), self._counts.numpy(), self._names)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def _items(self, indices: Tensor) -> Any:
        """Remove the column of owners: a model must not learn whose a record is."""
        items = super()._items(indices)
        if self._column is None or not all(isinstance(item, Mapping) for item in items):
            return items
        return [{name: value for name, value in item.items() if name != self._column} for item in items]


def mark(names: NDArray[np.uint64], ranks: NDArray[np.int64], choice: int) -> NDArray[np.uint64]:
    """Give each record a number, as if by lot, from its owner's name, its rank among the owner's records, and `choice`.

    None of these changes with another owner's records.
    """
    with np.errstate(over="ignore"):
        marks: NDArray[np.uint64] = scramble(scramble(names + scramble(np.uint64(choice))) + ranks.astype(np.uint64))
    return marks


def keep_lowest(marks: NDArray[np.uint64], owners: NDArray[np.int64], most: int) -> Tensor:
    """Return the records to use, in order: of every owner the `most` records with the lowest marks, or all of them."""
    order = np.lexsort((marks, owners))
    sorted_owners = owners[order]
    places = np.arange(len(order)) - np.searchsorted(sorted_owners, sorted_owners)
    return torch.from_numpy(np.sort(order[places < most]))


def scramble(values: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit given."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def name_unit(unit: Unit | None, per_unit: int | None, unit_name: str | None) -> str:
    """Name what is protected in a word: a record, or what the user calls its owner."""
    if unit is None:
        given = {"per_unit": per_unit, "unit_name": unit_name}
        for name, value in given.items():
            if value is not None:
                raise InvalidInput(f"{name}={value!r} needs unit=: say who owns each record, or leave it out")
        return RECORD
    name = USER if unit_name is None else unit_name
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MOST_LETTERS:
        raise InvalidInput(
            f"unit_name must be a word of at most {MOST_LETTERS} letters for what is protected: try 'user'"
        )
    if name == RECORD:
        raise InvalidInput(f"unit_name={name!r} would be taken for a guarantee by record: try 'user'")
    return name


def describe_units(records: Records) -> dict[str, str]:
    """Return what must be the same in all processes besides the records: who owns which, and how many are used."""
    if not isinstance(records, Units):
        return {}
    return {"per_unit": str(records.per_unit), "owners": records.digest_owners()}


# -- who owns what ----------------------------------------------------------------------------------------------------


def find_owners(dataset: Any, unit: Unit, records: int) -> Iterable[Any]:
    """Find one owner for each record, as given or in the column of this name."""
    if not isinstance(unit, str):
        return _to_list(unit)
    if type(dataset) is Subset:
        whole = list(find_owners(dataset.dataset, unit, len(dataset.dataset)))  # type: ignore[arg-type]
        return [whole[i] for i in dataset.indices]
    columns = getattr(dataset, "column_names", None)
    columns = getattr(dataset, "columns", None) if columns is None else columns
    if columns is not None and not callable(columns):
        if unit not in list(columns):
            raise InvalidInput(
                f"unit={unit!r} is not a column of the dataset: it has {', '.join(map(str, columns))[:200]}"
            )
        return _to_list(dataset[unit])
    first = dataset[0] if not isinstance(dataset, Tensor | tuple) else None
    if not isinstance(first, Mapping) or unit not in first:
        raise InvalidInput(
            f"unit={unit!r} names a column, but the dataset has no such one: give one owner for each record, "
            "as a list, an array or a tensor"
        )
    return [dataset[i][unit] for i in range(records)]


def _to_list(column: Any) -> list[Any]:
    if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
        raise InvalidInput(
            f"unit is a {type(column).__name__}, must hold one owner for each record, or name a column of the dataset"
        )
    if getattr(column, "ndim", 1) != 1:
        raise InvalidInput(f"unit has {column.ndim} dimensions, must have 1: one owner for each record; {ONE_OWNER}")
    plain = getattr(column, "tolist", None) or getattr(column, "to_pylist", None)
    return plain() if plain else list(column)


ONE_OWNER = (
    "a record of several owners would change with each of them, which is not priced; give it to one of them, or make "
    "one text of the parts of a name"
)


def number_owners(owners: Iterable[Any], records: int) -> tuple[Tensor, NDArray[np.uint64]]:
    """Number the owners in the order in which they first appear, and hash the name of each.

    Errors reveal neither who nor how many.
    """
    numbers: dict[Any, int] = {}
    found: list[int] = []
    for given in owners:
        owner = given.item() if isinstance(given, Tensor | np.ndarray) and given.ndim == 0 else given
        if isinstance(owner, SEVERAL):
            raise InvalidInput(f"unit gives a record a {type(owner).__name__} of owners, must give one: {ONE_OWNER}")
        if _is_missing(owner):
            raise InvalidInput(
                "unit gives some records no owner (None, NaN or an empty text): leave these records out, or give each "
                "an owner"
            )
        try:
            found.append(numbers.setdefault(owner, len(numbers)))
        except TypeError:
            raise InvalidInput(
                f"unit gives a record an owner of type {type(owner).__name__}, which cannot be compared: "
                "use texts or numbers"
            ) from None
    if len(found) != records:
        raise InvalidInput(f"unit has {len(found)} owners, must have {records}: one for each record of the dataset")
    return torch.tensor(found), np.array([_hash(owner) for owner in numbers], dtype=np.uint64)


def _hash(owner: object) -> int:
    digest = hashlib.blake2b(repr(owner).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _is_missing(owner: Any) -> bool:
    """Whether a record has no owner: as one unit, such records would change with each of their true owners."""
    if owner is None or (isinstance(owner, str) and not owner.strip()):
        return True
    try:
        return bool(owner != owner)  # NaN is not itself
    except TypeError:  # pandas' missing value does not say whether it is
        return True
