"""Features on disk: made once, announced, and a clear line where there is no room for them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sordino import machine
from sordino.errors import InvalidInput
from sordino.features import scatter, scattering
from sordino.features.handwriting import Handwriting, trained
from sordino.features.kept import kept, room

INPUTS = torch.arange(6.0).reshape(3, 2)


def doubled(path: Path) -> None:
    output = room(path, (3, 2))
    output[:] = 2 * INPUTS.numpy()
    output.flush()


def test_what_is_kept_is_made_and_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sordino.features")
    for _ in range(2):
        assert torch.equal(kept(tmp_path, "doubled", (INPUTS,), doubled, title="doubles"), 2 * INPUTS)
    (line,) = caplog.messages
    assert line == f"computing doubles of 3 records, once: to be kept in {tmp_path}"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: kept(folder, "doubled", (INPUTS,), doubled, title="doubles"),
        lambda folder: scatter(torch.rand(1, 1, 8, 8), folder=folder, quiet=True),
        lambda folder: trained(Handwriting(2, 1), folder, quiet=True),
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
        kept(tmp_path, "doubled", (INPUTS,), doubled, title="doubles")
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}, "what was begun is taken away"
    assert asked[0] >= 6 * 4
    monkeypatch.setattr(os, "posix_fallocate", full(errno.EOPNOTSUPP))
    assert torch.equal(kept(tmp_path, "doubled", (INPUTS,), doubled, title="doubles"), 2 * INPUTS)


def test_room_is_taken_for_the_whole_file(tmp_path: Path) -> None:
    size = 1 << 22
    array = room(tmp_path / "big.npy", (size,), np.uint8)
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

    monkeypatch.setattr(scattering, "_compute", noted)
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
