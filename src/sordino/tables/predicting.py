"""Keeps a trained model in a run's folder as plain data, loads it again, and predicts for new records.

Predicting spends nothing: model and encoder were released and paid for, and the new records never leave the caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.books import write_durably
from sordino.errors import InvalidInput
from sordino.report.run_folder import Folder
from sordino.tables.dates import derive, name_source
from sordino.tables.encoder import Encoder
from sordino.tables.encoding import encode_columns
from sordino.tables.files import to_table
from sordino.tables.learning import AT_ONCE, Learned, split_rows
from sordino.tables.schema import Schema, Skip
from sordino.tables.table import Table

MODEL = "model.json"
"""The file with the model of a run on a table: its kind, encoder, weights and offsets, all of it public."""
KIND = "table"
SHOWN = 5
"""An error names at most this many missing columns."""
Floats = NDArray[np.float64]


class Inputs(Protocol):
    """Turns a program's records into the inputs of a model; a pure function of each record."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __call__(self, data: Any) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TableInputs:
    """Tables, data frames and arrays as the inputs of a model: the columns that it was trained with, in any order.

    `header` lists the columns of the training table, by which an array without names is read. `classes` is empty for a
    regression, whose values are `center` + `spread` · score, within `low` and `high`.
    """

    columns: tuple[str, ...]
    width: int
    encode: Callable[[Table], NDArray[np.float32]]
    target: str
    header: tuple[str, ...]
    classes: tuple[str, ...] = ()
    center: float = 0.0
    spread: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __call__(self, data: Any) -> Tensor:
        """Return the inputs [N, inputs] of all records."""
        table = self.read(data)
        parts = [self.encode(part) for part in split_rows(table)]
        return torch.from_numpy(np.concatenate(parts) if parts else self.encode(table))

    def read(self, data: Any) -> Table:
        """Read the records with every column that is needed; an error names missing ones."""
        table = derive(to_table(data, columns=self._name(data)), self.columns)
        missing = [name for name in self.columns if name not in table.columns]
        if missing:
            sources = list(dict.fromkeys(name_source(name) for name in missing))
            shown = ", ".join(map(repr, sources[:SHOWN])) + (
                f" and {more} more" if (more := len(sources) - SHOWN) > 0 else ""
            )
            what = "column" if len(sources) == 1 else "columns"
            raise InvalidInput(
                f"{table.name} has no {what} {shown}, which the model was trained with: {table.suggest(sources[0])}"
            )
        return table.pick(self.columns)

    def _name(self, data: Any) -> Sequence[str] | None:
        """Name the columns of an array: those of the training, with or without the target."""
        width = np.shape(data)[1] if isinstance(data, np.ndarray) and np.ndim(data) == 2 else None
        inputs = [name for name in self.header if name != self.target]
        return inputs if width == len(inputs) else list(self.header) if width == len(self.header) else None


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, ready for use: ``model, encoder = sordino.load(run)`` are a plain module and its inputs."""

    model: nn.Module
    encoder: Inputs

    def __iter__(self) -> Iterator[Any]:
        yield self.model
        yield self.encoder

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, empty for a regression."""
        return self.encoder.classes

    @torch.no_grad()
    def score(self, data: Any) -> Floats:
        """Return [N, K]: the model's scores, in float64."""
        parts: Iterator[Tensor]
        if isinstance(self.encoder, TableInputs):
            parts = (torch.from_numpy(self.encoder.encode(part)) for part in split_rows(self.encoder.read(data)))
        else:
            parts = iter(self.encoder(data).split(AT_ONCE))
        dtype = next((parameter.dtype for parameter in self.model.parameters()), torch.float32)
        found = [self.model(part.to(dtype)).double().numpy() for part in parts if len(part)]
        return np.concatenate(found) if found else np.zeros((0, max(1, len(self.classes))))

    def predict_proba(self, data: Any) -> Floats:
        """Return [N, classes]: the probability of every class."""
        return to_chances(self.score(data), self.classes)

    def predict(self, data: Any) -> NDArray[Any]:
        """Predict the likeliest class by name, or the value."""
        scores = self.score(data)
        if self.classes:
            return np.asarray(np.array(self.classes, np.object_)[to_chances(scores, self.classes).argmax(1)])
        assert isinstance(self.encoder, TableInputs)
        return find_values(scores, self.encoder)

    def tabulate(self, data: Any) -> Any:
        """Return an arrow table of predictions: the likeliest class and the probability of each, or the value."""
        scores = self.score(data)
        if not self.classes:
            assert isinstance(self.encoder, TableInputs)
            return pa.table({"predicted": find_values(scores, self.encoder)})
        chances = to_chances(scores, self.classes)
        named = pa.array(np.array(self.classes, np.object_)[chances.argmax(1)], pa.string())
        each = {f"probability of {name}": chances[:, place] for place, name in enumerate(self.classes)}
        return pa.table({"predicted": named, **each})


