"""DiSK: a simplified Kalman filter on noisy gradients (Zhang et al. 2024), in the variant of one gradient per step.

The filter predicts how the gradient changed with the last step d_{t−1} = x_t − x_{t−1}, and corrects the prediction by
the released gradient. The paper's gradient of an example is a combination of two, at x_t and at x_t + γ·d_{t−1},

    g_t = (1−κ)/(κγ)·∇f(x_t + γ·d_{t−1}) + (1 − (1−κ)/(κγ))·∇f(x_t),     ĝ_t = (1−κ)·ĝ_{t−1} + κ·(clip(g_t) + noise).

Two gradients per example would cost twice the time and would have to be clipped as one. With γ = (1−κ)/κ the second has
weight zero, which leaves one gradient, taken ahead of the iterate. So between steps the model holds the point
y_t = x_t + γ·d_{t−1}. Its clipped and noised gradient is an ordinary release of DP-SGD, and the filter costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.proposals import Proposer
from sordino.recipe import Around, Common, Optimizer, Recipe


class Kalman(Proposer):
    """An optimizer that gets ĝ_t, while the model holds the point y_t ahead, where gradients are taken.

    Within ``with optimizer.final():`` the model holds the iterate x_t, and permanently after the last step. It needs
    two buffers per parameter.

    Guarantees: post-processing. The first ĝ is the first gradient. Edge cases: κ = 1 is the inner optimizer, unchanged.
    """

    moves: ClassVar[bool] = True

    def __init__(self, inner: torch.optim.Optimizer, kappa: float = 0.7) -> None:
        check_kappa(kappa)
        super().__init__(inner)
        self.kappa = kappa

    @property
    def ahead(self) -> float:
        """γ = (1−κ)/κ."""
        return (1 - self.kappa) / self.kappa

    def refine(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> dict[str, Any]:
        assert parameter.grad is not None
        estimate = parameter.grad.detach().clone()
        if (before := remembered.get("estimate")) is not None:
            estimate.mul_(self.kappa).add_(before, alpha=1 - self.kappa)
        parameter.grad = estimate.clone()  # some optimizers change it
        point = remembered.get("point")
        if point is not None:
            parameter.copy_(point)
        steps = remembered.get("kalman_steps", 0) + 1
        return {"kalman_steps": steps, "estimate": estimate, "point": parameter.detach().clone()}

    def follow(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> None:
        # So far this was the point before the step, because the notes were made before it.
        before, now = remembered["point"], parameter.detach().clone()
        parameter.add_(now - before, alpha=self.ahead)
        remembered["point"] = now

    def give(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(self.inner, Proposer) and self.inner.holds_two:
            return self.inner.give(parameter)  # an average of the iterates
        held: Tensor | None = self.state.get(parameter, {}).get("point")
        return parameter.detach() if held is None else held

    def gain(self, steps: int) -> float:
        """Combine the weights of all gradients so far: (1−κ)^t of the first, κ·(1−κ)^(t−s) of the others."""
        kept = (1 - self.kappa) ** (2 * steps)
        return math.sqrt(kept + self.kappa / (2 - self.kappa) * (1 - kept))


def check_kappa(kappa: float) -> None:
    """Refuse an invalid weight of the new gradient."""
    if not 0 < kappa <= 1:
        raise InvalidInput(f"kappa={kappa} must lie in (0, 1]: the weight of the new gradient; try 0.7")


@dataclass(frozen=True)
class KalmanAround(Around):
    """The recipe's optimizer behind a Kalman filter."""

    kappa: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kappa(self.kappa)

    def wrap(self, inner: torch.optim.Optimizer) -> Kalman:
        return Kalman(inner, self.kappa)


def kalman(
    *,
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    kappa: float = 0.7,
    inner: Optimizer | None = None,
    **common: Unpack[Common],
) -> Recipe:
    """DP-SGD with gradients taken ahead of the iterate and averaged by a Kalman filter (DiSK), at no extra price.

    `inner` is another recipe's optimizer, which gets the filtered gradients.

    >>> from sordino import recipes
    >>> recipes.kalman(batch_size=256, epochs=5).optimizer.kappa
    0.7
    """
    return Recipe(
        name="kalman",
        clip=clip,
        optimizer=KalmanAround(lr=lr, momentum=momentum, inner=inner, kappa=kappa),
        **common,
    )


MECHANISMS = (
    Mechanism(
        "kalman",
        title="DiSK",
        summary="a Kalman filter follows the noisy gradients, which are taken ahead of the model",
        paper="Zhang et al., DiSK: Differentially Private Optimizer with Simplified Kalman Filter for Noise Reduction, "
        "2024 (in the variant γ = (1−κ)/κ)",
        recipe=kalman,
        parts={"Optimizer": {"kalman": KalmanAround}},
    ),
)
