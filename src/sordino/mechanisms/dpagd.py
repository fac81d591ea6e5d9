"""DPAGD: the length of every step is chosen privately."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.selective import dpagd
from sordino.selection.step_length import StepLength

MECHANISMS = (
    Mechanism(
        "dpagd",
        title="DPAGD",
        summary="the length of every step is chosen by a noisy minimum",
        paper="Lee and Kifer, Concentrated Differentially Private Gradient Descent with Adaptive per-Iteration "
        "Privacy Budget, KDD 2018",
        recipe=dpagd,
        parts={"Selector": {"step-length": StepLength}},
    ),
)
