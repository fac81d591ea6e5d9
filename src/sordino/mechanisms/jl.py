"""DP-SGD-JL and DP-Adam-JL: clip by norms that random projections estimate."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.projection import Projected
from sordino.recipes.projected import jl

MECHANISMS = (
    Mechanism(
        "jl",
        title="DP-SGD-JL",
        summary="gradient norms are estimated by random projections",
        paper="Fast Differentially Private-SGD via JL Projections, under review at ICLR 2021",
        recipe=jl,
        parts={"Norms": {"jl": Projected}},
        example={"projections": 24},
    ),
)
