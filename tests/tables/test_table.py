"""Tables: what can be wrong with a file, and that a record is encoded by itself."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InvalidInput
from sordino.tables import release
from sordino.tables.encoding import (
    LENGTH,
    NO_CLASS,
    choose_buckets,
    encode,
    encode_column,
    encode_labels,
    encode_texts,
    spell_label,
)
from sordino.tables.files import read_table
from sordino.tables.reading import Sheet
from sordino.tables.schema import Category, Number, Schema, Skip, Text, describe_header, parse_schema
from sordino.tables.table import Table, parse_numbers


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# -- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("a,b\n1,x\n", {"a": ["1"], "b": ["x"]}),
        ("\ufeffa,b\n1,x\n", {"a": ["1"], "b": ["x"]}),
        ("a;b\n1,5;x\n", {"a": ["1.5"], "b": ["x"]}),
        ("a,a,a_2\n1,2,3\n", {"a": ["1"], "a_3": ["2"], "a_2": ["3"]}),
        ("a\tb\r\n1\tx\r\n", {"a": ["1"], "b": ["x"]}),
        ('a,b\n"1\n2","x,""y"""\n', {"a": ["1\n2"], "b": ['x,"y"']}),
        ("\n\na,b\n\n1,x\n\n", {"a": ["1"], "b": ["x"]}),
        (" a , b \n1,x", {"a": ["1"], "b": ["x"]}),
        (",b\n0,x\n", {"column 1": ["0"], "b": ["x"]}),
        ("a,b\n", {"a": [], "b": []}),
        ("a,b\n1,\x00\n", {"a": ["1"], "b": ["\x00"]}),
    ],
)
def test_what_can_be_read(tmp_path, content, columns):
    assert read_table(written(tmp_path, content)).columns == columns


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no header"),
        ("a,b\n1\n", "record 1 does not have 2 cells"),
        ("a,b\n1,2\n1,2,3\n", "record 2 does not have 2 cells"),
        ('a,b\n"1\n2",3\n4\n', "record 2 does not have 2 cells"),
        ("a\x07,b\n1,2\n", "must be printable"),
        ('a,b\n"1,2\n', "a quote is not closed"),
        ('a,b\n1,"2\nrich,4\n', "within a quote that is not closed"),
        ('a,b,c\n1,2,"3\n4,5,rich\n6,7,8"\n', "record 1 holds other records within quotes"),
        ('a,b\n1,2\n4,"no\n5,rich\n6,rich"\n7,8\n', "record 2 holds other records within quotes"),
        ('a\n1\n"2\nrich\n4"\n5\n', "record 2 holds other records within quotes"),
    ],
)
def test_what_is_refused_in_one_line_without_a_cell_of_it(tmp_path, content, words):
    with pytest.raises(InvalidInput) as refused:
        read_table(written(tmp_path, content))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "rich" not in str(refused.value), "no cell is quoted"


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read"):
        read_table(tmp_path)


@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_large_table_is_read_and_encoded_in_seconds(tmp_path, rows):
    path = tmp_path / "large.csv"
    values = np.random.default_rng(0).normal(size=(rows, 4)).round(4)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "town", "y"])
        writer.writerows([*row, f"town{i % 50}", i % 2] for i, row in enumerate(values[:, :3].tolist()))
    began = time.process_time()
    table = read_table(path)
    schema = Schema({"a": Number(-3, 3), "b": Number(-3, 3), "c": Skip(), "town": Category(buckets=64)}, ("0", "1"))
    inputs, classes = encode(table, schema, "y")
    assert inputs.shape == (rows, 66)
    assert classes.sum() == rows // 2
    assert time.process_time() - began < 2 + 30 * rows / 1_000_000


# -- cells ------------------------------------------------------------------------------------------------------


def test_numbers_are_finite_or_missing():
    cells = ["1", " -2.5 ", "1e3", "", "NA", "nan", "inf", "-Infinity", "1e999", "seven", "0x10", "1,5"]
    expected = [1, -2.5, 1000] + [np.nan] * 9
    np.testing.assert_array_equal(parse_numbers(cells), expected)
    np.testing.assert_array_equal(parse_numbers([*cells[:3], "inf"]), [1, -2.5, 1000, np.nan])


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (" yes ", "yes"),
        ("1", "1"),
        ("1.0", "1"),
        ("-3", "-3"),
        ("1.5", "1.5"),
        ("", None),
        ("N/A", None),
        ("inf", "inf"),
    ],
)
def test_a_class_has_one_spelling(cell, name):
    assert spell_label(cell) == name


