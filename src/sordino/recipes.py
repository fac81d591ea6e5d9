"""The mechanisms by name, one constructor each: a paper is a choice of parts.

Every mechanism with a file in `sordino.mechanisms` is available here without being listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sordino import mechanisms

if TYPE_CHECKING:
    from sordino.mechanisms.adam_bc import adam_bc
    from sordino.mechanisms.allocation import allocation
    from sordino.mechanisms.averaging import averaged
    from sordino.mechanisms.banded import banded
    from sordino.mechanisms.blockwise import blockwise
    from sordino.mechanisms.dpagd import dpagd
    from sordino.mechanisms.dpis import dpis
    from sordino.mechanisms.dpsgd import automatic, dpadam, dpsgd
    from sordino.mechanisms.dpsur import dpsur
    from sordino.mechanisms.dynamic import dynamic, growing_mu, noise_decay, sensitivity_decay
    from sordino.mechanisms.jl import jl
    from sordino.mechanisms.kalman import kalman
    from sordino.mechanisms.low_pass import low_pass
    from sordino.mechanisms.preconditioned import preconditioned
    from sordino.mechanisms.rate_free import rate_free
    from sordino.mechanisms.screening import screening

    __all__ = [
        "adam_bc",
        "allocation",
        "automatic",
        "averaged",
        "banded",
        "blockwise",
        "dpadam",
        "dpagd",
        "dpis",
        "dpsgd",
        "dpsur",
        "dynamic",
        "growing_mu",
        "jl",
        "kalman",
        "low_pass",
        "noise_decay",
        "preconditioned",
        "rate_free",
        "screening",
        "sensitivity_decay",
    ]


def __getattr__(name: str) -> Any:
    """Return the constructor of a mechanism, or all their names."""
    found = mechanisms.find_all()
    if name == "__all__":
        return list(found)
    if name not in found:
        raise AttributeError(f"module 'sordino.recipes' has no attribute {name!r}: it has {', '.join(found)}")
    return found[name].recipe


def __dir__() -> list[str]:
    return list(mechanisms.find_all())
