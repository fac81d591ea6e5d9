"""A recipe, a run with everything a run can have, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sordino import Budget, Recipe, recipes
from tests.browser import Browser, started
from tests.runs import AUDIT, OUTCOME, history, make_run


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return recipes.dpsgd(batch_size=50, steps=40).calibrate(Budget(epsilon=3, delta=1e-5), records=1000)


@pytest.fixture
def full_run(tmp_path: Path, recipe: Recipe) -> Path:
    return make_run(tmp_path, recipe, files={"history.jsonl": history(), "audit.json": AUDIT, "outcome.json": OUTCOME})


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    yield from started()
