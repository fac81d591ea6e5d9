"""A checkpoint is whole or it is not used."""

import os
import signal
from pathlib import Path

import pytest
import torch

from sordino import checkpoint
from sordino.errors import CheckpointError

SAID = {"run_id": "r", "events": 3, "head": "ab" * 32, "position": 2}


def state(number: int) -> dict[str, object]:
    return {**SAID, "number": number, "tensor": torch.arange(number)}


def test_newest_is_read_and_two_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        checkpoint.write(tmp_path, number, state(number))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000000002.pt", "checkpoint-000000003.pt"]
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found["number"] == 3
    assert torch.equal(found["tensor"], torch.arange(3))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.read_newest(tmp_path) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_a_damaged_one_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoint.write(tmp_path, 1, state(1))
    newest = checkpoint.write(tmp_path, 2, state(2))
    content = newest.read_bytes()
    middle = len(content) // 2
    newest.write_bytes(
        {
            "truncate": content[:-7],
            "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "foreign": b"PK\x03\x04" + content,
        }[damage]
    )
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found["number"] == 1


def test_all_damaged_is_one_line(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, state(1)).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="no older checkpoint is whole") as caught:
        checkpoint.read_newest(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path, 1, state(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.write(tmp_path, 2, state(2))
    monkeypatch.undo()
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found["number"] == 1
    assert not list(tmp_path.glob("*.partial"))


def test_code_hidden_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (Path(tmp_path / "owned"),))  # type: ignore[return-value]

    checkpoint.write(tmp_path, 1, {**SAID, "evil": Evil()})
    with pytest.raises(CheckpointError):
        checkpoint.read_newest(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and links")
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pipe_or_a_link_in_place_of_a_checkpoint_is_not_opened(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "checkpoint-000000001.pt"
    os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero")
    signal.alarm(20)  # both would be read for ever
    try:
        with pytest.raises(CheckpointError, match="not a plain file"):
            checkpoint.read_newest(tmp_path)
    finally:
        signal.alarm(0)
