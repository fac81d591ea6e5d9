"""Reads a table from a file, by its ending, or from an object in memory. In every case its cells become text."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
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
_COARSE = {"W": 604_800, "D": 86_400, "h": 3600, "m": 60}
_FINE = ("s", "ms", "us", "ns", "ps", "fs", "as")
_SECONDS = {
    **{unit: Decimal(of) for unit, of in _COARSE.items()},
    **{u: Decimal(1000) ** -i for i, u in enumerate(_FINE)},
}
"""Time units of numpy and arrow, in seconds."""
_FRACTION = re.compile(r"\.(\d*?)0*(?=[+-]|$)")
_LONGEST_DECIMAL = 400


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
    """Read the table in a file; an error is one line that names no cell's content."""
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
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged, or not a workbook"
        raise InvalidInput(f"cannot read data={path}: {reason}") from None
    rows = [row for row in rows if any(cell is not None for cell in row)]
    if not rows:
        raise InvalidInput(f"{path} has no header: the first row of its first sheet must name the columns")
    width = _find_width(rows[0])
    if wide := [place for place, row in enumerate(rows, dialect.header is False) if _find_width(row) > width]:
        raise InvalidInput(
            f"{path} record {wide[0]} does not have {width} cells, as the first row does: "
            "every record needs a cell for each column"
        )
    rows = [(row + [None] * (width - len(row)))[:width] for row in rows]
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


def _find_width(row: Sequence[Any]) -> int:
    """Count the cells of a row, without empty ones at its end."""
    return max((place for place, cell in enumerate(row, 1) if cell not in (None, "")), default=0)


def to_table(data: Any, name: str = "the data", columns: Sequence[str] | None = None) -> Table:
    """Make a table of a program's object: a `Table`, a file, a pandas, polars or arrow table, a mapping, or an array.

    Columns of an array are called x0, x1, ... or by `columns`. Sparse and masked arrays, and cells that are not plain
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
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas: its columns may mix kinds
        return _from_columns(name, [str(key) for key in data.columns], [data.iloc[:, i] for i in range(data.shape[1])])
    if hasattr(data, "__arrow_c_stream__"):
        return from_arrow(pa.table(data), name)
    return _from_array(data, name, columns)


def _from_array(data: Any, name: str, columns: Sequence[str] | None) -> Table:
    if hasattr(data, "toarray"):
        raise InvalidInput(f"{name} is a sparse matrix: give data.toarray()")
    try:
        array = to_array(data)
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


def to_array(data: Any) -> Any:
    """Return an array as it is. Lists become arrays of objects, because one type for all cells would change some."""
    if isinstance(data, list | tuple):
        return np.asarray([list(row) if isinstance(row, np.ndarray) and row.ndim else row for row in data], object)
    return np.asarray(data) if hasattr(data, "dtype") or hasattr(data, "__array__") else np.asarray(data, object)


def _from_columns(name: str, names: list[str], columns: list[Any]) -> Table:
    made = [to_cells(column) for column in columns]
    if len({len(cells) for cells in made}) > 1:
        raise InvalidInput(f"the columns of {name} must all have the same length")
    return Table(name, dict(zip(name_columns(name, names), made, strict=True)))


def to_cells(column: Any) -> Cells:
    """Write one column of any type as text, cell by cell: no type is inferred from other cells."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return _from_arrow_column(column)
    dtype = getattr(column, "dtype", None)
    if getattr(dtype, "name", None) == "category":
        known = getattr(column, "cat", column)
        codes = np.asarray(known.codes, np.int32)
        texts = pa.array([*to_cells(known.categories), ""], pa.large_string())
        return _use(texts, np.where(codes < 0, len(texts) - 1, codes))
    try:
        if _is_plain(dtype):
            return _from_arrow_column(pa.array(column, from_pandas=True))
        if hasattr(column, "__arrow_c_stream__") and not hasattr(column, "iloc"):
            return _from_arrow_column(pa.chunked_array(column))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass  # arrow lacks the type; cell by cell gives the same result
    return Cells.of([_spell(cell) for cell in column])


def _is_plain(dtype: Any) -> bool:
    """Whether every cell of this type becomes the same value in arrow, whatever the other cells are."""
    if isinstance(dtype, np.dtype) and dtype.kind in "mM":
        return np.datetime_data(dtype) in [(unit, 1) for unit in ("s", "ms", "us", "ns")]
    return getattr(dtype, "kind", None) in ("b", "i", "u", "f") or getattr(dtype, "type", None) in (str, np.str_)


