"""A recipe, a run with everything a run can have, a server on a folder of runs, and a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sordino import Budget, Recipe, recipes
from sordino.report.server import Server
from tests.browser import Browser, started
from tests.runs import AUDIT, OUTCOME, history, make_run


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return recipes.dpsgd(batch_size=50, steps=40).calibrate(Budget(epsilon=3, delta=1e-5), records=1000)


@pytest.fixture
def full_run(tmp_path: Path, recipe: Recipe) -> Path:
    return make_run(tmp_path, recipe, files={"history.jsonl": history(), "audit.json": AUDIT, "outcome.json": OUTCOME})


@pytest.fixture
def runs(tmp_path: Path, recipe: Recipe) -> Path:
    make_run(tmp_path / "runs", recipe, name="whole", files={"history.jsonl": history()})
    make_run(tmp_path / "runs", recipe, name="begun", events=10)
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path) -> Iterator[Server]:
    with Server(runs, deadline=2.0) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    yield from started()
