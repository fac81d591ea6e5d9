"""The records of a run: a benchmark by name, or a user's own table, arrays or images, scaled by public numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.cli import arrays
from sordino.cli.arrays import Array
from sordino.cli.config import DataChoice
from sordino.data import folder, tabular
from sordino.data.dataset import Data, Step
from sordino.data.tabular_sheet import HELD_OUT, Sheet
from sordino.errors import InvalidInput
from sordino.lab import data as benchmarks

TABLES = (".csv", ".tsv")
HELD_OUT_SHARE = 0.2
IMAGE_SIZE = 32
_ACCEPTED = "a .csv or .tsv table, a .npz file, a folder of images by class"


def is_benchmark(source: str) -> bool:
    """Whether the name is that of a dataset that Sordino knows."""
    return source.replace("_", "-") in benchmarks.LOADERS


def is_table(source: str) -> bool:
    """Whether the name is that of a file with a header and columns."""
    return Path(source).suffix.lower() in TABLES


def assumed(source: str) -> tuple[str, ...]:
    """What a guarantee about these records takes for public."""
    if is_table(source):
        return ("the names of the columns, the number of records and what the user gave as public are public",)
    if Path(source).is_dir():
        return ("the names of the folders and the number of images are public",)
    return () if is_benchmark(source) else ("the number of records and the shape of one are public",)


def load(choice: DataChoice) -> Data | Sheet:
    """The records that `choice` describes; those of a table are still text, because its schema may be open.

    What the preparation read of them is in `Data.caveats`.
    """
    if is_benchmark(choice.source):
        return benchmarks.load(choice.source)
    path = Path(choice.source)
    if not path.exists():
        raise InvalidInput(f"data={path} does not exist: give {_ACCEPTED}, or one of {', '.join(benchmarks.LOADERS)}")
    if path.is_dir():
        return _folder(path, choice)
    if not path.is_file():  # a pipe would be waited for, a device never ends
        raise InvalidInput(f"data={path} is no regular file: give {_ACCEPTED}")
    if is_table(choice.source):
        return _sheet(path, choice)
    if path.suffix != ".npz":
        raise InvalidInput(f"data={path} must be {_ACCEPTED}, or one of {', '.join(benchmarks.LOADERS)}")
    if choice.target is not None:
        raise InvalidInput(f"target={choice.target!r} belongs to a .csv file: {path.name} must hold arrays x and y")
    return _prepared(path, choice, *arrays.read(path))


def require_count(choice: DataChoice, records: Data | Sheet) -> int:
    """The number of training records: public, kept with the run, and the only thing about the records that is."""
    count = len(records.train) if isinstance(records, Sheet) else len(records.train_set)  # type: ignore[arg-type]  # Dataset does not promise a length
    if choice.records not in (None, count):
        raise InvalidInput(
            f"data={choice.source} has {count} training records, not {choice.records} as when its run began: "
            "a guarantee is about the records it began with; start a new run"
        )
    return count


def _sheet(path: Path, choice: DataChoice) -> Sheet:
    if choice.scale is not None:
        raise InvalidInput(f"scale={choice.scale:g} is for .npz files: give --bounds for the numbers of {path.name}")
    table = tabular.read(path)
    names = ", ".join(table.columns)
    if choice.target is None:
        raise InvalidInput(f"{path} needs --target COLUMN: it has {names}")
    if choice.target not in table.columns:
        raise InvalidInput(f"{path} has no column {choice.target!r}: it has {names}")
    rows = ("\0".join(cells).encode() for cells in zip(*table.columns.values(), strict=True))
    return Sheet.split(table, choice.target, _held_out(choice.held_out, rows))


def _folder(path: Path, choice: DataChoice) -> Data:
    for name, value in (("target", choice.target), ("scale", choice.scale), ("bounds", choice.bounds)):
        if value is not None:
            raise InvalidInput(f"{name}={value} does not belong to a folder of images: its pixels are mapped to 0..1")
    classes = choice.classes or folder.class_names(path)
    inputs, labels = folder.load(path, classes, choice.image_size or IMAGE_SIZE, grey=bool(choice.grey))
    pixels = Step(f"images resized to {inputs.shape[-1]}x{inputs.shape[-1]}, pixels mapped to 0..1")
    return _split(path.name, choice, inputs, labels, classes, (pixels,))


def _prepared(path: Path, choice: DataChoice, inputs: Array, labels: Array) -> Data:
    if not len(labels):
        raise InvalidInput(f"{path} has 0 records: nothing can be learnt from it")
    scaled, steps = _scaled(choice, inputs)
    count = _class_count(path, choice, labels)
    if choice.classes is None:
        steps.append(Step("the classes were counted in the labels", True, f"--classes {count}"))
    classes = choice.classes or tuple(str(number) for number in range(count))
    x, y = torch.from_numpy(scaled).float(), torch.from_numpy(labels).long()
    return _split(path.stem, choice, x, y, classes, tuple(steps))


def _split(
    name: str, choice: DataChoice, x: Tensor, y: Tensor, classes: tuple[str, ...], steps: tuple[Step, ...]
) -> Data:
    rows = (image.numpy().tobytes() + bytes(str(int(label)), "ascii") for image, label in zip(x, y, strict=True))
    held = torch.from_numpy(_held_out(choice.held_out, rows))
    train, test = (TensorDataset(x[part], y[part]) for part in (~held, held))
    if not len(train):
        raise InvalidInput(f"{name} has 0 records to train on: hold out fewer than {len(y)}")
    return Data(name, train, test, classes, (*steps, HELD_OUT) if len(test) else steps)


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
    given = None if choice.classes is None else len(choice.classes)
    if given is not None and found > given:
        raise InvalidInput(f"{path}: the target must hold classes 0..{given - 1}, for {given} classes")
    if found > 10_000:
        raise InvalidInput(
            f"{path}: the target holds a class above 9999: is it a number to predict? It must be a class"
        )
    return max(2, given or found)


def _held_out(share: float | None, rows: Iterable[bytes]) -> NDArray[np.bool_]:
    """About a `share` of the records, each of which decides by its own bytes alone.

    By position, one record more would move every later one between the parts, and the two sets of training records
    would be no neighbours.
    """
    share = HELD_OUT_SHARE if share is None else share
    if not 0 <= share < 1:
        raise InvalidInput(f"held-out={share} must be in [0, 1): it is the share that is not trained on")
    digests = (hashlib.blake2b(row, digest_size=8, person=b"held out").digest() for row in rows)
    return np.fromiter((int.from_bytes(digest, "big") < share * 2**64 for digest in digests), np.bool_)
