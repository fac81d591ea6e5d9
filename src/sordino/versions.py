"""What computes: the versions that a run or a report was made with."""

from __future__ import annotations

import platform
from importlib import metadata

from sordino import __version__

LIBRARIES = ("torch", "dp-accounting", "numpy", "scipy")


def versions() -> dict[str, str]:
    """Sordino, Python and the libraries whose numbers end up in a guarantee."""
    return {
        "sordino": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
