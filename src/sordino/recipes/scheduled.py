"""Dynamic DP-SGD and the noise-decay baselines: noise and clipping bound that change over the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

from sordino.errors import InvalidInput
from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.schedules import (
    Constant,
    ExponentialDecay,
    GrowingMu,
    PerEpoch,
    PolynomialDecay,
    Schedule,
    SensitivityDecay,
    StepDecay,
    TimeDecay,
    VarianceDecay,
)
from sordino.weighing import Flat

# The kind of decay, and the constant of its paper: Yu et al. 2019 tuned theirs for 100 epochs of MNIST; 0.99 is ours,
# for Zhang et al. 2021 name none.
DECAYS: dict[str, tuple[Callable[[float], Schedule], float]] = {
    "exponential": (ExponentialDecay, 0.0138),
    "time": (TimeDecay, 0.0281),
    "step": (StepDecay, 0.7008),
    "polynomial": (PolynomialDecay, 3.5277),
    "variance": (VarianceDecay, 0.99),
}


def dynamic(
    *,
    mu_ratio: float = 1.25,
    clip_ratio: float = 10 / 3,
    clip: float = 1.5,
    lr: float = 0.15,
    per_epoch: bool = False,
    **common: Unpack[Common],
) -> Recipe:
    """Growing μ and falling clipping bound together: σ_t·C_t = C_0/μ_0 · (ρ_μ ρ_c)^(−t/T) (Dynamic DP-SGD, Alg. 2).

    The defaults are those of the authors' MNIST script at ε = 0.4. μ_0 is found by `calibrate` from the composition of
    all different steps, where the paper uses a limit theorem; sums are divided by the public batch size, where it uses
    the size of the draw. `per_epoch` changes both once per epoch, as the script does.

    >>> from sordino import recipes
    >>> recipe = recipes.dynamic(mu_ratio=2, clip_ratio=4, batch_size=256, epochs=20)
    >>> round(recipe.noise_schedule(50, 100) * recipe.clip_schedule(50, 100), 4)  # 8 ** -0.5
    0.3536
    """
    return _scheduled("dynamic", GrowingMu(mu_ratio), SensitivityDecay(clip_ratio), clip, lr, per_epoch, common)


def growing_mu(
    *, ratio: float = 1.25, clip: float = 1.5, lr: float = 0.15, per_epoch: bool = False, **common: Unpack[Common]
) -> Recipe:
    """Spend little privacy early and more later: μ_t = ρ_μ^(t/T)·μ_0 (Dynamic DP-SGD, Eqs. 10-13).

    >>> from sordino import recipes
    >>> recipes.growing_mu(ratio=2, batch_size=256, epochs=20).noise_schedule
    GrowingMu(ratio=2)
    """
    return _scheduled("growing_mu", GrowingMu(ratio), Constant(), clip, lr, per_epoch, common)


def sensitivity_decay(
    *, ratio: float = 10 / 3, clip: float = 1.5, lr: float = 0.15, per_epoch: bool = False, **common: Unpack[Common]
) -> Recipe:
    """Lower the clipping bound, and the noise with it: C_t = ρ_c^(−t/T)·C_0 (Dynamic DP-SGD, Eqs. 14-16).

    >>> from sordino import recipes
    >>> recipes.sensitivity_decay(ratio=4, clip=1.5, batch_size=256, epochs=20).clip_schedule(50, 100)
    0.5
    """
    return _scheduled("sensitivity_decay", Constant(), SensitivityDecay(ratio), clip, lr, per_epoch, common)


def noise_decay(
    *,
    kind: str = "exponential",
    rate: float | None = None,
    clip: float = 4.0,
    lr: float = 0.05,
    **common: Unpack[Common],
) -> Recipe:
    """The noise falls once per epoch (Yu et al. 2019; kind="variance": Zhang et al. 2021).

    `rate` is the constant of the decay per epoch, the paper's unless given. What the papers charge are the accountants
    "zcdp-epoch" and "tcdp".

    >>> from sordino import recipes
    >>> recipes.noise_decay(kind="step", batch_size=600, epochs=100).noise_schedule
    PerEpoch(inner=StepDecay(factor=0.7008, period=10), epochs=100)
    """
    if kind not in DECAYS:
        raise InvalidInput(f"kind={kind!r} is unknown: use one of {', '.join(DECAYS)}")
    make, constant = DECAYS[kind]
    schedule = make(constant if rate is None else rate)
    return _scheduled("noise_decay", schedule, Constant(), clip, lr, True, common)


def _scheduled(
    name: str, noise: Schedule, bound: Schedule, clip: float, lr: float, per_epoch: bool, common: Common
) -> Recipe:
    if per_epoch:
        noise, bound = _stepped(noise, common), _stepped(bound, common)
    return Recipe(
        name=name,
        clip=clip,
        noise_schedule=noise,
        clip_schedule=bound,
        weighing=Flat(),
        optimizer=Optimizer("sgd", lr=lr),
        **common,
    )


def _stepped(schedule: Schedule, common: Common) -> Schedule:
    if isinstance(schedule, Constant):
        return schedule
    epochs = common.get("epochs")
    if epochs is None:
        raise InvalidInput("epochs=None must be given: the schedule changes once per epoch")
    return PerEpoch(schedule, math.ceil(epochs))
