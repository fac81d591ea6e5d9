"""Averages of the iterates: the noise of single steps averages out, and what they have in common stays.

With x_t the model after step t = 1, 2, …, and a_t its average,

    a_t = a_{t−1} + w_t·(x_t − a_{t−1}),    where w_t is
      exponential   1 − min(decay, (1+t)/(10+t))     (Polyak; with the warm-up of De et al. 2022)
      polynomial    (1+p)/(t+p)                      (Shamir and Zhang 2013): later models weigh more, for any length
      tail          1 up to step `after`, then 1/(t − after)    (the mean of the models after that step)

Training continues from x_t; a_t is what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.proposals import Proposer
from sordino.recipe import Around, Common, Optimizer, Recipe

POWER = 8.0


class Averaged(Proposer):
    """An optimizer that keeps an average of the models: give one of `decay`, `power` and `after`; the default is
    power=8.

    Within ``with optimizer.final():`` the model holds the average, and permanently after the last step. It needs one
    buffer per parameter. Buffers of the model, such as running statistics, are not averaged.

    Guarantees: post-processing.
    """

    moves: ClassVar[bool] = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        decay: float | None = None,
        power: float | None = None,
        after: int | None = None,
    ) -> None:
        check_average(decay, power, after)
        super().__init__(inner)
        self.decay, self.after = decay, after
        self.power = POWER if power is None else power

    def weigh(self, step: int) -> float:
        """w_t, counted from 1."""
        if self.decay is not None:
            return 1 - min(self.decay, (1 + step) / (10 + step))
        if self.after is not None:
            return 1 / max(1, step - self.after)
        return (1 + self.power) / (step + self.power)

    def follow(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> None:
        now = super().give(parameter)
        steps = remembered["averaged_steps"] = remembered.get("averaged_steps", 0) + 1
        if steps == 1:
            remembered["average"] = now.clone()
        else:
            remembered["average"].lerp_(now, self.weigh(steps))

    def give(self, parameter: nn.Parameter) -> Tensor:
        held: Tensor | None = self.state.get(parameter, {}).get("average")
        return parameter.detach() if held is None else held


def check_average(decay: float | None, power: float | None, after: int | None) -> None:
    """Refuse several averages at once, and invalid weights."""
    if sum(value is not None for value in (decay, power, after)) > 1:
        raise InvalidInput(f"decay={decay}, power={power}, after={after}: give only one of them")
    if decay is not None and not 0 <= decay < 1:
        raise InvalidInput(f"decay={decay} must lie in [0, 1): the weight of the past; try 0.999")
    if power is not None and not power >= 0:
        raise InvalidInput(f"power={power} must be >= 0: 0 is the mean of all models; try {POWER:g}")
    if after is not None and after < 0:
        raise InvalidInput(f"after={after} must be >= 0: the step after which models are averaged; try half of the run")


@dataclass(frozen=True)
class Averaging(Around):
    """The recipe's optimizer, and the average of its models."""

    decay: float | None = None
    power: float | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_average(self.decay, self.power, self.after)

    def wrap(self, inner: torch.optim.Optimizer) -> Averaged:
        return Averaged(inner, decay=self.decay, power=self.power, after=self.after)


def averaged(
    *,
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    decay: float | None = None,
    power: float | None = None,
    after: int | None = None,
    inner: Optimizer | None = None,
    **common: Unpack[Common],
) -> Recipe:
    """DP-SGD that returns an average of its models, at no extra price.

    `decay` averages exponentially, `after` over all models after that step, and `power` by a polynomial that favours
    later models and suits any length; the default is power=8. `inner` is another optimizer of a recipe.

    >>> from sordino import recipes
    >>> recipes.averaged(batch_size=256, epochs=5, decay=0.999).optimizer.decay
    0.999
    """
    optimizer = Averaging(lr=lr, momentum=momentum, inner=inner, decay=decay, power=power, after=after)
    return Recipe(name="averaged", clip=clip, optimizer=optimizer, **common)


MECHANISMS = (
    Mechanism(
        "averaged",
        title="Averaged DP-SGD",
        summary="an average of the models is returned",
        paper="De et al., Unlocking High-Accuracy Differentially Private Image Classification through Scale, 2022; "
        "Shamir and Zhang, Stochastic Gradient Descent for Non-smooth Optimization, ICML 2013",
        recipe=averaged,
        parts={"Optimizer": {"averaged": Averaging}},
    ),
)
