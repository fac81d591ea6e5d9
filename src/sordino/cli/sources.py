"""The records of a run: a benchmark by name, or a user's own .npz or .csv. Scaling uses public numbers alone."""

from __future__ import annotations

import csv
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from sordino import data as benchmarks
from sordino.cli.config import DataChoice
from sordino.data import Data, Step
from sordino.errors import InvalidInput

Array = NDArray[np.float64]


def load(choice: DataChoice) -> Data:
    """The records that `choice` describes; what the preparation read of them is in `Data.caveats`."""
    if choice.source.replace("_", "-") in benchmarks.LOADERS:
        return benchmarks.load(choice.source)
    path = Path(choice.source)
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        names = ", ".join(benchmarks.LOADERS)
        raise InvalidInput(f"data={choice.source} must be a .npz or .csv file, or one of {names}")
    if not path.is_file():
        raise InvalidInput(f"data={path} does not exist: give the path of a .npz or .csv file")
    try:
        inputs, labels = readers[path.suffix](path, choice.target)
    except OSError as error:
        raise InvalidInput(f"cannot read data={path}: {error.strerror or error}") from None
    return _prepared(path, choice, inputs, labels)


def require_count(choice: DataChoice, data: Data) -> int:
    """The number of training records: public, kept with the run, and the only thing about the records that is."""
    count = len(data.train_set)  # type: ignore[arg-type]  # Dataset does not promise a length
    if choice.records not in (None, count):
        raise InvalidInput(
            f"data={choice.source} has {count} training records, not {choice.records} as when its run began: "
            "a guarantee is about the records it began with; start a new run"
        )
    return count


def _read_npz(path: Path, target: str | None) -> tuple[Array, Array]:
    if target is not None:
        raise InvalidInput(f"target={target!r} belongs to a .csv file: {path.name} must hold arrays x and y")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if missing := {"x", "y"} - set(arrays.files):
                held = ", ".join(arrays.files) or "nothing"
                raise InvalidInput(
                    f"{path} has no array {min(missing)!r}, it holds {held}: save it as np.savez(x=, y=)"
                )
            inputs, labels = arrays["x"], arrays["y"]
    except (ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} is not a .npz file of plain arrays: save it with np.savez(x=, y=)") from None
    for name, array in (("x", inputs), ("y", labels)):
        if not np.issubdtype(array.dtype, np.number) and array.dtype != bool:
            raise InvalidInput(f"{path}: array {name} is {array.dtype}, must be numeric")
    if labels.ndim != 1 or inputs.ndim < 2 or len(labels) != len(inputs):
        raise InvalidInput(f"{path}: x is {inputs.shape} and y is {labels.shape}, must be (N, ...) and (N,)")
    return inputs.astype(np.float64), labels.astype(np.float64)


def _read_csv(path: Path, target: str | None) -> tuple[Array, Array]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path} is not a UTF-8 CSV file: {error}") from None
    if target is None:
        raise InvalidInput(f"{path} needs --target COLUMN: it has {', '.join(header) or 'no columns'}")
    if target not in header:
        raise InvalidInput(f"{path} has no column {target!r}: it has {', '.join(header) or 'no columns'}")
    if ragged := next((number for number, row in enumerate(rows, 2) if len(row) != len(header)), None):
        raise InvalidInput(f"{path} line {ragged} does not have {len(header)} cells: every row needs one per column")
    columns = {name: _numbers(path, name, [row[i] for row in rows]) for i, name in enumerate(header)}
    if len(columns) != len(header):
        raise InvalidInput(f"{path} names a column twice: every column needs its own name")
    labels = columns.pop(target)
    if not columns:
        raise InvalidInput(f"{path} has no column besides {target!r}: nothing can be learnt from it")
    return np.stack(list(columns.values()), axis=1), labels


def _numbers(path: Path, column: str, cells: list[str]) -> Array:
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        raise InvalidInput(f"{path}: column {column!r} is not numeric: encode it as numbers or remove it") from None


def _prepared(path: Path, choice: DataChoice, inputs: Array, labels: Array) -> Data:
    if not len(labels):
        raise InvalidInput(f"{path} has 0 records: nothing can be learnt from it")
    scaled, steps = _scaled(choice, inputs)
    count = _class_count(path, choice, labels)
    if choice.classes is None:
        steps.append(Step("the classes were counted in the labels", True, f"--classes {count}"))
    held = _held_out(choice.held_out, len(labels))
    if held.any():
        what = "the held-out records are not protected, and their accuracy speaks of them"
        steps.append(Step(what, True, "hold out public records"))
    x, y = torch.from_numpy(scaled).float(), torch.from_numpy(labels).long()
    train, test = torch.from_numpy(~held), torch.from_numpy(held)
    return Data(
        path.stem,
        TensorDataset(x[train], y[train]),
        TensorDataset(x[test], y[test]),
        tuple(str(label) for label in range(count)),
        tuple(steps),
    )


def _scaled(choice: DataChoice, inputs: Array) -> tuple[Array, list[Step]]:
    if choice.scale is not None and choice.bounds is not None:
        raise InvalidInput("scale and bounds are both given: use one of them")
    if choice.scale is not None:
        if not (choice.scale > 0 and math.isfinite(choice.scale)):
            raise InvalidInput(f"scale={choice.scale} must be > 0: inputs are divided by it")
        return inputs / choice.scale, [Step(f"inputs divided by {choice.scale:g}")]
    if choice.bounds is None:
        return inputs, []
    low, high = choice.bounds
    if not (low < high and math.isfinite(high - low)):
        raise InvalidInput(
            f"bounds={low:g},{high:g} must be finite and increasing: inputs are mapped from there to 0..1"
        )
    return (np.clip(inputs, low, high) - low) / (high - low), [Step(f"inputs mapped from {low:g}..{high:g} to 0..1")]


def _class_count(path: Path, choice: DataChoice, labels: Array) -> int:
    if not np.isfinite(labels).all() or (labels != np.floor(labels)).any() or labels.min() < 0:
        raise InvalidInput(f"{path}: the target must hold classes 0, 1, 2, ...: number them from 0")
    found = int(labels.max()) + 1
    if choice.classes is not None and found > choice.classes:
        raise InvalidInput(
            f"{path}: the target must hold classes 0..{choice.classes - 1}, for classes={choice.classes}"
        )
    if found > 10_000:
        raise InvalidInput(
            f"{path}: the target holds a class above 9999: is it a number to predict? It must be a class"
        )
    return max(2, choice.classes or found)


def _held_out(share: float, count: int) -> NDArray[np.bool_]:
    """Evenly spread over the file, whatever the records hold: every fifth for a share of 0.2."""
    if not 0 <= share < 1:
        raise InvalidInput(f"held-out={share} must be in [0, 1): it is the share that is not trained on")
    marks = np.floor(np.arange(count + 1) * share + 1e-9)
    return np.asarray(np.diff(marks) > 0)
