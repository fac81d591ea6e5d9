"""Results on disk: one JSON file per finished run, written whole or not at all."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sordino.checkpoint import write_durably
from sordino.data.download import exclusive
from sordino.errors import InvalidInput, SordinoError

Row = dict[str, Any]
_NESTED = ("guarantee", "curve", "noise", "clip", "case")


@contextmanager
def claimed(folder: Path, label: str) -> Iterator[None]:
    """Nobody else runs this case meanwhile; the claim ends with the process."""
    with exclusive(folder / "runs" / f"{label}.lock"):
        yield


def find(folder: Path, label: str) -> Row | None:
    """The row of a finished run."""
    path = folder / "results" / f"{label}.json"
    return _read(path) if path.exists() else None


def write(folder: Path, row: Row, name: str = "results") -> Path:
    """Store a finished run durably in ``<folder>/<name>``."""
    path = folder / name / f"{row['label']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(row, indent=1).encode())
    return path


def read_all(*folders: Path) -> list[Row]:
    """All rows in ``<folder>/results`` (or in the folder itself), in the order of their labels."""
    paths = {p.name: p for folder in folders for where in (folder, folder / "results") for p in where.glob("*.json")}
    return [row for _, path in sorted(paths.items()) if "case" in (row := _read(path))]


def drop_checkpoints(place: Path) -> None:
    """A finished run keeps its ledger; its checkpoints are large."""
    for path in place.glob("checkpoint-*.pt"):
        path.unlink()


def export(rows: Iterable[Row], path: Path) -> None:
    """The rows as one table, CSV or (with pyarrow) Parquet by the suffix; what is nested becomes JSON text."""
    flat = [{key: json.dumps(v) if key in _NESTED else v for key, v in row.items()} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(flat[0]) if flat else [])
            writer.writeheader()
            writer.writerows(flat)
        return
    if path.suffix != ".parquet":
        raise InvalidInput(f"{path.name} must end in .csv or .parquet")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SordinoError(f"pyarrow cannot be imported ({error}): pip install 'sordino[bench]'") from error
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), path)


def _read(path: Path) -> Row:
    try:
        row: Row = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SordinoError(f"{path} is not a result ({error}): delete it and run again") from error
    return row
