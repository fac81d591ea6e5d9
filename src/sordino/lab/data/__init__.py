"""The benchmark datasets of the papers.

``load(name)`` looks in the folder SORDINO_DATA, then in the user's cache, then downloads from the official source.
`Data.caveats` lists every preprocessing step that itself reads private records, with the public alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sordino.errors import InvalidInput
from sordino.lab.data.cifar10 import load_cifar10
from sordino.lab.data.download import DataUnavailable
from sordino.lab.data.imdb import load_imdb
from sordino.lab.data.infinite_mnist import load_infinite_mnist
from sordino.lab.data.mnist import load_digits, load_fashion_mnist, load_mnist
from sordino.lab.data.surnames import load_names
from sordino.tables.dataset import Data, Preprocessing

LOADERS: Mapping[str, Callable[..., Data]] = MappingProxyType(
    {
        "cifar10": load_cifar10,
        "digits": load_digits,
        "fashion-mnist": load_fashion_mnist,
        "imdb": load_imdb,
        "infinite-mnist": load_infinite_mnist,
        "mnist": load_mnist,
        "names": load_names,
    }
)
"""Every dataset by the name that recipes and the command line use."""


def load(name: str, **options: Any) -> Data:
    """Return the dataset called `name`; the options are those of its own loader."""
    loader = LOADERS.get(name.replace("_", "-"))
    if loader is None:
        raise InvalidInput(f"data={name!r} is not known: choose one of {', '.join(LOADERS)}")
    return loader(**options)


__all__ = ["LOADERS", "Data", "DataUnavailable", "Preprocessing", "load"]
