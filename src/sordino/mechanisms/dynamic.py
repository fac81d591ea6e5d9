"""Dynamic DP-SGD and the noise-decay baselines: noise and clipping bound that change over the run."""

from __future__ import annotations

from sordino.mechanisms import Mechanism
from sordino.recipes.scheduled import dynamic, growing_mu, noise_decay, sensitivity_decay
from sordino.schedules import (
    ExponentialDecay,
    GrowingMu,
    Levels,
    PerEpoch,
    PolynomialDecay,
    SensitivityDecay,
    StepDecay,
    TimeDecay,
    VarianceDecay,
)

DYNAMIC = "Dynamic Differential-Privacy Preserving SGD, 2021"

MECHANISMS = (
    Mechanism(
        "dynamic",
        title="Dynamic DP-SGD",
        summary="noise and clipping bound follow a schedule",
        paper=DYNAMIC,
        recipe=dynamic,
        parts={"Schedule": {"per-epoch": PerEpoch, "levels": Levels}},
    ),
    Mechanism(
        "growing_mu",
        title="Dynamic DP-SGD",
        summary="the noise falls, so that later steps spend more",
        paper=DYNAMIC,
        recipe=growing_mu,
        parts={"Schedule": {"growing-mu": GrowingMu}},
    ),
    Mechanism(
        "sensitivity_decay",
        title="Dynamic DP-SGD",
        summary="the clipping bound falls",
        paper=DYNAMIC,
        recipe=sensitivity_decay,
        parts={"Schedule": {"sensitivity-decay": SensitivityDecay}},
    ),
    Mechanism(
        "noise_decay",
        title="Noise decay",
        summary="the noise falls from epoch to epoch",
        paper="Yu et al., Differentially Private Model Publishing for Deep Learning, S&P 2019; Zhang et al. 2021",
        recipe=noise_decay,
        parts={
            "Schedule": {
                "exponential-decay": ExponentialDecay,
                "time-decay": TimeDecay,
                "step-decay": StepDecay,
                "polynomial-decay": PolynomialDecay,
                "variance-decay": VarianceDecay,
            }
        },
    ),
)
