"""Reads a user's own records from files: a table, arrays or a folder of images, scaled by public numbers alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from sordino.errors import InvalidInput, SordinoError
from sordino.tables.arrays import Array, read_arrays
from sordino.tables.dataset import Data, Preprocessing
from sordino.tables.dates import expand, replace_dates
from sordino.tables.delimited import Dialect, Told
from sordino.tables.encoding import encode, require_public
from sordino.tables.files import is_table, read_table
from sordino.tables.schema import Schema
from sordino.tables.table import Cells, Table, find_missing, parse_values

__all__ = ["DataChoice", "Sheet", "is_table", "read_records", "read_table"]

IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
HELD_OUT_SHARE = 0.2
IMAGE_SIZE = 32
MOST_CLASSES = 10_000
HELD_OUT = Preprocessing(
    "the held-out records are not protected, and the accuracy reveals something about them",
    True,
    "hold out public records",
)
_ACCEPTED = "a table (.csv, .tsv, .csv.gz, .parquet, .xlsx), a .npz file, a folder of images by class"
MOST_NUMBERS = 20
"""A target with more different numbers than this is a number to predict, not a class."""
MOST_WORDS = 1000
_AT_ONCE = 1 << 10


class PillowMissing(SordinoError, ImportError):
    """Images need Pillow, which is not installed."""


@dataclass(frozen=True)
class DataChoice:
    """Which records, and the public numbers that scale them. `records` is the public number of training records.

    `prepare` is the share of ε for whatever the schema of a table leaves open. `image_size` and `grey` are for folders.
    `header` to `missing` say how a table is spelled (`Dialect`). `features` replace the pixels of images.
    """

    source: str = "digits"
    target: str | None = None
    scale: float | None = None
    bounds: tuple[float, float] | None = None
    held_out: float | None = None
    classes: tuple[str, ...] | None = None
    records: int | None = None
    prepare: float | None = None
    image_size: int | None = None
    grey: bool | None = None
    header: bool | None = None
    separator: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    missing: tuple[str, ...] | None = None
    features: str | None = None

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.header, self.separator, self.encoding, self.decimal, self.missing or ())


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table as training and held-out records in text, to be encoded once its schema is complete."""

    train: Table
    held_out: Table
    target: str

    @classmethod
    def split(cls, table: Table, target: str, held_out: NDArray[np.bool_]) -> Sheet:
        """Split by a mask that read no record; leave out held-out records without a class, which measure nothing."""
        held = table.select(held_out)
        return cls(table.select(~held_out), held.select(~find_missing(held.columns[target])), target)

    def expand(self, schema: Schema) -> tuple[Sheet, Schema]:
        """Return sheet and schema with every date in parts."""
        (train, parts), (held, _) = (expand(part, schema) for part in (self.train, self.held_out))
        return Sheet(train, held, self.target), parts

    def take_parts(self, schema: Schema) -> Sheet:
        """Return the same with the parts of dates that an expanded schema names."""
        train, held = (replace_dates(part, schema.columns) for part in (self.train, self.held_out))
        return Sheet(train, held, self.target)

    def check(self, schema: Schema, task: str | None = None) -> None:
        """Refuse records that contradict public knowledge or leave nothing to learn, before anything is spent."""
        if not len(self.train):
            raise InvalidInput(f"{self.train.name} has 0 records: nothing can be learnt from it")
        for part in (self.train, self.held_out):
            require_public(part, schema, self.target)
        if schema.classes is None and task != "regression":
            require_classes(Cells.of(self.train.columns[self.target]), self.target)

    def encode(self, schema: Schema) -> Data:
        """Encode the records as tensors."""
        assert schema.classes is not None
        train, test = (TensorDataset(*encode(part, schema, self.target)) for part in (self.train, self.held_out))
        held = (HELD_OUT,) if len(self.held_out) else ()
        encoding = Preprocessing("columns encoded by a schema that is public or was released with noise")
        return Data(self.train.name, train, test, schema.classes, (encoding, *held))


