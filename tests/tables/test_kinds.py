"""What a column is by its name and by released numbers; dates in parts; whose records are used."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from sordino.errors import InvalidInput
from sordino.tables.dates import WEEKDAYS, derive, expand, parse_date, take_part
from sordino.tables.reading import require_classes
from sordino.tables.schema import Category, Date, Number, Schema, Skip, describe_header, settle_codes
from sordino.tables.table import Cells, Table
from sordino.tables.training import Wishes, keep_few, name_owners, prepare_table

IDENTIFIERS = (
    "patient_nbr",
    "patient_id",
    "PatientID",
    "customerID",
    "encounter_id",
    "ID",
    "email",
    "first name",
    "account_no",
    "lastName",
    "rownames",
)
OPEN = (
    "admission_type_id",
    "discharge_disposition_id",
    "zip_code",
    "number_of_visits",
    "num_medications",
    "idle",
    "PhoneService",
    "name_length",
    "clinic_name",
    "arrival_date_num",
    "productName",
)
DATES = ("admission date", "order_date", "created_at", "dob", "BirthDate")


@pytest.mark.parametrize("name", IDENTIFIERS)
def test_names_of_somebody_are_left_out(name: str) -> None:
    assert isinstance(describe_header(Schema(), [name, "x", "y"], "y", None).columns[name], Skip)


@pytest.mark.parametrize("name", OPEN)
def test_other_names_are_open(name: str) -> None:
    assert describe_header(Schema(), [name, "x", "y"], "y", None).columns[name] is None


@pytest.mark.parametrize("name", DATES)
def test_dates_are_told_by_their_names(name: str) -> None:
    assert describe_header(Schema(), [name, "x", "y"], "y", None).columns[name] == Date()


def test_codes_and_identifiers_are_told_apart_by_a_released_count() -> None:
    number = Number(0.0, 9.0)
    assert settle_codes("admission_type_id", number, 8.0, 10_000) == Category()
    assert isinstance(settle_codes("batch_id", number, 9_000.0, 10_000), Skip)
    assert settle_codes("zip_code", number, 800.0, 10_000) == number, "many, and their size may mean something"
    assert settle_codes("age", number, 9_000.0, 10_000) == number, "no name of a code"


@pytest.mark.parametrize(
    ("cell", "date"),
    [
        ("2024-03-01", (2024, 3, 1)),
        ("20240301", (2024, 3, 1)),
        ("2024/03/01 12:30", (2024, 3, 1)),
        ("1.3.2024", (2024, 3, 1)),
        ("3/1/2024", (2024, 3, 1)),
        ("25/12/23", (2023, 12, 25)),
        ("31-12-1999T23:59", (1999, 12, 31)),
        ("2024-13-01", None),
        ("30.2.2024", None),
        ("soon", None),
        ("", None),
    ],
)
def test_dates_as_people_write_them(cell: str, date: tuple[int, int, int] | None) -> None:
    assert parse_date(cell) == (None if date is None else datetime.date(*date))


def test_a_date_becomes_three_columns_and_new_records_alike() -> None:
    table = Table("t", {"order_date": ["2024-03-01", "x", "1.7.2023"], "y": ["a", "b", "a"]})
    parts, schema = expand(table, Schema({"order_date": Date()}, ("a", "b")))
    assert list(schema.columns) == ["order_date: year", "order_date: month", "order_date: weekday"]
    assert list(parts.columns["order_date: weekday"]) == ["Fri", "", "Sat"]
    assert list(parts.columns["order_date: month"]) == ["3", "", "7"]
    assert "order_date" not in parts.columns
    assert schema.columns["order_date: weekday"] == Category(WEEKDAYS)
    new = derive(table.pick(["order_date"]), schema.columns)
    assert all(list(new.columns[name]) == list(parts.columns[name]) for name in schema.columns)
    years = [float(cell) for cell in take_part(["2024-01-01", "2024-12-31"], "year")]
    assert years[0] == 2024
    assert 2024.9 < years[1] < 2025


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["yes"] * 50, "holds 1 class"),
        ([""] * 50, "holds 0 classes"),
        ([str(n % 104) for n in range(900)], "--task regression"),
        ([f"{n}.5" for n in range(50)], "--task regression"),
        ([f"word{n}" for n in range(900)], "too many different values to be classes"),
    ],
)
def test_targets_that_make_no_classes_are_refused_for_free(cells: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        require_classes(Cells.of(cells), "y")
    assert not any(cell in str(refused.value) for cell in cells if len(cell) > 3)
    require_classes(Cells.of(["1", "2", "3", ""] * 9), "y")


def test_of_every_owner_a_few_records_are_used_whoever_else_is_there() -> None:
    owners = ["a", "b", "a", "a", "b", "c"]
    assert keep_few(Cells.of(owners), 2).tolist() == [True, True, True, False, True, True]
    without = [owner for owner in owners if owner != "b"]
    kept = keep_few(Cells.of(owners), 2)[[owner != "b" for owner in owners]]
    assert keep_few(Cells.of(without), 2).tolist() == kept.tolist()


@pytest.mark.parametrize("nobody", ["", "NA", "-", "none"])
def test_records_of_nobody_are_refused_for_they_have_no_bound(nobody: str) -> None:
    with pytest.raises(InvalidInput, match="records without a who"):
        name_owners(Table("t", {"who": ["a", "b", nobody]}), "who")


def test_an_owner_is_the_same_however_it_is_spelled() -> None:
    owners = name_owners(Table("t", {"who": ["17", " 17", "17 ", "17.0", "1.7e1", "18"]}), "who")
    assert keep_few(owners, 1).tolist() == [True, False, False, False, False, True]


def test_whole_units_are_held_out_and_named_in_the_guarantee() -> None:
    source = np.random.default_rng(0)
    owners = [f"p{n}" for n in source.integers(0, 400, 1500)]
    x = source.normal(size=1500)
    cells = {"patient_id": owners, "x": [f"{v:.3f}" for v in x], "y": ["no" if v < 0 else "yes" for v in x]}
    ready = prepare_table(Table("t", cells), Wishes("y", 2.0, unit="patient_id", per_unit=2))
    trained, held = (set(part.columns["patient_id"]) for part in (ready.sheet.train, ready.sheet.held_out))
    assert trained & held == set()
    assert held
    assert max(np.unique(list(ready.sheet.train.columns["patient_id"]), return_counts=True)[1]) == 2
    assert isinstance(ready.schema.columns["patient_id"], Skip)
    assert "patient_id" in ready.unit
    for wrong, words in (
        ({"unit": "y"}, "is the target"),
        ({"unit": "patient"}, "did you mean 'patient_id'"),
        ({"per_unit": 3}, "needs --unit"),
    ):
        with pytest.raises(InvalidInput, match=words):
            prepare_table(Table("t", cells), Wishes("y", 2.0, **wrong))  # type: ignore[arg-type]
