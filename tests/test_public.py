"""The package's public face: every name resolves, and asking for help does not load torch."""

import subprocess
import sys

import pytest

import sordino


@pytest.mark.parametrize("name", sordino.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(sordino, name) is not None
    assert name in dir(sordino)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'privat'"):
        _ = sordino.privat


def test_importing_the_package_and_the_accounting_does_not_load_torch() -> None:
    code = "import sordino, sordino.accounting, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
