"""No test of the datasets reads or fills the user's own cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoded sets are made once per session."""
    return tmp_path_factory.mktemp("sordino-cache")


@pytest.fixture
def benchmark_folder(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of real datasets, or a skip."""
    folder = os.environ.get("SORDINO_DATA")
    if not folder:
        pytest.skip("SORDINO_DATA is not set: no benchmark datasets on this machine")
    monkeypatch.setenv("SORDINO_CACHE", str(shared_cache))
    return Path(folder)


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without datasets; gives the cache folder."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
