"""Where datasets are looked for, in which order, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from sordino.data import store
from sordino.data.download import DataUnavailable, Remote
from sordino.errors import InvalidInput

REMOTE = Remote("http://127.0.0.1:9/mnist/file.gz", "md5:" + hashlib.md5(b"right").hexdigest())


def put(folder: Path, content: bytes) -> Path:
    path = folder / "mnist" / "file.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_sordino_data_comes_before_the_cache(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.find("mnist", "file.gz") is None
    cached = put(empty_machine, b"right")
    assert store.obtain("mnist", REMOTE) == cached
    given = put(tmp_path / "given", b"right")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    assert store.obtain("mnist", REMOTE) == given


def test_any_file_of_sordino_data_comes_before_the_cache(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a set may lie in two layouts, the folder decides first and the layout second."""
    other = put(empty_machine, b"").with_name("other.txt")
    other.write_bytes(b"another layout")
    assert store.obtain("mnist", REMOTE, "other.txt") == other
    given = put(tmp_path / "given", b"right")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    assert store.obtain("mnist", REMOTE, "other.txt") == given
    assert store.given("mnist", "other.txt") is None


def test_a_damaged_local_file_is_refused(empty_machine: Path) -> None:
    path = put(empty_machine, b"wrong")
    with pytest.raises(DataUnavailable, match=f"{path} has md5 .* must be .*: delete it and load again"):
        store.obtain("mnist", REMOTE)


def test_a_folder_that_is_none_is_refused_rather_than_ignored(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(empty_machine / "typo"))
    with pytest.raises(InvalidInput, match="is not a folder: correct it, or unset it"):
        store.find("mnist", "file.gz")


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SORDINO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    places = {}
    for platform in ("linux", "win32", "darwin"):
        monkeypatch.setattr("sys.platform", platform)
        places[platform] = store.cache_folder()
    assert places["linux"] == places["win32"] == tmp_path / "sordino"
    assert places["darwin"] == Path("/home/someone/Library/Caches/sordino")


def test_arrays_are_made_once_per_key(empty_machine: Path) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, np.ndarray]:
        made.append(name)
        return {"x": np.array([len(made)])}

    for key in ("a", "a", "b"):
        stored = store.remember("set", key, lambda k=key: make(k))
    assert made == ["a", "b"]
    assert stored["x"].tolist() == [2]


def test_a_failed_make_leaves_nothing_that_counts(empty_machine: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise DataUnavailable("no source")

    with pytest.raises(DataUnavailable):
        store.remember("set", "a", fail)
    assert store.remember("set", "a", lambda: {"x": np.array([7])})["x"].tolist() == [7]


def test_a_damaged_cache_names_the_file_to_delete(empty_machine: Path) -> None:
    (empty_machine / "set").mkdir(parents=True)
    (empty_machine / "set" / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(InvalidInput, match=r"a\.npz cannot be read .*: delete it"):
        store.remember("set", "a", dict)


def test_without_a_writable_cache_arrays_are_made_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "file" / "cache"))
    assert store.remember("set", "a", lambda: {"x": np.array([1])})["x"].tolist() == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_on_a_full_disk_arrays_are_made_each_time(empty_machine: Path) -> None:
    for _ in range(2):
        (empty_machine / "set").mkdir(parents=True, exist_ok=True)
        (empty_machine / "set" / "a.part").symlink_to("/dev/full")
        assert store.remember("set", "a", lambda: {"x": np.arange(9)})["x"].tolist() == list(range(9))
        assert [path.name for path in (empty_machine / "set").iterdir()] == ["a.lock"]


def test_what_is_there_is_read_where_nothing_can_be_written(empty_machine: Path) -> None:
    store.remember("set", "a", lambda: {"x": np.array([1])})
    (empty_machine / "set" / "a.lock").unlink()
    (empty_machine / "set" / "a.lock").mkdir()
    assert store.remember("set", "a", dict)["x"].tolist() == [1]
