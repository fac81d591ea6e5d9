"""A small table of records in both file formats, and the command as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from sordino.cli import app

RECORDS = 60


def table(records: int = RECORDS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 10, (records, 3))
    return x, (x[:, 0] > 5).astype(int)


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    x, y = table()
    path = tmp_path / "patients.csv"
    rows = [f"{a:.4f},{b:.4f},{c:.4f},{label}" for (a, b, c), label in zip(x, y, strict=True)]
    path.write_text("\n".join(["age,weight,height,outcome", *rows]) + "\n")
    return path


@pytest.fixture
def npz_file(tmp_path: Path) -> Path:
    x, y = table()
    path = tmp_path / "patients.npz"
    np.savez(path, x=x, y=y)
    return path


@pytest.fixture
def sordino() -> Callable[..., Result]:
    """`sordino("train", "--epsilon", 3)` in this process."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def small(csv_file: Path) -> list[object]:
    """The arguments of a run that takes moments."""
    public = ["--target", "outcome", "--bounds", "0,10", "--classes", 2, "--held-out", 0]
    return ["train", "--data", csv_file, *public, "--batch-size", 16, "--steps", 6]
