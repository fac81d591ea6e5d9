"""Augmentation multiplicity: several random views of every record, averaged before its gradient is clipped.

De et al. (2022) show K views of each record in a step, such as shifted and mirrored copies of an image, and clip the
mean of their K gradients. A record still moves the sum by one vector within the clipping bound, so the price is the
same, while the vector is less noisy. Views are rows that belong to one unit of protection, like the records of a user
(`sordino.units`): the engines measure the mean's length without forming K gradients.

The price makes one demand on the views: a record's views may depend only on that record and on randomness that no
record influences. So every record has its own coins. They are seeded by a keyed hash of the record's place in the
dataset and the number of the draw. The run draws a new key from its source at every opening, and keeps it secret.
Without the key, or with one stream for all records, which an additional record would shift, the views of other records
would depend on who is in the draw.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from sordino.chance import in_turn, set_numpy_aside
from sordino.errors import InvalidInput, SordinoError, locate_error
from sordino.gradients.engine import Groups
from sordino.noise import Source

Augmentation = Callable[[Any], Any]
"""``augmentation(record)`` returns one random view of a record as the dataset returns it, e.g. an image with its class.

It may draw from torch, NumPy's global generator and Python's ``random``, all of which are seeded for the record.
"""

GIVEN_ALONE = "the augmentation looks at nothing but the record that it is given and at its coins"
"""What no test can show about a user's function: every guarantee rests on it."""
OWN_COINS = "the generators that the dataset holds itself have secret seeds, and no two of a loader's workers share one"
"""What must hold if a record came out different the second time, although every generator was seeded."""
UNTRIED = "the augmentation looks at nothing but the record that it is given (which it was not seen to do)"
"""What must hold if it could not be tested, or was seen to fail: the guarantee says so in its headline."""

KEY_BYTES = 16


class Views:
    """`count` views of every record, made by `augmentation`, or by a dataset that answers differently each time."""

    def __init__(self, count: int, augmentation: Augmentation | None = None) -> None:
        self.count, self.augmentation = count, augmentation
        self._key: bytes | None = None

    def forget(self) -> None:
        """Drop the key: every opening of a run draws a new one."""
        self._key = None

    def prepare(self, source: Source) -> None:
        """Draw a key from the run's source unless there is one; called before the first draw of an opening."""
        if self._key is None:
            self._key = (source.uniform(KEY_BYTES) * 256).astype(np.uint8).tobytes()

    def spread(self, rows: Tensor, groups: Groups | None) -> tuple[Tensor, Groups | None]:
        """Repeat every row `count` times in a row; all copies belong to the row's unit."""
        if self.count == 1:
            return rows, groups
        owners = torch.arange(len(rows)) if groups is None else groups.owners
        size = len(rows) if groups is None else groups.size
        return rows.repeat_interleave(self.count), Groups(owners.repeat_interleave(self.count), size)

    def make(self, load: Callable[[int], Any], rows: Tensor, choice: int) -> list[Any]:
        """Make one view for each of `rows`, which hold every record `count` times; `load` reads the record of a row."""
        views: list[Any] = []
        with seeded_randomness() as seed:
            for row in rows[:: self.count].tolist():
                seed(self._hash(row, choice))
                views += self._see(load, row)
        return views

    def _see(self, load: Callable[[int], Any], row: int) -> list[Any]:
        """Make the views of one record. For an augmentation it is loaded once, and each view gets its own copy."""
        if self.augmentation is None:
            return [load(row) for _ in range(self.count)]
        record = load(row)
        try:
            return [self.augmentation(_copy(record)) for _ in range(self.count)]
        except SordinoError:
            raise
        except Exception as error:  # its words may tell a private value
            raise InvalidInput(
                f"augmentation failed on a record ({locate_error(error)}): it is given one record as the dataset "
                "gives it, such as (image, class), and returns another"
            ) from error

    def _hash(self, row: int, choice: int) -> int:
        """Return a seed for the record at `row`. Views made before the first draw, to probe a model, need no secret."""
        words = row.to_bytes(8, "little") + choice.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(words, digest_size=8, key=self._key or b"").digest(), "little")

    def is_alone(self, load: Callable[[int], Any], length: int) -> bool:
        """Whether a record gets the same views again from the same coins, after another record was read."""
        some = [torch.tensor([row]).repeat_interleave(self.count) for row in (0, length - 1, 0)]
        first, _, again = (self.make(load, rows, 0) for rows in some)
        return _are_same(first, again)


