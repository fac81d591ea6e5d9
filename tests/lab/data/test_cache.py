"""Where datasets are looked for and in which order; what takes long is made once, and a full disk is one clear line."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino.errors import InvalidInput
from sordino.lab import machine
from sordino.lab.data import cache
from sordino.lab.data.cache import allocate, remember_tensor
from sordino.lab.data.download import DataUnavailable, Remote
from sordino.lab.features import scatter, scattering
from sordino.lab.features.handwriting import Handwriting, load_network

REMOTE = Remote("http://127.0.0.1:9/mnist/file.gz", "md5:" + hashlib.md5(b"right").hexdigest())
INPUTS = torch.arange(6.0).reshape(3, 2)


def put(folder: Path, content: bytes) -> Path:
    path = folder / "mnist" / "file.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_sordino_data_comes_before_the_cache(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.find_file("mnist", "file.gz") is None
    cached = put(empty_machine, b"right")
    assert cache.obtain("mnist", REMOTE) == cached
    given = put(tmp_path / "given", b"right")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    assert cache.obtain("mnist", REMOTE) == given


def test_any_file_of_sordino_data_comes_before_the_cache(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a set may lie in two layouts, the folder decides first and the layout second."""
    other = put(empty_machine, b"").with_name("other.txt")
    other.write_bytes(b"another layout")
    assert cache.obtain("mnist", REMOTE, "other.txt") == other
    given = put(tmp_path / "given", b"right")
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path / "given"))
    assert cache.obtain("mnist", REMOTE, "other.txt") == given
    assert cache.find_given("mnist", "other.txt") is None


def test_a_damaged_local_file_is_refused(empty_machine: Path) -> None:
    path = put(empty_machine, b"wrong")
    with pytest.raises(DataUnavailable, match=f"{path} has md5 .* must be .*: delete it and load again"):
        cache.obtain("mnist", REMOTE)


def test_a_folder_that_is_none_is_refused_rather_than_ignored(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORDINO_DATA", str(empty_machine / "typo"))
    with pytest.raises(InvalidInput, match="is not a folder: correct it, or unset it"):
        cache.find_file("mnist", "file.gz")


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SORDINO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    places = {}
    for platform in ("linux", "win32", "darwin"):
        monkeypatch.setattr("sys.platform", platform)
        places[platform] = cache.cache_folder()
    assert places["linux"] == places["win32"] == tmp_path / "sordino"
    assert places["darwin"] == Path("/home/someone/Library/Caches/sordino")


def test_arrays_are_made_once_per_key(empty_machine: Path) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, np.ndarray]:
        made.append(name)
        return {"x": np.array([len(made)])}

    for key in ("a", "a", "b"):
        stored = cache.remember_arrays("set", key, lambda k=key: make(k))
    assert made == ["a", "b"]
    assert stored["x"].tolist() == [2]


def test_a_failed_make_leaves_nothing_that_counts(empty_machine: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise DataUnavailable("no source")

    with pytest.raises(DataUnavailable):
        cache.remember_arrays("set", "a", fail)
    assert cache.remember_arrays("set", "a", lambda: {"x": np.array([7])})["x"].tolist() == [7]


def test_a_damaged_cache_names_the_file_to_delete(empty_machine: Path) -> None:
    (empty_machine / "set").mkdir(parents=True)
    (empty_machine / "set" / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(InvalidInput, match=r"a\.npz cannot be read .*: delete it"):
        cache.remember_arrays("set", "a", dict)


def test_without_a_writable_cache_arrays_are_made_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "file" / "cache"))
    assert cache.remember_arrays("set", "a", lambda: {"x": np.array([1])})["x"].tolist() == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_on_a_full_disk_arrays_are_made_each_time(empty_machine: Path) -> None:
    for _ in range(2):
        (empty_machine / "set").mkdir(parents=True, exist_ok=True)
        (empty_machine / "set" / "a.part").symlink_to("/dev/full")
        assert cache.remember_arrays("set", "a", lambda: {"x": np.arange(9)})["x"].tolist() == list(range(9))
        assert [path.name for path in (empty_machine / "set").iterdir()] == ["a.lock"]


def test_what_is_there_is_read_where_nothing_can_be_written(empty_machine: Path) -> None:
    cache.remember_arrays("set", "a", lambda: {"x": np.array([1])})
    (empty_machine / "set" / "a.lock").unlink()
    (empty_machine / "set" / "a.lock").mkdir()
    assert cache.remember_arrays("set", "a", dict)["x"].tolist() == [1]


def doubled(path: Path) -> None:
    output = allocate(path, (3, 2))
    output[:] = 2 * INPUTS.numpy()
    output.flush()


def test_what_is_kept_is_made_and_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sordino.lab.data")
    for _ in range(2):
        assert torch.equal(remember_tensor(tmp_path, "doubled", (INPUTS,), doubled, title="doubles"), 2 * INPUTS)
    (line,) = caplog.messages
    assert line == f"computing doubles of 3 records, once: to be kept in {tmp_path}"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: remember_tensor(folder, "doubled", (INPUTS,), doubled, title="doubles"),
        lambda folder: scatter(torch.rand(1, 1, 8, 8), folder=folder, quiet=True),
        lambda folder: load_network(Handwriting(2, 1), folder, quiet=True),
    ],
    ids=["kept", "scatter", "trained"],
)
def test_a_folder_that_cannot_be_written_is_one_line(make: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInput, match=r"^cache folder .*file/sordino cannot be .*set SORDINO_CACHE") as caught:
        make(tmp_path / "file" / "sordino")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system takes no place on the disk beforehand")
def test_a_full_disk_is_noticed_before_the_features_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, a write into the memory map would kill the process."""
    asked: list[int] = []

    def full(number: int) -> Callable[[int, int, int], None]:
        def allocate(descriptor: int, offset: int, length: int) -> None:
            asked.append(length)
            raise OSError(number, os.strerror(number))

        return allocate

    monkeypatch.setattr(os, "posix_fallocate", full(errno.ENOSPC))
    with pytest.raises(InvalidInput, match=r"No space left on device\): make room"):
        remember_tensor(tmp_path, "doubled", (INPUTS,), doubled, title="doubles")
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}, "what was begun is taken away"
    assert asked[0] >= 6 * 4
    monkeypatch.setattr(os, "posix_fallocate", full(errno.EOPNOTSUPP))
    assert torch.equal(remember_tensor(tmp_path, "doubled", (INPUTS,), doubled, title="doubles"), 2 * INPUTS)


def test_room_is_taken_for_the_whole_file(tmp_path: Path) -> None:
    size = 1 << 22
    array = allocate(tmp_path / "big.npy", (size,), np.uint8)
    assert len(array) == size
    if hasattr(os, "posix_fallocate"):
        assert (tmp_path / "big.npy").stat().st_blocks * 512 >= size


def test_scattering_uses_the_threads_that_torch_and_the_system_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def noted(
        images: torch.Tensor, groups: int, dtype: object, last: bool, path: Path, workers: int, quiet: bool
    ) -> None:
        used.append(workers)
        with path.open("wb") as file:
            np.save(file, np.zeros(1))

    monkeypatch.setattr(scattering, "_fill_scattering", noted)
    for number, (cores, threads) in enumerate([(8, 1), (2, 4), (3, 3)]):
        monkeypatch.setattr(scattering, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        scatter(torch.full((1, 1, 8, 8), float(number)), folder=tmp_path, quiet=True)
    scatter(torch.full((1, 1, 8, 8), 9.0), folder=tmp_path, workers=7, quiet=True)
    assert used == [1, 2, 3, 7]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to processors")
def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert machine.cores() == 3
