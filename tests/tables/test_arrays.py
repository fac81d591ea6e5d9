"""Arrays from a file of whatever origin: a header that lies is refused before memory is taken, in one line."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sordino.errors import InvalidInput
from sordino.tables import arrays
from sordino.tables.reading import DataChoice, read_records


def claim(shape: str, descr: str = "<f8", body: bytes = b"") -> bytes:
    """A .npy file whose header says what we want."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + body


def archive(path: Path, members: dict[str, bytes], *, deflate: bool = False) -> Path:
    how = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


LABELS = claim("(4,)", body=np.zeros(4).tobytes())


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (claim("(8589934592, 1)"), "claims 68,719,476,736 bytes"),
        (claim("(4, 2147483648)", body=bytes(64)), "which its file does not hold"),
        (claim("(4, 2)", body=bytes(63)), "which its file does not hold"),
        (claim("(4, -2)", body=bytes(64)), "not a .npz file of plain arrays"),
        (claim("(4, 2)", "|O", body=bytes(64)), "pickled objects"),
        (claim("(4, 2)", "<U4", body=bytes(128)), "must be numeric"),
        (claim("(4, 2)", "<c16", body=bytes(128)), "must be numeric"),
        (claim("(4, 2)", "<M8[s]", body=bytes(64)), "must be numeric"),
        (claim("(4, 2)", "no such type", body=bytes(64)), "not a .npz file of plain arrays"),
        (claim("__import__('os').abort()", body=bytes(64)), "not a .npz file of plain arrays"),
        (claim("4" * 5000, body=bytes(64)), "not a .npz file of plain arrays"),
        (claim("(" * 60, body=bytes(64)), "not a .npz file of plain arrays"),
        (b"", "not a .npz file of plain arrays"),
        (b"\x93NUMPY\x09\x00", "not a .npz file of plain arrays"),
        (claim("(5, 2)", body=bytes(80)), "must be (N, ...) and (N,)"),
    ],
)
def test_a_npz_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, x: bytes, words: str, deflate: bool) -> None:
    path = archive(tmp_path / "data.npz", {"x": x, "y": LABELS}, deflate=deflate)
    with pytest.raises(InvalidInput) as caught:
        read_records(DataChoice(source=str(path)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_than_the_machine_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of zeros that really unfolds to what its header claims."""
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100), np.uint8), y=np.zeros(1000))
    assert arrays.read_arrays(path)[0].shape == (1000, 100)
    monkeypatch.setattr(arrays, "find_memory", lambda: 1000 * 100 * 8 - 1)
    with pytest.raises(InvalidInput, match="more than the memory"):
        arrays.read_arrays(path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.savez_compressed(whole, x=np.arange(8.0).reshape(4, 2), y=np.zeros(4))
    content, path = whole.getvalue(), tmp_path / "data.npz"
    generator = np.random.default_rng(0)
    kept, said = 0, []
    for _ in range(200):
        changed = bytearray(content)
        changed[generator.integers(len(content))] ^= 1 << int(generator.integers(8))
        path.write_bytes(bytes(changed[: generator.integers(1, len(content))] if generator.random() < 0.3 else changed))
        try:
            kept += arrays.read_arrays(path)[0].shape == (4, 2)
        except InvalidInput as error:
            said.append(str(error))
    assert kept < 150
    assert not [line for line in said if "\n" in line]
    path.write_bytes(content)
    assert (arrays.read_arrays(path)[0] == np.arange(8.0).reshape(4, 2)).all()