def is_alone(load: Callable[[int], Any], length: int) -> bool:
    """Whether a record is the same again with the same coins, after another record was read.

    A record that cannot be read is no objection here: the probe of the model reports it, without quoting its error.
    """
    found = []
    with seeded_randomness() as seed, suppress(Exception):
        for row in (0, length - 1, 0):
            seed(0)
            found.append(copy.deepcopy(load(row)))
    return len(found) < 3 or _are_same(found[0], found[-1])


def require_views(augment: int | None, augmentation: Augmentation | None, plain: bool) -> Views | None:
    """Return the views that were asked for, or None; `plain` says that the records are plain tensors."""
    if augment is None:
        if augmentation is not None:
            raise InvalidInput("augmentation= needs the number of views of a record: augment=8, or 1 for a single one")
        return None
    if isinstance(augment, bool) or not isinstance(augment, int) or augment < 1:
        raise InvalidInput(f"augment={augment!r} must be a whole number >= 1: the number of views of a record")
    if augmentation is not None and not callable(augmentation):
        raise InvalidInput(f"augmentation is a {type(augmentation).__name__}, must be a function from record to record")
    if augmentation is None and plain:
        raise InvalidInput(
            f"augment={augment} of plain tensors would be {augment} equal copies: give augmentation=, a function from "
            "a record to a random view of it, such as sordino.augmentation.ShiftAndMirror()"
        )
    return Views(augment, augmentation)


@contextmanager
def seeded_randomness() -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch, NumPy and Python; restore their generators at the end."""

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        np.random.seed(value & 0xFFFFFFFF)  # noqa: NPY002 - users draw from it
        random.seed(value)

    with in_turn():
        ours, python = torch.get_rng_state(), random.getstate()
        try:
            with set_numpy_aside():
                yield seed
        finally:
            torch.set_rng_state(ours)
            random.setstate(python)


def _copy(record: Any) -> Any:
    """Return a copy that may be changed in place; `copy.deepcopy` of a row would copy the whole tensor."""
    return tree_map(lambda part: part.clone() if isinstance(part, Tensor) else copy.deepcopy(part), record)


def _are_same(one: object, other: object) -> bool:
    mine, theirs = tree_leaves(one), tree_leaves(other)
    return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is type(other) and type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return _are_same(vars(one), vars(other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


@dataclass(frozen=True)
class ShiftAndMirror:
    """The usual augmentation of small images: a shift by up to `pixels` in each direction, mirrored by a fair coin.

    A record is an image [channels, height, width], or a tuple or list that begins with one. What a shift uncovers is
    filled with the image's mirror image at that edge. Leave `mirror` off if left and right differ, as in writing.
    """

    pixels: int = 4
    mirror: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pixels, int) or self.pixels < 0:
            raise InvalidInput(f"pixels={self.pixels!r} must be a whole number >= 0: how far an image is shifted")

    def __call__(self, record: Any) -> Any:
        if hasattr(record, "_fields"):  # a named tuple
            return record._replace(**{record._fields[0]: self._move(record[0])})
        if isinstance(record, tuple | list) and record:
            return type(record)((self._move(record[0]), *record[1:]))
        return self._move(record)

    def _move(self, image: Any) -> Tensor:
        if not isinstance(image, Tensor) or image.dim() != 3 or min(image.shape[1:]) <= self.pixels:
            raise InvalidInput(f"a record must begin with an image [channels, H, W] with sides > {self.pixels}")
        height, width = image.shape[1:]
        seen: Tensor = image.flip(2) if self.mirror and bool(torch.rand(()) < 0.5) else image
        if self.pixels == 0:
            return seen
        wide: Tensor = F.pad(seen[None], (self.pixels,) * 4, mode="reflect")[0]
        down, right = torch.randint(2 * self.pixels + 1, (2,)).tolist()
        return wide[:, down : down + height, right : right + width].contiguous()
