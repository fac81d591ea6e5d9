"""DPSUR: selective update and release."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.selective import dpsur
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.selective import Selective

MECHANISMS = (
    Mechanism(
        "dpsur",
        title="DPSUR",
        summary="an update is kept only if a noisy test finds that it helps",
        paper="DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and "
        "Release, VLDB 2024",
        recipe=dpsur,
        parts={"Selector": {"selective": Selective}, "NoisyTest": {"noisy-test": NoisyTest}},
    ),
)
