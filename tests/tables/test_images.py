"""Folders of images: the layout is public, one bad file is named, and an image is read by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino.errors import InvalidInput
from sordino.tables import reading

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / name).mkdir()
        for number, size in enumerate([(40, 30), (9, 9), (64, 64)]):
            Image.new("RGB", size, colour).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_images_by_class(photos):
    assert reading.list_classes(photos) == ("cat", "dog")
    x, y = reading.read_images(photos, ("cat", "dog"), 16, grey=False)
    assert x.shape == (6, 3, 16, 16)
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    assert x[0].amax((1, 2)).tolist() == [1, 0, 0]
    assert x[3].amax((1, 2)).tolist() == [0, 0, 1]
    grey, _ = reading.read_images(photos, ("cat", "dog", "owl"), 8, grey=True)
    assert grey.shape == (6, 1, 8, 8)


def test_an_image_is_read_by_itself(photos):
    before, _ = reading.read_images(photos, ("cat", "dog"), 16, grey=False)
    (photos / "dog" / "2.png").unlink()
    Image.new("L", (5, 500), 255).save(photos / "dog" / "9.png")
    after, _ = reading.read_images(photos, ("cat", "dog"), 16, grey=False)
    assert (before[:5] == after[:5]).all()
    assert (after[5] == 1).all()


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\x00" * 40])
def test_a_bad_image_is_named(photos, content):
    (photos / "dog" / "bad.png").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"bad\.png is not an image"):
        reading.read_images(photos, ("cat", "dog"), 16, grey=False)


def test_a_truncated_image_is_named(photos):
    whole = (photos / "dog" / "2.png").read_bytes()
    (photos / "dog" / "2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=r"2\.png is not an image"):
        reading.read_images(photos, ("cat", "dog"), 16, grey=False)


def test_a_picture_that_would_fill_the_memory_is_refused(photos, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InvalidInput, match="DecompressionBombError"):
        reading.read_images(photos, ("cat", "dog"), 16, grey=False)


def test_layouts_that_are_refused(photos, tmp_path):
    with pytest.raises(InvalidInput, match="'dog' that is not among the classes cat"):
        reading.read_images(photos, ("cat",), 16, grey=False)
    with pytest.raises(InvalidInput, match=r"must be in 8\.\.512"):
        reading.read_images(photos, ("cat", "dog"), 4, grey=False)
    with pytest.raises(InvalidInput, match="has 0 subfolders"):
        reading.list_classes(photos / "cat")
    (photos / "bare").mkdir()
    for name in ("a", "b"):
        (photos / "bare" / name).mkdir()
    with pytest.raises(InvalidInput, match="has 0 images"):
        reading.read_images(photos / "bare", ("a", "b"), 16, grey=False)
