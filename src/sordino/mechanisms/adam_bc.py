"""DP-AdamBC: Adam without the noise in its second moment (Tang, Shpilevskiy, Lécuyer 2024).

Adam divides by the root mean square of its gradients. For noisy gradients this is mostly the noise, which is the same
for all coordinates, so DP-Adam is little more than DP-SGD with momentum. The deviation of the noise, Φ^½ = σ·C/B, is
public, so its variance can be subtracted:

    m ← β₁·m + (1−β₁)·g,   v ← β₂·v + (1−β₂)·g²,   x ← x − η · m̂ / √max(v̂ − Φ, γ′),

with m̂ and v̂ corrected for their start as in Adam. Where the noise changes over the run, Φ is averaged as v is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.optimizers import run_closure
from sordino.proposals import NoiseAware
from sordino.recipe import Common, Optimizer, Recipe

FLOOR = 5e-8


class AdamBC(torch.optim.Optimizer, NoiseAware):
    """Adam whose second moment is corrected for the privacy noise, whose size `Private` tells it.

    `floor` is γ′, which bounds the corrected second moment from below: it never divides by less than √γ′.
    `weight_decay` is decoupled, as in AdamW.

    Guarantees: post-processing. Edge cases: without noise it is Adam with √max(v̂, γ′) in place of √v̂ + ε.
    """

    _deviation = 0.0  # a copy made by torch starts with state alone

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = FLOOR,
        weight_decay: float = 0.0,
    ) -> None:
        check_floor(floor)
        if not (lr > 0 and all(0 <= beta < 1 for beta in betas) and weight_decay >= 0):
            raise InvalidInput(
                f"lr={lr}, betas={betas}, weight_decay={weight_decay} must be > 0, in [0, 1) and >= 0: "
                "try 1e-3, (0.9, 0.999) and 0"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay})

    def hear(self, deviation: float) -> None:
        self._deviation = deviation

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step by the gradients that the parameters hold."""
        result = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return result

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (first, second) = self.state[parameter], group["betas"]
        if "exp_avg" not in state:
            state["step"], state["noise"] = 0, 0.0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        state["noise"] = second * state["noise"] + (1 - second) * self._deviation**2
        started = 1 - second ** state["step"]
        spread = ((state["exp_avg_sq"] - state["noise"]) / started).clamp_(min=group["floor"]).sqrt_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - first ** state["step"]))


def check_floor(floor: float) -> None:
    """Refuse a floor that does not bound from below."""
    if not floor > 0:
        raise InvalidInput(f"floor={floor} must be > 0: what is left of a second moment may be zero; try {FLOOR:g}")


@dataclass(frozen=True)
class CorrectedAdam(Optimizer):
    """`AdamBC` as the optimizer of a recipe."""

    kind: str = "adam"
    lr: float = 1e-3
    floor: float = FLOOR

    def __post_init__(self) -> None:
        super().__post_init__()
        check_floor(self.floor)
        if self.kind == "sgd":
            raise InvalidInput("optimizer='sgd' has no second moment to correct: use recipes.dpsgd, or adam")

    def build(self, parameters: Iterable[nn.Parameter]) -> AdamBC:
        return AdamBC(parameters, lr=self.lr, floor=self.floor, weight_decay=self.weight_decay)


def adam_bc(*, clip: float = 1.0, lr: float = 1e-3, floor: float = FLOOR, **common: Unpack[Common]) -> Recipe:
    """DP-Adam with the noise removed from its second moment (DP-AdamBC): the same releases, and so the same price.

    >>> from sordino import recipes
    >>> recipes.adam_bc(batch_size=64, epochs=1).optimizer.floor
    5e-08
    """
    return Recipe(name="adam_bc", clip=clip, optimizer=CorrectedAdam(lr=lr, floor=floor), **common)


MECHANISMS = (
    Mechanism(
        "adam_bc",
        title="DP-AdamBC",
        summary="Adam whose second moment is corrected for the noise",
        paper="Tang, Shpilevskiy, Lécuyer, DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias "
        "Correction), AAAI 2024",
        recipe=adam_bc,
        parts={"Optimizer": {"adam-bc": CorrectedAdam}},
    ),
)