def test_labels_outside_the_classes_have_no_class():
    assert encode_labels(["0", "1.0", "2", ""], ("0", "1")).tolist() == [0, 1, NO_CLASS, NO_CLASS]
    loss = torch.nn.functional.cross_entropy(torch.randn(1, 2), torch.tensor([NO_CLASS]), reduction="none")
    assert loss.item() == 0, "and so no gradient either"


def test_numbers_are_clipped_to_their_range():
    rows = encode_column(Number(0.0, 10.0, missing=True), ["0", "10", "5", "1e9", "-1e9", "", "inf"], "a")
    assert rows.tolist() == [[-1, 0], [1, 0], [0, 0], [1, 0], [-1, 0], [0, 1], [0, 1]]
    scaled = encode_column(Number(0.0, 100.0, center=50.0, spread=10.0), ["60", "100", "0", "x"], "a")
    assert scaled[:, 0].tolist() == [1, 3, -3, 0]


def test_categories_are_one_bucket_or_none():
    rows = encode_column(Category(buckets=8), ["Bern", " Bern ", "Rome", "", "?"], "town")
    assert (rows.sum(1) == [1, 1, 1, 0, 0]).all()
    assert (rows[0] == rows[1]).all()
    other = encode_column(Category(buckets=1 << 20), ["Bern"], "birthplace")
    assert (encode_column(Category(buckets=1 << 20), ["Bern"], "town") != other).any(), "salted by the column"
    listed = encode_column(Category(values=("Bern", "Rome")), ["Rome", "Oslo"], "town")
    assert listed.tolist() == [[0, 1], [0, 0]]


def test_texts_are_bags_of_words():
    rows = encode_texts(["good good film", "film GOOD, good!", "bad film", ""], 512)
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [LENGTH] * 3 + [0], rtol=1e-6)
    assert [choose_buckets(n) for n in (10, 5_000, 50_000, 10_000_000)] == [64, 256, 1024, 64]


CELLS = st.one_of(st.text(max_size=12), st.floats().map(repr), st.sampled_from(["", "NA", "inf", "1e308", "a b c d e"]))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS), min_size=2, max_size=8), st.data())
def test_a_record_is_encoded_by_itself(rows, data):
    """Given the schema, no other record has a say: not its values, not its place, not whether it is there."""
    schema = Schema({"a": Number(-5.0, 7.0, 1.0, 0.5, True), "b": Category(buckets=8), "c": Text(16)}, ("yes", "no"))
    names = ["a", "b", "c", "y"]
    table = Table("t", dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    inputs, classes = encode(table, schema, "y")
    place = data.draw(st.integers(0, len(rows) - 1))
    alone = Table("t", {name: [cells[place]] for name, cells in table.columns.items()})
    single, number = encode(alone, schema, "y")
    assert torch.equal(single[0], inputs[place])
    assert number[0] == classes[place]
    assert torch.isfinite(inputs).all()
    assert inputs.abs().max() <= LENGTH + 1e-5


# -- schema -----------------------------------------------------------------------------------------------------


def test_a_schema_can_be_written_and_read():
    schema = Schema(
        {"a": Number(0.0, 1.0, 0.5, 0.25, True), "b": Category(("x", "y")), "c": Text(64), "d": Skip("why")},
        ("no", "yes"),
    )
    assert parse_schema(schema.to_table()) == schema
    assert schema.width == 2 + 2 + 64
    assert schema.complete
    assert not Schema({"a": Number()}, ("0", "1")).complete


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"clases": []}, "has no key 'clases'"),
        ({"classes": 3}, "must be a list"),
        ({"classes": ["one"]}, "two or more"),
        ({"columns": 3}, "must be tables"),
        ({"columns": {"a": 3}}, "must be tables"),
        ({"columns": {"a": {}}}, "kind=None must be one of"),
        ({"columns": {"a": {"kind": "dates"}}}, "kind='dates' must be one of"),
        ({"columns": {"a": {"kind": "number", "lo": 3}}}, "has no key 'lo'"),
        ({"columns": {"a": {"kind": "number", "low": 3}}}, "belong together"),
        ({"columns": {"a": {"kind": "number", "low": 3, "high": 3}}}, "increasing"),
        ({"columns": {"a": {"kind": "number", "low": "3", "high": 4}}}, "must be of type float"),
        ({"columns": {"a": {"kind": "number", "low": 0, "high": float("inf")}}}, "finite"),
        ({"columns": {"a": {"kind": "number", "low": 0, "high": 1, "spread": 0.0}}}, "spread=0.0 must be > 0"),
        ({"columns": {"a": {"kind": "category", "buckets": 1}}}, "buckets=1 must be >= 2"),
        ({"columns": {"a": {"kind": "text", "buckets": True}}}, "must be of type int"),
    ],
)
def test_a_wrong_schema_is_refused(table, words):
    with pytest.raises(InvalidInput, match=r"^[^\n]*$") as refused:
        parse_schema(table)
    assert words in str(refused.value)


