"""DPIS: importance sampling by gradient norm."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.importance import dpis
from sordino.sampling.importance import Importance
from sordino.weighing import Importance as Weights

MECHANISMS = (
    Mechanism(
        "dpis",
        title="DPIS",
        summary="records with longer gradients are drawn more often and weigh less",
        paper="Wei, Bao, Xiao, Yang, DPIS: An Enhanced Mechanism for Differentially Private SGD with Importance "
        "Sampling, CCS 2022",
        recipe=dpis,
        parts={"Sampler": {"importance": Importance}, "Weighing": {"importance-weights": Weights}},
    ),
)