def from_arrow(table: Any, name: str) -> Table:
    """Write the cells of an arrow table as text: null is empty, and whole floats have no point."""
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
    return _use(texts, codes)


def _use(texts: Any, codes: Any) -> Cells:
    used = Cells(texts, codes).take(codes)
    return used.change(used.values)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _spell_values(values: Any) -> Any:
    kind = values.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        texts = [_spell(value) for value in values.to_pylist()]
    elif pa.types.is_duration(kind):
        texts = [_spell_duration(value, kind.unit) for value in values.cast(pa.int64()).to_pylist()]
    elif pa.types.is_timestamp(kind):
        texts = _spell_moments(values)
    elif pa.types.is_time(kind):
        texts = [_tidy(text) for text in values.cast(pa.large_string()).to_pylist()]
    else:
        return values.cast(pa.large_string())
    return pa.array(texts, pa.large_string())


def _spell_moments(values: Any) -> list[str]:
    moments = values.to_numpy(zero_copy_only=False)
    if values.type.tz is None:
        return [_tidy(text.replace("T", " ")) for text in np.datetime_as_string(moments).tolist()]
    local = pc.local_timestamp(values).to_numpy(zero_copy_only=False)
    zones = ((local - moments) // np.timedelta64(1, "s")).astype(np.int64).tolist()
    texts = np.datetime_as_string(local).tolist()
    return [_tidy(text.replace("T", " ") + _spell_zone(zone)) for text, zone in zip(texts, zones, strict=True)]


def _spell_zone(seconds: int) -> str:
    minutes, rest = divmod(abs(seconds), 60)
    sign = "-" if seconds < 0 else "+"
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}" + (f":{rest:02}" if rest else "")


def _spell(cell: Any) -> str:
    """Spell a value as a file's cell would: in one way, whatever column it is in."""
    if cell is None or isinstance(cell, str):
        return str(cell or "")
    if isinstance(cell, bool | np.bool_):
        return "true" if cell else "false"
    if isinstance(cell, float | np.floating):
        value = float(cell)
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 2.0**53 else repr(value)
    if isinstance(cell, np.datetime64 | np.timedelta64):
        return _spell_of_numpy(cell)
    if isinstance(cell, int | np.integer):
        return str(cell)
    if isinstance(cell, Decimal):
        return _spell_decimal(cell)
    if isinstance(cell, bytes | bytearray | list | tuple | set | dict | np.ndarray | complex | np.complexfloating):
        raise InvalidInput(f"a cell of type {type(cell).__name__} cannot be used: a cell must be a number or text")
    return _spell_object(cell)


def _spell_object(cell: Any) -> str:
    text = str(cell)
    if text in ("<NA>", "NaT", "nan"):
        return ""
    if isinstance(cell, datetime.timedelta):
        whole = (cell.days * 86_400 + cell.seconds) * 10**9 + cell.microseconds * 1000
        return _spell_duration(whole + getattr(cell, "nanoseconds", 0), "ns")
    return _tidy(text) if hasattr(cell, "isoformat") else text


def _spell_of_numpy(cell: Any) -> str:
    if np.isnat(cell):
        return ""
    unit, count = np.datetime_data(cell.dtype)
    if isinstance(cell, np.timedelta64):
        return _spell_duration(int(cell.astype(np.int64)) * count, unit) if unit in _SECONDS else str(cell)
    fine = cell if unit in _FINE else cell.astype("datetime64[s]")
    return _tidy(str(np.datetime_as_string(fine)).replace("T", " "))


def _spell_duration(number: int, unit: str) -> str:
    """Spell a duration in seconds."""
    return _spell_decimal(number * _SECONDS[unit])


def _spell_decimal(value: Decimal) -> str:
    if not value.is_finite():
        return ""
    if not value or abs(value.adjusted()) > _LONGEST_DECIMAL:
        return str(value) if value else "0"
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tidy(text: str) -> str:
    """Tidy a date and time: a space between them, no zeros at the end, and no midnight."""
    return _FRACTION.sub(lambda found: f".{found[1]}" if found[1] else "", text).removesuffix(" 00:00:00")
