"""A table split into training and held-out records, to be encoded once its schema is complete."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from sordino.data.dataset import Data, Step
from sordino.data.tabular import Table, is_missing
from sordino.data.tabular_encoding import encode, require_public
from sordino.data.tabular_schema import Schema
from sordino.errors import InvalidInput

HELD_OUT = Step(
    "the held-out records are not protected, and their accuracy speaks of them", True, "hold out public records"
)


@dataclass(frozen=True, eq=False)
class Sheet:
    """Training and held-out records as text, and which column holds the class."""

    train: Table
    held_out: Table
    target: str

    @classmethod
    def split(cls, table: Table, target: str, held_out: NDArray[np.bool_]) -> Sheet:
        """By a mask that read no record; held-out records without a class have nothing to say and are left out."""
        held = table.rows(held_out)
        known = np.array([not is_missing(cell) for cell in held.columns[target]], np.bool_)
        return cls(table.rows(~held_out), held.rows(known), target)

    def check(self, schema: Schema) -> None:
        """Refuse records that contradict what is public, or that leave nothing to learn, before anything is spent."""
        if not len(self.train):
            raise InvalidInput(f"{self.train.name} has 0 records: nothing can be learnt from it")
        for part in (self.train, self.held_out):
            require_public(part, schema, self.target)

    def encoded(self, schema: Schema) -> Data:
        """The records as tensors."""
        assert schema.classes is not None
        train, test = (TensorDataset(*encode(part, schema, self.target)) for part in (self.train, self.held_out))
        held = (HELD_OUT,) if len(self.held_out) else ()
        encoding = Step("columns encoded by a schema that is public or was released with noise")
        return Data(self.train.name, train, test, schema.classes, (encoding, *held))
