"""Where a table comes from: a file by its ending, or an object in memory. Whatever it is, its cells become text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from sordino.errors import InvalidInput, SordinoError
from sordino.tables.delimited import Dialect, Told, name_columns, read_delimited
from sordino.tables.table import Cells, Table

DELIMITED = (".csv", ".tsv", ".tab", ".txt")
PACKED = (".gz", ".bz2", ".xz")
PARQUET = (".parquet", ".pq")
EXCEL = (".xlsx", ".xlsm")
ENDINGS = (*DELIMITED, *PARQUET, *EXCEL)
_MOST_CELLS = 100_000_000


class ExcelMissing(SordinoError, ImportError):
    """Excel files need openpyxl, which is not installed."""


def is_table(source: str) -> bool:
    """Whether the name is that of a file with columns: .csv, .csv.gz, .parquet, .xlsx, ..."""
    return _find_ending(Path(source)) in ENDINGS


def _find_ending(path: Path) -> str:
    endings = [ending.lower() for ending in path.suffixes]
    packed = len(endings) > 1 and endings[-1] in PACKED
    return endings[-2] if packed else endings[-1] if endings else ""


def read_table(path: Path, dialect: Dialect | None = None, told: Told = lambda done, size: None) -> Table:
    """The table in a file; whatever is wrong with it is one line that names no cell's content."""
    dialect = dialect or Dialect()
    ending = _find_ending(path)
    if ending not in (*PARQUET, *EXCEL):
        return read_delimited(path, dialect, told)
    if ending in PARQUET:
        return _read_parquet(path, told)
    return _read_excel(path, dialect)


def _read_parquet(path: Path, told: Told) -> Table:
    try:
        with pa.parquet.ParquetFile(path) as file:
            size = max(1, file.metadata.num_rows)
            if size * file.metadata.num_columns > _MOST_CELLS * 100:
                raise InvalidInput(f"{path} claims {size:,} records: use fewer")
            parts: list[Any] = []
            for batch in file.iter_batches(1 << 17):
                parts.append(batch)
                told(sum(map(len, parts)), size)
            return from_arrow(pa.Table.from_batches(parts, file.schema_arrow), path.stem)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no Parquet, or damaged"
        raise InvalidInput(f"cannot read data={path}: {reason}") from None


