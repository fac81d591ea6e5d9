"""Which records are held out depends on each record alone: files that differ in one record stay neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sordino.tables.reading import DataChoice, Sheet, read_records

ROWS = [f"{number},{'yes' if number % 5 == 4 else 'no'}" for number in range(1500)]


def trained_on(path: Path, rows: list[str]) -> set[str]:
    path.write_text("x,y\n" + "\n".join(rows) + "\n")
    sheet = read_records(DataChoice(source=str(path), target="y", held_out=0.2))
    assert isinstance(sheet, Sheet)
    return {",".join(cells) for cells in zip(*sheet.train.columns.values(), strict=True)}


@pytest.mark.parametrize("place", [0, 700, 1499])
def test_one_record_less_moves_no_other(tmp_path: Path, place: int) -> None:
    whole = trained_on(tmp_path / "whole.csv", ROWS)
    less = trained_on(tmp_path / "less.csv", [row for at, row in enumerate(ROWS) if at != place])
    assert whole - less <= {ROWS[place]}
    assert less <= whole
    assert 0.75 < len(whole) / len(ROWS) < 0.85


def test_arrays_are_divided_in_the_same_way(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(500, 3))
    kept = []
    for name, part in (("whole", slice(None)), ("less", slice(1, None))):
        np.savez(tmp_path / f"{name}.npz", x=x[part], y=np.arange(500)[part] % 2)
        found = read_records(DataChoice(source=str(tmp_path / f"{name}.npz"), held_out=0.2))
        assert not isinstance(found, Sheet)
        kept.append({tuple(row.tolist()) for row in found.train[0]})
    assert kept[1] <= kept[0]
    assert len(kept[0] - kept[1]) <= 1
