"""The benchmark datasets of the papers.

``load(name)`` looks in the folder SORDINO_DATA, then in the user's cache, then downloads from the official source.
`Data.caveats` lists every preprocessing step that itself reads private records, with the public alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sordino.data import cifar10, digits, fashion_mnist, imdb, infinite_mnist, mnist, names
from sordino.data.dataset import Data, Step
from sordino.data.download import DataUnavailable
from sordino.errors import InvalidInput

LOADERS: Mapping[str, Callable[..., Data]] = MappingProxyType(
    {
        "cifar10": cifar10.load,
        "digits": digits.load,
        "fashion-mnist": fashion_mnist.load,
        "imdb": imdb.load,
        "infinite-mnist": infinite_mnist.load,
        "mnist": mnist.load,
        "names": names.load,
    }
)
"""Every dataset by the name that recipes and the command line use."""


def load(name: str, **options: Any) -> Data:
    """The dataset called `name`; the options are those of its own `load`."""
    loader = LOADERS.get(name.replace("_", "-"))
    if loader is None:
        raise InvalidInput(f"data={name!r} is not known: choose one of {', '.join(LOADERS)}")
    return loader(**options)


__all__ = ["LOADERS", "Data", "DataUnavailable", "Step", "load"]
