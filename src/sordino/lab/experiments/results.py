"""Results on disk, written completely or not at all.

A folder of runs has one JSON file per finished run, so that parallel processes need no lock. Results that are kept for
good, such as those in the documentation, are in one JSON-lines file per dataset, one line per run.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sordino.books import write_durably
from sordino.errors import InvalidInput, SordinoError
from sordino.lab.data.download import hold_lock

Row = dict[str, Any]
_NESTED = ("guarantee", "curve", "noise", "clip", "case")


@contextmanager
def claim(folder: Path, label: str) -> Iterator[None]:
    """While this is held, nobody else runs the case; it ends with the process."""
    with hold_lock(folder / "runs" / f"{label}.lock"):
        yield


def find(folder: Path, label: str) -> Row | None:
    """Return the row of a finished run."""
    path = folder / "results" / f"{label}.json"
    return _read(path) if path.exists() else None


def find_shipped(label: str) -> Row | None:
    """Find the row of a run that was made for the documentation and came with the installation or the repository."""
    return next((row for row in read_shipped() if row["label"] == label), None)


@cache
def read_shipped() -> tuple[Row, ...]:
    """Read every run that was made for the documentation; empty if neither the package nor a clone holds them."""
    here = Path(__file__).resolve()
    places = (here.parents[1] / "shipped", here.parents[4] / "benchmarks" / "results" / "experiments")
    folder = next((place for place in places if place.is_dir()), None)
    return () if folder is None else tuple(row for path in sorted(folder.glob("*.jsonl")) for row in read_lines(path))


def write(folder: Path, row: Row) -> Path:
    """Store a finished run durably in ``<folder>/results``."""
    path = folder / "results" / f"{row['label']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(row, indent=1).encode())
    return path


def read_all(*folders: Path) -> list[Row]:
    """All runs in ``<folder>/results`` (or in the folder itself), in the order of their labels."""
    places = [place for folder in folders for place in (folder, folder / "results")]
    rows = [_read(path) for place in places for path in place.glob("*.json")]
    rows += [row for place in places for path in place.glob("*.jsonl") for row in read_lines(path)]
    found = {row["label"]: row for row in rows if "case" in row}
    return [row for _, row in sorted(found.items())]


def read_lines(path: Path) -> list[Row]:
    """Return the rows that `keep_lines` wrote, in the order of their labels; none where there is no file."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise SordinoError(f"{path} is not a file of results ({error}): restore it from the repository") from error


def keep_lines(path: Path, *rows: Row) -> None:
    """Put `rows` among the lines of `path`, each in place of the line with its label; for one process at a time."""
    lines = {row["label"]: row for row in (*read_lines(path), *rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, "".join(json.dumps(row) + "\n" for _, row in sorted(lines.items())).encode())


def drop_checkpoints(place: Path) -> None:
    """Drop the checkpoints of a finished run, which are large; it keeps its ledger."""
    for path in place.glob("checkpoint-*.pt"):
        path.unlink()


def export(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as one table, CSV or (with pyarrow) Parquet by the suffix; nested values become JSON text."""
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
