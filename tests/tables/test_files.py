"""Parquet, Excel and what programs hold in memory: the same cells, whatever they come from."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sordino.errors import InvalidInput
from sordino.tables.delimited import Dialect
from sordino.tables.files import is_table, read_table, to_cells, to_table
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
    assert cells(read_table(tmp_path / "t.xlsx")) == CELLS
    assert list(read_table(tmp_path / "t.xlsx", Dialect(header=False)).columns) == [f"column_{n}" for n in range(1, 6)]
    bare = openpyxl.Workbook()
    for number in range(4):
        bare.active.append([number, 2.5, "secret"])
    bare.save(tmp_path / "bare.xlsx")
    with pytest.raises(InvalidInput, match="--no-header") as refused:
        read_table(tmp_path / "bare.xlsx")
    assert "secret" not in str(refused.value)
    (tmp_path / "wrong.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(InvalidInput, match="damaged, or not a workbook"):
        read_table(tmp_path / "wrong.xlsx")


def test_a_long_record_of_a_workbook_adds_no_column(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="Excel files need openpyxl")
    for last, refused in ((["a", ""], False), (["a", "secret"], True)):
        book = openpyxl.Workbook()
        for row in (["x", "t"], [1, "b"], [2], [3, *last]):
            book.active.append(row)
        book.save(tmp_path / "t.xlsx")
        if not refused:
            assert cells(read_table(tmp_path / "t.xlsx")) == {"x": ["1", "2", "3"], "t": ["b", "", "a"]}
            continue
        for header, number in ((None, 3), (False, 4)):
            with pytest.raises(InvalidInput, match=f"record {number} does not have 2 cells") as caught:
                read_table(tmp_path / "t.xlsx", Dialect(header=header))
            assert "secret" not in str(caught.value)


HOUR = datetime.timedelta(hours=1)
NOON = datetime.datetime(2024, 3, 1, 12, 30)
ZONES = st.sampled_from([None, datetime.UTC, datetime.timezone(2 * HOUR)])
ONE = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    st.decimals(allow_nan=False, allow_infinity=False) | st.dates() | st.times() | st.timedeltas(),
    st.datetimes(timezones=ZONES),
    st.builds(np.datetime64, st.integers(-(2**40), 2**60), st.sampled_from(["D", "h", "s", "us", "ns"])).filter(
        lambda cell: abs(int(cell.astype(np.int64))) < 2**40 or cell.dtype != np.dtype("datetime64[D]")
    ),
    st.builds(np.timedelta64, st.integers(-(2**40), 2**40), st.sampled_from(["D", "m", "s", "us", "ns"])),
)


def make_series(column: list[Any]) -> Any:
    return pytest.importorskip("pandas").Series(column, dtype=object)


def make_objects(column: list[Any]) -> Any:
    made = np.empty(len(column), object)
    made[:] = column
    return made


@settings(max_examples=200, deadline=None)
@example([HOUR], "x")
@example([Decimal("1.10")], Decimal("3.125"))
@example([NOON], "unknown")
@example([datetime.time(2, 3)], "x")
@example([True], 2)
@example([NOON.replace(tzinfo=datetime.UTC)], NOON.replace(tzinfo=datetime.timezone(HOUR)))
@example([2**53 + 1], 0.5)
@given(st.lists(ONE, max_size=4), ONE)
def test_a_cell_is_spelled_alike_whatever_the_others_are(column: list[Any], other: Any) -> None:
    alone = [to_cells([cell])[0] for cell in column]
    for make in (list, make_series, make_objects):
        assert list(to_cells(make([*column, other])))[: len(column)] == list(to_cells(make(column))) == alone
    rows = [[cell, cell] for cell in [*column, other]]
    assert list(to_table(rows).columns["x1"])[: len(column)] == alone


def test_frames_arrow_and_objects_spell_alike() -> None:
    pandas = pytest.importorskip("pandas")
    moments = pandas.to_datetime(["2024-03-01 12:30", "2024-03-02", None], format="ISO8601")
    fine = pandas.to_datetime(
        ["2024-03-01 12:30", "2024-03-02", None, "2024-03-02 00:00:00.000000001"], format="ISO8601"
    )
    told = ["2024-03-01 12:30:00", "2024-03-02", "", "2024-03-02 00:00:00.000000001"]
    for made, texts in ((moments, told[:3]), (fine, told)):
        for column in (pandas.Series(made), pandas.Series(made, dtype=object), made.to_numpy(), pa.array(made)):
            assert list(to_cells(column)) == texts
        assert list(to_cells(pandas.Series(made).astype("category"))) == texts
    zoned = pandas.Series(moments.tz_localize("Europe/Zurich"))
    for column in (zoned, zoned.astype(object), pa.array(zoned)):
        assert list(to_cells(column)) == ["2024-03-01 12:30:00+01:00", "2024-03-02 00:00:00+01:00", ""]
    stays = [datetime.timedelta(seconds=90), datetime.timedelta(milliseconds=-500), None]
    for column in (stays, pandas.Series(stays), pandas.Series(stays, dtype=object), pa.array(stays)):
        assert list(to_cells(column)) == ["90", "-0.5", ""]
    prices = [Decimal("1.10"), Decimal(100), Decimal("0.00")]
    for column in (prices, pa.array(prices), pa.array(prices, pa.decimal128(20, 9))):
        assert list(to_cells(column)) == ["1.1", "100", "0"]
    times = [datetime.time(2, 3), datetime.time(0, 0, 0, 500_000)]
    for column in (times, pa.array(times)):
        assert list(to_cells(column)) == ["02:03:00", "00:00:00.5"]
    assert list(to_cells(pandas.Series([1, "a", 2.5, None], dtype="category"))) == ["1", "a", "2.5", ""]
