"""Noise screening by simulated annealing (SA-DPSGD)."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.selective import screening
from sordino.selection.annealing import Annealing

MECHANISMS = (
    Mechanism(
        "screening",
        title="SA-DPSGD",
        summary="noisy updates are screened by simulated annealing",
        paper="An efficient differential privacy deep learning method based on noise screening, 2022",
        recipe=screening,
        parts={"Selector": {"annealing": Annealing}},
        example={"validation_noise": 1.0},
    ),
)
