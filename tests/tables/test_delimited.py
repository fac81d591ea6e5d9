"""Delimited text in every dialect, and files that are none: what is read, what is refused, and no cell in any error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from pathlib import Path

import pytest

from sordino.errors import InvalidInput
from sordino.tables.delimited import Dialect, parse_values  # type: ignore[attr-defined]
from sordino.tables.files import is_table, read_table

TEXT = "age;town;y\n1,5;Zürich;ja\n2;Genève;nein\n1.234,5;Bern;ja\n"
READ = {"age": ["1.5", "2", "1234.5"], "town": ["Zürich", "Genève", "Bern"], "y": ["ja", "nein", "ja"]}


def read(
    tmp_path: Path, content: str | bytes, dialect: Dialect | None = None, name: str = "t.csv"
) -> dict[str, list[str]]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return {column: list(cells) for column, cells in read_table(path, dialect).columns.items()}


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"]
)
def test_encodings_are_told_by_the_first_bytes(tmp_path: Path, encoding: str) -> None:
    assert read(tmp_path, TEXT.encode(encoding)) == READ


@pytest.mark.parametrize(("pack", "ending"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")])
def test_compressed_files(tmp_path: Path, pack: object, ending: str) -> None:
    content = pack(TEXT.encode("utf-16"))  # type: ignore[operator]
    assert is_table(f"t.csv.{ending}")
    assert read(tmp_path, content, name=f"t.csv.{ending}") == READ
    with pytest.raises(InvalidInput, match="compressed and damaged"):
        read(tmp_path, pack(TEXT.encode() * 3000)[:-40], name=f"t.csv.{ending}")  # type: ignore[operator]


def test_a_cell_is_decoded_by_itself(tmp_path: Path) -> None:
    """One record in another encoding changes nothing about the others."""
    assert read(tmp_path, b"a,b\nZ\xc3\xbcrich,1\nGen\xe8ve,2\n") == {"a": ["Zürich", "Genève"], "b": ["1", "2"]}


@pytest.mark.parametrize(
    ("content", "dialect", "columns"),
    [
        ("sep=;\na;b\n1;2\n", None, {"a": ["1"], "b": ["2"]}),
        ("a|b\n1|x\n", None, {"a": ["1"], "b": ["x"]}),
        ('a,b\n"1,234",x\n"-2,345,678.5",y\n', None, {"a": ["1234", "-2345678.5"], "b": ["x", "y"]}),
        ("a;b\n1,234;x\n", Dialect(decimal="."), {"a": ["1234"], "b": ["x"]}),
        ("a;b\n1,234;x, y\n", None, {"a": ["1.234"], "b": ["x, y"]}),
        ("a:b\n1:2\n", Dialect(separator=":"), {"a": ["1"], "b": ["2"]}),
        ("a,b\n-9,x\n3, unknown \n", Dialect(missing=("-9", "unknown")), {"a": ["", "3"], "b": ["x", ""]}),
        (
            "1,2.5,yes\n3,4.5,no\n",
            Dialect(header=False),
            {"column_1": ["1", "3"], "column_2": ["2.5", "4.5"], "column_3": ["yes", "no"]},
        ),
        ("1990,1991,y\n3,4,a\n", Dialect(header=True), {"1990": ["3"], "1991": ["4"], "y": ["a"]}),
        ("0,1,2\n3,4,5\n", None, {"0": ["3"], "1": ["4"], "2": ["5"]}),
        ("a,b\r1,2\r", None, {"a": ["1"], "b": ["2"]}),
    ],
)
def test_dialects(tmp_path: Path, content: str, dialect: Dialect | None, columns: dict[str, list[str]]) -> None:
    assert read(tmp_path, content, dialect) == columns


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n \n",
        b"\0" * 6_000_000,
        b"a" * 6_000_000,
        bytes(range(256)) * 400,
        b"\x1f\x8b" + b"x" * 50,
        b"\xff\xfe\x00",
    ],
    ids=["empty", "blank", "zeros", "endless", "noise", "no gzip", "no utf-16"],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^[^\n]*$"):
        read(tmp_path, content)


def test_wrong_options_are_refused() -> None:
    for wrong in ({"separator": ";;"}, {"decimal": "x"}, {"encoding": "klingon"}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            Dialect(**wrong)  # type: ignore[arg-type]


# -- no error names a cell --------------------------------------------------------------------------------------------

SECRETS = [
    "Xavier Quimby",
    "quimby@example.org",
    "47110815",
    "3.14159",
    "1971-02-28",
    "divorced",
    "ill",
    "a very long note of him",
]


def _spoil(rows: list[list[str]], way: int, chance: random.Random) -> str:
    """A file with something wrong with it, one way or the other."""
    lines = [",".join(row) for row in rows]
    if way == 1:
        lines[chance.randrange(1, len(lines))] += ",more"
    if way == 2:
        lines[chance.randrange(1, len(lines))] += ',"open'
    if way == 3:
        lines[0] = lines[0].replace(",", "\x07,", 1)
    if way == 4:
        lines[chance.randrange(len(lines))] = SECRETS[0]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize("named", [True, False])
def test_no_error_holds_a_cell(tmp_path: Path, way: int, named: bool) -> None:
    """Files without a header, with broken rows, quotes and names, asked for a column that they lack."""
    chance = random.Random(way)
    rows = [
        SECRETS,
        *([chance.choice([cell, cell[::-1], f"{cell}{number}"]) for cell in SECRETS] for number in range(30)),
    ]
    # the values of some columns come again, as those of any category do
    rows = [[*row[:5], chance.choice(["divorced", "married"]), chance.choice(["ill", "well"]), row[7]] for row in rows]
    header = [["name", "mail", "number", "dose", "born", "state", "outcome", "notes"]] if named else []
    path = tmp_path / "t.csv"
    path.write_text(_spoil([*header, *rows], way, chance))
    for target in ("outcom", "Xavier", "quimby", "3.14", "divorce", "il"):
        with pytest.raises(InvalidInput) as refused:
            read_table(path).require_column(target)
        said = str(refused.value).replace(repr(target), "")
        cells = {cell for row in rows for cell in row}
        assert not [cell for cell in cells if cell in said and len(cell) > 3], said


def test_leaking_names_would_be_seen(tmp_path: Path) -> None:
    """The twin: where the first line is believed to be names, an error does list them."""
    path = tmp_path / "t.csv"
    path.write_text("Xavier,Quimby\nAnna,Meier\nBea,Keller\n")
    with pytest.raises(InvalidInput, match="Xavier"):
        read_table(path, Dialect(header=True)).require_column("outcome")


def test_numbers_are_told_by_one_rule() -> None:
    import numpy as np
    import pyarrow as pa

    texts = ["1", " +2.5 ", "1e3", ".5", "5.", "1_000", "0x10", "½", "inf", "1e999", "--1", ""]
    expected = [1, 2.5, 1000, 0.5, 5, *[np.nan] * 7]
    np.testing.assert_array_equal(parse_values(pa.array(texts)), expected)