def to_chances(scores: Floats, classes: Sequence[str]) -> Floats:
    """Probabilities [N, classes] of scores, which are one log-odds for two classes or a logit for each."""
    if not classes:
        raise InvalidInput("a regression has no probabilities: use predict")
    if scores.shape[1] == 1 and len(classes) == 2:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    raised = np.exp(scores - scores.max(1, keepdims=True))
    found: Floats = raised / raised.sum(1, keepdims=True)
    return found


def find_values(scores: Floats, inputs: TableInputs) -> Floats:
    """Return the values of a regression, within the range of its target."""
    return np.asarray(np.clip(inputs.center + inputs.spread * scores[:, 0], inputs.low, inputs.high))


def by_schema(schema: Schema, target: str, header: Sequence[str]) -> TableInputs:
    """Return the inputs of a network that was trained with a complete schema."""
    used = {name: column for name, column in schema.columns.items() if not isinstance(column, Skip)}
    kept = Schema(used, schema.classes)
    return TableInputs(
        *(tuple(used), kept.width, lambda table: encode_columns(table, kept)),
        *(target, tuple(header), schema.classes or ()),
    )


def by_encoder(encoder: Encoder, header: Sequence[str]) -> TableInputs:
    """Return the inputs of a model that was learnt from a table."""
    return TableInputs(
        columns=tuple(encoder.blocks),
        width=encoder.width,
        encode=encoder.encode,
        target=encoder.target,
        header=tuple(header),
        classes=encoder.classes,
        center=encoder.center,
        spread=encoder.spread,
        low=encoder.low,
        high=encoder.high,
    )


def use(learned: Learned, header: Sequence[str]) -> Trained:
    """Make a learnt model ready for use."""
    return Trained(learned.model, by_encoder(learned.encoder, header))


def save_model(folder: Path, learned: Learned, header: Sequence[str]) -> None:
    """Keep a learnt model in its run's folder: plain numbers and names, all of them released."""
    assert isinstance(learned.model, nn.Linear)
    plain = {
        "kind": KIND,
        "header": list(header),
        "encoder": learned.encoder.to_plain(),
        "weights": learned.model.weight.tolist(),
        "offsets": learned.model.bias.tolist(),
    }
    try:
        write_durably(folder / MODEL, json.dumps(plain, allow_nan=False).encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {folder / MODEL}: {error.strerror}") from None


def is_saved(folder: Path) -> bool:
    """Whether the folder holds a model that was learnt from a table."""
    return (folder / MODEL).is_file()


def load_model(folder: Path) -> Trained:
    """Load the model of a run on a table. The folder may come from anybody: it holds numbers and names, and no code."""
    plain = Folder(folder).json(MODEL)
    if plain is None or plain.get("kind") != KIND:
        raise InvalidInput(f"{folder} holds no {MODEL} of a table: give the folder of a run of `sordino train`")
    encoder = Encoder.from_plain(_require(plain, "encoder", dict))
    header = [str(name) for name in _require(plain, "header", list)]
    model = _build(folder, _require(plain, "weights", list), _require(plain, "offsets", list))
    outputs = 1 if len(encoder.classes) in (0, 2) else len(encoder.classes)
    if (model.in_features, model.out_features) != (encoder.width, outputs):
        raise InvalidInput(f"{folder / MODEL} contradicts itself: its weights do not fit its encoder")
    return Trained(model, by_encoder(encoder, header))


def _require(plain: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(plain.get(name), kind):
        raise InvalidInput(f"{MODEL} is not whole: it has no {name}")
    return plain[name]


def _build(folder: Path, weights: list[Any], offsets: list[Any]) -> nn.Linear:
    try:
        rows, biases = torch.tensor(weights, dtype=torch.float32), torch.tensor(offsets, dtype=torch.float32)
        model = nn.Linear(rows.shape[1], rows.shape[0])
        with torch.no_grad():
            model.weight.copy_(rows)
            model.bias.copy_(biases)
    except (IndexError, RuntimeError, TypeError, ValueError):
        raise InvalidInput(f"{folder / MODEL} is damaged: its weights are not a matrix of numbers") from None
    return model.eval()


def write_predictions(predictions: Any, path: Path) -> None:
    """Write an arrow table as .csv or .parquet, by the ending of the file."""
    writers = {".csv": pa.csv.write_csv, ".parquet": pa.parquet.write_table}
    write = writers.get(path.suffix.lower())
    if write is None:
        raise InvalidInput(f"out={path} must end in .csv or .parquet")
    partial = path.with_name(path.name + ".partial")
    try:
        write(predictions, partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        why = str(error).rpartition("] ")[2]  # arrow's words end with the system's: ... Detail: [errno 28] No space ...
        raise InvalidInput(f"cannot write {path}: {why}") from None
