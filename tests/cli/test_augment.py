"""`sordino train --augment`: views of images, at the same price; of nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sordino.accounting.ledger import Ledger
from sordino.augmentation import ShiftAndMirror
from sordino.cli import session


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    np.savez(path, x=generator.random((200, 1, 16, 16)).astype(np.float32), y=np.arange(200) % 2)
    sized = ["--classes", 2, "--model", "linear", "--epochs", 1, "--batch-size", 50, "--held-out", 0.2]
    return ["train", "--data", path, *sized, "--epsilon", 8, "--json"]


def test_views_are_shown_noted_and_kept_for_resuming(sordino, images, tmp_path):
    result = sordino(*images, "--augment", 3, "--mirror", "--run", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["epsilon"] <= 8
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert "3 random views of each record are averaged" in ledger.declared("setting")[0]
    views = session.reopen(tmp_path / "run").private.bench.records.views
    assert views is not None
    assert (views.count, views.augmentation) == (3, ShiftAndMirror(2, mirror=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--augment", 0], "augment=0 must be >= 1: it is the number of views of a record"),
        (["--mirror"], "give --augment with their number"),
    ],
)
def test_what_makes_no_views_is_refused(sordino, images, options, said):
    result = sordino(*images, *options)
    assert result.exit_code != 0
    assert said in result.stderr.replace("\n", " ")


def test_records_that_are_no_images_have_no_views(sordino, small):
    result = sordino(*small, "--epsilon", 4, "--augment", 2)
    assert result.exit_code != 0
    assert "augment" in result.stderr
