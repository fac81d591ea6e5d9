"""Processes that are killed while they reserve, draw and settle: nothing overdrawn, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vault.hammer import hammer
from tests.vault.server import Server, explain_absence


@pytest.fixture
def server() -> Iterator[Server]:
    if reason := explain_absence():
        pytest.skip(reason)
    try:
        made = Server()
    except OSError as error:
        pytest.skip(f"no PostgreSQL server can be started here: {error}")
    yield made
    made.remove()


def require_nothing_lost(found: dict[str, Any]) -> None:
    assert found["overdrafts"] == 0
    assert found["lost_events"] == 0
    assert found["equal"], found
    assert found["kills"] > 0
    assert found["drawn"] > 0


def test_two_processes_on_one_file_for_a_moment(tmp_path: Path) -> None:
    require_nothing_lost(hammer(str(tmp_path / "vault.sqlite"), 2, 2.0, epsilon=1.5, kills_per_second=0.5))


@pytest.mark.slow
def test_eight_processes_on_one_file_for_a_minute(tmp_path: Path) -> None:
    require_nothing_lost(hammer(str(tmp_path / "vault.sqlite"), 8, 60.0))


@pytest.mark.slow
def test_thirty_two_processes_on_postgresql_for_a_minute(server: Server) -> None:
    require_nothing_lost(hammer(server.address(), 32, 60.0, disturb=server.restart))
