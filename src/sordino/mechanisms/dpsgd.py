"""DP-SGD, DP-Adam and automatic clipping: the baselines of every paper."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.plain import automatic, dpadam, dpsgd
from sordino.weighing import Automatic

ABADI = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"

MECHANISMS = (
    Mechanism(
        "dpsgd",
        title="DP-SGD",
        summary="gradients are clipped one by one, and Gaussian noise is added to their sum",
        paper=ABADI,
        recipe=dpsgd,
    ),
    Mechanism(
        "dpadam",
        title="DP-Adam",
        summary="DP-SGD whose noisy gradients go to Adam",
        paper=ABADI,
        recipe=dpadam,
    ),
    Mechanism(
        "automatic",
        title="AUTO-S",
        summary="gradients are normalised one by one instead of clipped, then noised",
        paper="Bu et al., Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, 2023",
        recipe=automatic,
        parts={"Weighing": {"automatic": Automatic}},
    ),
)
