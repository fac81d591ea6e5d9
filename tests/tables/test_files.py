"""Parquet, Excel and what programs hold in memory: the same cells, whatever they come from."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from sordino.errors import InvalidInput
from sordino.tables.delimited import Dialect
from sordino.tables.files import is_table, read_table, to_table
from sordino.tables.table import Table

DAYS = [datetime.datetime(2020, 1, 2), None, datetime.datetime(2021, 3, 4, 5, 6)]
COLUMNS = {"a": [1.0, None, 2.5], "b": ["x", None, "y"], "c": [True, False, None], "d": DAYS, "e": [1, 2, 3]}
CELLS = {
    "a": ["1", "", "2.5"],
    "b": ["x", "", "y"],
    "c": ["true", "false", ""],
    "d": ["2020-01-02", "", "2021-03-04 05:06:00"],
    "e": ["1", "2", "3"],
}


def cells(table: Table) -> dict[str, list[str]]:
    return {name: list(column) for name, column in table.columns.items()}


def test_arrow_and_parquet(tmp_path: Path) -> None:
    table = pa.table(COLUMNS)
    assert cells(to_table(table)) == CELLS
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    heard: list[tuple[int, int]] = []
    assert cells(read_table(tmp_path / "t.parquet", told=lambda done, size: heard.append((done, size)))) == CELLS
    assert heard == [(3, 3)]
    (tmp_path / "wrong.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InvalidInput, match="no Parquet, or damaged"):
        read_table(tmp_path / "wrong.parquet")
    with pytest.raises(InvalidInput, match="cannot be used"):
        to_table(pa.table({"a": [[1], [2]]}))


def test_data_frames() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    frame = pandas.DataFrame(COLUMNS)
    assert cells(to_table(frame)) == CELLS
    mixed = pandas.DataFrame({"g": [1, "a", None], "h": pandas.Categorical(["u", "v", "u"])})
    assert cells(to_table(mixed)) == {"g": ["1", "a", ""], "h": ["u", "v", "u"]}
    other = polars.DataFrame(COLUMNS).with_columns(polars.col("b").cast(polars.Categorical))
    assert cells(to_table(other)) == CELLS


def test_arrays_and_mappings() -> None:
    assert cells(to_table(np.array([[1.0, np.nan], [np.inf, 4.25]]))) == {"x0": ["1", ""], "x1": ["", "4.25"]}
    assert cells(to_table({"a": [1, 2], "b": ["u", "v"]})) == {"a": ["1", "2"], "b": ["u", "v"]}
    for wrong, words in (
        (np.zeros(3), "2-D"),
        (np.zeros((2, 2), complex), "Complex"),
        ({"a": [1], "b": [1, 2]}, "length"),
    ):
        with pytest.raises(InvalidInput, match=words):
            to_table(wrong)


def test_excel(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="Excel files need openpyxl")
    book = openpyxl.Workbook()
    for row in (list(COLUMNS), *zip(*COLUMNS.values(), strict=True)):
        book.active.append(list(row))
    book.save(tmp_path / "t.xlsx")
    assert is_table("t.xlsx")
    assert cells(read_table(tmp_path / "t.xlsx")) == {**CELLS, "d": ["2020-01-02", "", "2021-03-04T05:06:00"]}
    assert list(read_table(tmp_path / "t.xlsx", Dialect(header=False)).columns) == [f"column_{n}" for n in range(1, 6)]
    bare = openpyxl.Workbook()
    for number in range(4):
        bare.active.append([number, 2.5, "secret"])
    bare.save(tmp_path / "bare.xlsx")
    with pytest.raises(InvalidInput, match="--no-header") as refused:
        read_table(tmp_path / "bare.xlsx")
    assert "secret" not in str(refused.value)
    (tmp_path / "wrong.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(InvalidInput, match="no workbook, or damaged"):
        read_table(tmp_path / "wrong.xlsx")