def _read_excel(path: Path, dialect: Dialect) -> Table:
    try:
        import openpyxl
    except ImportError:
        raise ExcelMissing("reading Excel files needs openpyxl: pip install 'sordino[excel]'") from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        rows = [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
    except Exception as error:  # noqa: BLE001  # whatever the parts of a damaged archive were taken for
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no workbook, or damaged"
        raise InvalidInput(f"cannot read data={path}: {reason}") from None
    rows = [row for row in rows if any(cell is not None for cell in row)]
    if not rows:
        raise InvalidInput(f"{path} has no header: the first row of its first sheet must name the columns")
    width = max(map(len, rows))
    rows = [row + [None] * (width - len(row)) for row in rows]
    if dialect.header is False:
        names = [f"column_{place}" for place in range(1, width + 1)]
    else:
        first = ["" if cell is None else cell for cell in rows.pop(0)]
        if dialect.header is None and 2 * sum(not isinstance(cell, str) for cell in first) >= width:
            raise InvalidInput(
                f"the first row of {path} reads like a record, not like the names of its {width} columns: give "
                "--no-header if it is one, or --header if it is not"
            )
        names = name_columns(path, [str(cell) for cell in first])
    cells = [Cells.of([_spell(row[place]) for row in rows]) for place in range(width)]
    return Table(path.stem, dict(zip(names, cells, strict=True)))


def to_table(data: Any, name: str = "the data", columns: Sequence[str] | None = None) -> Table:
    """A table from what a program holds: a `Table`, a file, a pandas, polars or arrow one, a mapping, or an array.

    Columns of an array are called x0, x1, ... or by `columns`. Sparse and masked arrays, and cells that are no plain
    values, are refused.
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        return read_table(Path(data))
    if isinstance(data, pa.Table | pa.RecordBatch):
        return from_arrow(pa.table(data), name)
    if isinstance(data, Mapping):
        return _from_columns(name, [str(key) for key in data], list(data.values()))
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas, whose columns may mix kinds
        return _from_columns(name, [str(key) for key in data.columns], [data.iloc[:, i] for i in range(data.shape[1])])
    if hasattr(data, "__arrow_c_stream__"):
        return from_arrow(pa.table(data), name)
    return _from_array(data, name, columns)


def _from_array(data: Any, name: str, columns: Sequence[str] | None) -> Table:
    if hasattr(data, "toarray"):
        raise InvalidInput(f"{name} is a sparse matrix: give data.toarray()")
    try:
        array = np.asarray(data)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} is a {type(data).__name__}, must be a table or a 2-D array") from None
    if array.ndim != 2:
        raise InvalidInput(
            f"{name} has the shape {array.shape}, must be 2-D with a row for each record: Reshape your data, "
            "data.reshape(-1, 1) for a single column"
        )
    if np.iscomplexobj(array):
        raise InvalidInput(f"Complex data not supported: {name} must hold real numbers or text")
    names = list(columns) if columns is not None else [f"x{place}" for place in range(array.shape[1])]
    if len(names) != array.shape[1]:
        raise InvalidInput(f"{name} has {array.shape[1]} columns, must have {len(names)}")
    return _from_columns(name, names, list(array.T))


def _from_columns(name: str, names: list[str], columns: list[Any]) -> Table:
    made = [to_cells(column) for column in columns]
    if len({len(cells) for cells in made}) > 1:
        raise InvalidInput(f"the columns of {name} must all have the same length")
    return Table(name, dict(zip(name_columns(name, names), made, strict=True)))


def to_cells(column: Any) -> Cells:
    """One column of whatever kind as text."""
    try:
        return _from_arrow_column(pa.array(column, from_pandas=True))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return Cells.of([_spell(cell) for cell in column])


def from_arrow(table: Any, name: str) -> Table:
    """An arrow table with its cells as text: what is null is empty, whole floats have no point."""
    names = name_columns(name, [str(found) for found in table.column_names])
    return Table(name, {found: _from_arrow_column(table.column(i)) for i, found in enumerate(names)})


def _from_arrow_column(column: Any) -> Cells:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    kind = whole.type
    if pa.types.is_dictionary(kind):
        texts = whole.dictionary.cast(pa.large_string()) if _is_text(kind.value_type) else whole.dictionary
        whole = pa.DictionaryArray.from_arrays(whole.indices, texts).dictionary_decode()
        kind = texts.type
    if _is_text(kind):
        whole = whole.cast(pa.large_string())
    if pa.types.is_null(kind):
        return Cells.of([""] * len(whole))
    if pa.types.is_floating(kind):
        whole = pc.cast(whole, pa.float64())
        whole = pc.if_else(pc.is_finite(whole), whole, None)
    elif pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise InvalidInput(f"a column of {kind} cannot be used: leave it out, or make it numbers or text")
    encoded = whole.dictionary_encode()
    values = _spell_values(encoded.dictionary)
    codes = pc.fill_null(encoded.indices, len(values)).to_numpy(zero_copy_only=False).astype(np.int32)
    texts = pa.concat_arrays([values.cast(pa.large_string()), pa.array([""], pa.large_string())])
    used = Cells(texts, codes).take(codes)
    return used.change(used.values)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _spell_values(values: Any) -> Any:
    if pa.types.is_floating(values.type):
        return pa.array([_spell(value) for value in values.to_pylist()], pa.large_string())
    if pa.types.is_timestamp(values.type) and values.type.tz is None:
        texts = pc.cast(values, pa.timestamp("us")).cast(pa.large_string())
        return pc.replace_substring_regex(texts, r"( 00:00:00)?(\.0+)?$", "")
    return values.cast(pa.large_string())


def _spell(cell: Any) -> str:
    """A value as a cell of a file would hold it."""
    if cell is None:
        return ""
    if isinstance(cell, bool | np.bool_):
        return "true" if cell else "false"
    if isinstance(cell, float | np.floating):
        value = float(cell)
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 2.0**53 else repr(value)
    if isinstance(cell, int | np.integer | str):
        return str(cell)
    if hasattr(cell, "isoformat"):
        return str(cell.isoformat()).removesuffix("T00:00:00")
    if isinstance(cell, bytes | list | tuple | set | dict | np.ndarray):
        raise InvalidInput(f"a cell of type {type(cell).__name__} cannot be used: a cell must be a number or text")
    text = str(cell)
    return "" if text in ("<NA>", "NaT", "nan") else text