def test_names_that_identify_are_left_out():
    header = ["patient_id", "PatientID", "email", "first name", "age", "idle", "width", "y"]
    schema = describe_header(Schema({"email": Text()}), header, "y", (0.0, 9.0))
    left = {name for name, column in schema.columns.items() if isinstance(column, Skip)}
    assert left == {"patient_id", "PatientID", "first name"}
    assert schema.columns["email"] == Text(), "what the user says counts"
    assert schema.columns["age"] == schema.columns["width"] == Number(0.0, 9.0)
    with pytest.raises(InvalidInput, match="the data has not"):
        describe_header(Schema({"ages": Skip()}), header, "y", None)


def test_records_against_what_is_public_are_refused_by_number_not_by_content():
    """By their number in the file, whichever part of it they are in."""
    table = Table("t", {"a": ["1", "NA", "secret"], "y": ["0", "1", "0"]})
    with pytest.raises(InvalidInput, match="record 3"):
        Sheet.split(table, "y", np.array([True, False, False])).check(Schema({"a": Number(0, 1)}, ("0", "1")))
    sheet = Sheet.split(table, "y", np.zeros(3, bool))
    with pytest.raises(InvalidInput, match="record 3") as refused:
        sheet.check(Schema({"a": Number(0, 1)}, ("0", "1")))
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidInput, match="target 'y' of record 2 must be one of the classes 0, 2"):
        sheet.check(Schema({"a": Text()}, ("0", "2")))
    sheet.check(Schema({"a": Text()}, ("0", "1", "2")))


# -- kinds ------------------------------------------------------------------------------------------------------


def test_every_cell_is_in_one_bin():
    cells = ["", "NA", "word", "two words", "a text of four", "0", "1e-30", "5", "-5", "1e300", "-1e300", "inf"]
    counts = release.count_bins(cells)
    assert counts.sum() == len(cells)
    assert counts[release.NO_VALUE] == 2
    assert counts[release.WORD] == 3, "an infinity is a word"
    assert counts[release.TEXT] == 1
    numbers = counts[release.FIRST_NUMBER :]
    assert numbers[0] == numbers[-1] == 1, "what is too large is in the outermost bins"
    assert release.count_different(["a", " a", "b", "", "?"]) == 2


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12))
def test_the_heaviest_stretch_is_the_heaviest(scores):
    start, stop = release.find_heaviest_stretch(np.array(scores))
    best = max(sum(scores[i:j]) for i in range(len(scores)) for j in range(i + 1, len(scores) + 1))
    assert sum(scores[start:stop]) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([str(v) for v in range(18, 90)] * 5, Number),
        (["male", "female", ""] * 100, Category),
        (["a patient who is well"] * 300, Text),
        ([f"P{n}" for n in range(300)], Skip),
        ([""] * 300, Skip),
    ],
)
def test_kinds_are_understood_without_noise(cells, kind):
    counts = release.count_bins(cells)
    column = release.infer_column(counts, release.count_different(cells), 1.0, len(cells), None)
    assert type(column) is kind
    if isinstance(column, Number):
        assert column.low <= 18
        assert column.high >= 90
    if isinstance(column, Category):
        assert column.buckets == 16
    assert Schema({"a": column}).width == column.width
