"""The package's public face: every name resolves, and no other does."""

import pytest

import sordino


@pytest.mark.parametrize("name", sordino.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(sordino, name) is not None
    assert name in dir(sordino)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'privat'"):
        _ = sordino.privat