def require_classes(cells: Cells, target: str) -> None:
    """Refuse a target whose values are not classes, before anything is spent on their names.

    The error says only what is wrong, and nothing else about the records. If the names of the classes are public,
    nothing is looked at.
    """
    values = cells.values.filter(~find_missing(cells.list_values()))
    if len(values) < 2:
        held = "1 class" if len(values) else "0 classes"
        raise InvalidInput(f"target {target!r} holds {held}, it takes 2 to tell apart: is it the right column?")
    if len(values) > MOST_NUMBERS and 2 * np.isnan(parse_values(values)).sum() < len(values):
        raise InvalidInput(
            f"target {target!r} holds more than {MOST_NUMBERS} different numbers: give --task regression to predict a "
            "number, or --classes with the names of the classes if they are codes"
        )
    if len(values) > min(MOST_WORDS, max(2, len(cells) // 2)):
        raise InvalidInput(
            f"target {target!r} has too many different values to be classes: is it the right column, and is the file "
            "read as it is meant (--separator, --no-header)?"
        )


def list_assumptions(source: str) -> tuple[str, ...]:
    """List what a guarantee about these records takes to be public."""
    if is_table(source):
        return ("the names of the columns, the number of records and what the user gave as public are public",)
    if Path(source).is_dir():
        return ("the names of the folders and the number of images are public",)
    return ("the number of records and the shape of one are public",)


def read_records(choice: DataChoice, known: Iterable[str] = (), told: Told = lambda done, size: None) -> Data | Sheet:
    """Read the records that `choice` describes; those of a table are still text, because its schema may be open.

    `Data.caveats` says what the preparation read about them. `known` are other names that could have been given; `told`
    is called with how much of a table was read.
    """
    path = Path(choice.source)
    or_named = f", or one of {', '.join(known)}" if known else ""
    if path.is_dir():
        return _read_folder(path, choice)
    require_file(choice.source, or_named)
    if is_table(choice.source):
        return _read_sheet(path, choice, told)
    if path.suffix != ".npz":
        raise InvalidInput(f"data={path} must be {_ACCEPTED}{or_named}")
    if choice.target is not None:
        raise InvalidInput(f"target={choice.target!r} belongs to a table: {path.name} must hold arrays x and y")
    return _prepare_arrays(path, choice, *read_arrays(path))


def require_file(source: str, or_named: str = "") -> Path:
    """Require a regular file: a pipe would make us wait, and a device never ends."""
    path = Path(source)
    if not path.exists():
        raise InvalidInput(f"data={path} does not exist: give {_ACCEPTED}{or_named}")
    if not path.is_file():
        raise InvalidInput(f"data={path} is not a regular file: give {_ACCEPTED}")
    return path


def require_count(choice: DataChoice, records: Data | Sheet) -> int:
    """Require the number of training records that the run has kept: only this is public about the records."""
    count = len(records.train) if isinstance(records, Sheet) else len(records.train_set)  # type: ignore[arg-type]  # Dataset does not promise a length
    if choice.records not in (None, count):
        raise InvalidInput(
            f"data={choice.source} has {count} training records, not {choice.records} as when its run began: "
            "a guarantee is about the records it began with; start a new run"
        )
    return count


def _read_sheet(path: Path, choice: DataChoice, told: Told) -> Sheet:
    if choice.scale is not None:
        raise InvalidInput(f"scale={choice.scale:g} is for .npz files: give --bounds for the numbers of {path.name}")
    table = read_table(path, choice.dialect, told)
    if choice.target is None:
        raise InvalidInput(f"{path} needs --target COLUMN: {table.describe()}")
    target = choice.target
    if target not in table.columns:
        raise InvalidInput(f"{path} has no column {target!r}: {table.suggest(target)}")
    return split_table(table, target, choice.held_out)


def split_table(table: Table, target: str, held_out: float | None) -> Sheet:
    """Split into training and held-out records, each by its own content alone."""
    chosen = choose_by_digest(held_out, len(table), _join_cells(table))
    pa.default_memory_pool().release_unused()
    return Sheet.split(table, target, chosen)


def _join_cells(table: Table) -> Iterator[bytes]:
    """Join the cells of every record into one text, some thousand records at a time."""
    columns = [Cells.of(cells) for cells in table.columns.values()]
    between = pa.scalar("\0", pa.large_string())
    for start in range(0, len(table), _AT_ONCE):
        codes = [pa.array(cells.codes[start : start + _AT_ONCE]) for cells in columns]
        parts = [cells.values.take(part).cast(pa.large_string()) for cells, part in zip(columns, codes, strict=True)]
        yield from (row.encode() for row in pc.binary_join_element_wise(*parts, between).to_pylist())


def _read_folder(path: Path, choice: DataChoice) -> Data:
    if choice.target is not None:
        raise InvalidInput(
            f"target={choice.target} does not belong to a folder of images: its subfolders are the classes; "
            f"for one table in {path}, give that file"
        )
    for name, value in (("scale", choice.scale), ("bounds", choice.bounds)):
        if value is not None:
            raise InvalidInput(f"{name}={value} does not belong to a folder of images: its pixels are mapped to 0..1")
    classes = choice.classes or list_classes(path)
    inputs, labels = read_images(path, classes, choice.image_size or IMAGE_SIZE, grey=bool(choice.grey))
    pixels = Preprocessing(f"images resized to {inputs.shape[-1]}x{inputs.shape[-1]}, pixels mapped to 0..1")
    return _split(path.name, choice, inputs, labels, classes, (pixels,))


def _prepare_arrays(path: Path, choice: DataChoice, inputs: Array, labels: Array) -> Data:
    if not len(labels):
        raise InvalidInput(f"{path} has 0 records: nothing can be learnt from it")
    scaled, steps = scale_inputs(choice, inputs)
    count = _count_classes(path, choice, labels)
    if choice.classes is None:
        steps.append(Preprocessing("the classes were counted in the labels", True, f"--classes {count}"))
    classes = choice.classes or tuple(str(number) for number in range(count))
    x, y = torch.from_numpy(scaled).float(), torch.from_numpy(labels).long()
    return _split(path.stem, choice, x, y, classes, tuple(steps))


def _split(
    name: str, choice: DataChoice, x: Tensor, y: Tensor, classes: tuple[str, ...], steps: tuple[Preprocessing, ...]
) -> Data:
    rows = (image.numpy().tobytes() + bytes(str(int(label)), "ascii") for image, label in zip(x, y, strict=True))
    held = torch.from_numpy(choose_by_digest(choice.held_out, len(y), rows))
    train, test = (TensorDataset(x[part], y[part]) for part in (~held, held))
    if not len(train):
        raise InvalidInput(f"{name} has 0 records to train on: hold out fewer than {len(y)}")
    return Data(name, train, test, classes, (*steps, HELD_OUT) if len(test) else steps)


def scale_inputs(choice: DataChoice, inputs: Array) -> tuple[Array, list[Preprocessing]]:
    """Scale inputs by public numbers, and say what was done to them."""
    if choice.scale is not None and choice.bounds is not None:
        raise InvalidInput("scale and bounds are both given: use one of them")
    if choice.scale is not None:
        if not (choice.scale > 0 and math.isfinite(choice.scale)):
            raise InvalidInput(f"scale={choice.scale} must be > 0: inputs are divided by it")
        return inputs / choice.scale, [Preprocessing(f"inputs divided by {choice.scale:g}")]
    if choice.bounds is None:
        return inputs, []
    low, high = choice.bounds
    if not (low < high and math.isfinite(high - low)):
        raise InvalidInput(
            f"bounds={low:g},{high:g} must be finite and increasing: inputs are mapped from there to 0..1"
        )
    return (np.clip(inputs, low, high) - low) / (high - low), [
        Preprocessing(f"inputs mapped from {low:g}..{high:g} to 0..1")
    ]


def _count_classes(path: Path, choice: DataChoice, labels: Array) -> int:
    if not np.isfinite(labels).all() or (labels != np.floor(labels)).any() or labels.min() < 0:
        raise InvalidInput(f"{path}: the target must hold classes 0, 1, 2, ...: number them from 0")
    found = int(labels.max()) + 1
    given = None if choice.classes is None else len(choice.classes)
    if given is not None and found > given:
        raise InvalidInput(f"{path}: the target must hold classes 0..{given - 1}, for {given} classes")
    if found > MOST_CLASSES:
        raise InvalidInput(
            f"{path}: the target holds a class above {MOST_CLASSES - 1}: is it a number to predict? It must be a class"
        )
    return max(2, given or found)


def choose_by_digest(share: float | None, count: int, rows: Iterable[bytes]) -> NDArray[np.bool_]:
    """Choose about a `share` of the records, each by its own bytes alone.

    If position decided, one more record would move every later one, and the two training sets would not be neighbours.
    """
    share = HELD_OUT_SHARE if share is None else share
    if not 0 <= share < 1:
        raise InvalidInput(f"held-out={share} must be in [0, 1): it is the share that is not trained on")
    if share == 0:
        return np.zeros(count, np.bool_)
    digests = (hashlib.blake2b(row, digest_size=8, person=b"held out").digest() for row in rows)
    return np.fromiter((int.from_bytes(digest, "big") < share * 2**64 for digest in digests), np.bool_)


def list_classes(root: Path) -> tuple[str, ...]:
    """List the names of the subfolders, in order."""
    names = tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(names) < 2:
        raise InvalidInput(f"{root} has {len(names)} subfolders, needs one for each of at least 2 classes")
    if wild := next((name for name in names if not name.isprintable()), None):
        raise InvalidInput(f"{root} has a subfolder {wild!r}: the name of a class must be printable")
    return names


def read_images(root: Path, classes: Sequence[str], size: int, *, grey: bool) -> tuple[Tensor, Tensor]:
    """Read every image as [channels, size, size] in 0..1, and its class, in the order of their names.

    Size and channels are public choices, so what an image becomes does not depend on the others.
    """
    if not 8 <= size <= 512:
        raise InvalidInput(f"image-size={size} must be in 8..512: images are resized to a square of that many pixels")
    if unknown := sorted(set(list_classes(root)) - set(classes)):
        raise InvalidInput(f"{root} has a subfolder {unknown[0]!r} that is not among the classes {', '.join(classes)}")
    files = [(path, number) for number, name in enumerate(classes) for path in _list_images(root / name)]
    if not files:
        raise InvalidInput(f"{root} has 0 images: its subfolders must hold {', '.join(sorted(IMAGES))} files")
    numbers = torch.tensor([number for _, number in files])
    return read_pixels([path for path, _ in files], size, grey=grey), numbers


def read_pixels(paths: Sequence[Path], size: int, *, grey: bool) -> Tensor:
    """Read images as [N, channels, size, size] in 0..1."""
    pillow = _import_pillow()
    pixels = np.empty((len(paths), size, size, 1 if grey else 3), np.uint8)
    for row, path in zip(pixels, paths, strict=True):
        row[...] = _read_pixels(pillow, path, size, grey=grey)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255)


def _list_images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES and path.is_file())


def _read_pixels(
    pillow: ModuleType, path: Path, size: int, *, grey: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with pillow.open(path) as image:
            mode = "L" if grey else "RGB"
            small = image.convert(mode).resize((size, size), pillow.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise InvalidInput(f"{path} is not an image that can be read ({type(error).__name__}): remove it") from None
    return np.asarray(small, np.uint8).reshape(size, size, -1)


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise PillowMissing("reading images needs Pillow: pip install 'sordino[features]'") from None
    return Image
