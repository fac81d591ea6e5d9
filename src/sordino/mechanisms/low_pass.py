"""DOPPLER: a low-pass filter on noisy gradients (Zhang et al. 2024).

Gradients change slowly from step to step, while the privacy noise is equally strong at all frequencies. So a linear
filter that passes low frequencies keeps most of the gradient and removes most of the noise. With g_t the released
gradient,

    m_t = − Σ_k a_k·m_{t−k} + Σ_k b_k·g_{t−k},     c_t = − Σ_k a_k·c_{t−k} + Σ_k b_k·[t ≥ k],     ĝ_t = m_t / c_t,

and ĝ_t goes to the optimizer. c_t is the filter's response to the constant 1, so a constant gradient passes unchanged
from the first step on. b = (1 − β), a = (−β) is momentum without bias at the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.proposals import Proposer
from sordino.recipe import Around, Common, Optimizer, Recipe

LOOKED_AT = 256
"""Over this many steps a filter must pass a constant with a positive factor."""


class LowPass(Proposer):
    """An optimizer that gets low-pass filtered gradients: b_0 … b_n are `inputs`, a_1 … a_m are `outputs`.

    It needs one buffer per parameter for each output, and one for each input except the first.

    Guarantees: post-processing. Edge cases: a parameter without a gradient keeps its past.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        inputs: tuple[float, ...] = (0.1,),
        outputs: tuple[float, ...] = (-0.9,),
    ) -> None:
        check_filter(inputs, outputs)
        super().__init__(inner)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._responses: list[float] = []

    def refine(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> dict[str, Any]:
        assert parameter.grad is not None
        received, made = parameter.grad, {"lowpass_steps": remembered.get("lowpass_steps", 0) + 1}
        mean, passed = received * self.inputs[0], self.inputs[0]
        for lag, weight in enumerate(self.inputs[1:], 1):
            if (before := remembered.get(f"received_{lag}")) is not None:
                mean.add_(before, alpha=weight)
                passed += weight
        for lag, weight in enumerate(self.outputs, 1):
            if (before := remembered.get(f"filtered_{lag}")) is not None:
                mean.add_(before, alpha=-weight)
                passed -= weight * remembered[f"passed_{lag}"]
        parameter.grad = mean / passed
        made |= _shift("received", len(self.inputs) - 1, received.detach().clone(), remembered)
        made |= _shift("filtered", len(self.outputs), mean, remembered)
        return made | _shift("passed", len(self.outputs), passed, remembered)

    def gain(self, steps: int) -> float:
        """Return √(Σ h²) / Σ h of the impulse response h so far."""
        while len(self._responses) <= min(steps, LOOKED_AT):
            now = len(self._responses)
            value = self.inputs[now] if now < len(self.inputs) else 0.0
            past = self._responses[::-1][: len(self.outputs)]
            self._responses.append(value - math.fsum(a * h for a, h in zip(self.outputs, past, strict=False)))
        seen = self._responses[: steps + 1]
        return math.sqrt(math.fsum(h * h for h in seen)) / abs(math.fsum(seen))


def _shift(name: str, count: int, newest: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """Return the last `count` values; the newest has number 1."""
    older = {f"{name}_{k + 1}": remembered[f"{name}_{k}"] for k in range(1, count) if f"{name}_{k}" in remembered}
    return {**older, f"{name}_1": newest} if count else {}


def check_filter(inputs: tuple[float, ...], outputs: tuple[float, ...]) -> None:
    """Refuse a filter that never forgets, or that turns a constant gradient around."""
    if not inputs or not all(map(math.isfinite, (*inputs, *outputs))):
        raise InvalidInput(f"inputs={inputs}, outputs={outputs} must be finite, with one input at least: try (0.1,)")
    if len(poles := np.roots([1.0, *outputs])) and float(np.abs(poles).max()) >= 1:
        raise InvalidInput(
            f"outputs={outputs} make a filter that never forgets: its poles must lie within the unit circle, "
            "for one output between -1 and 1; try (-0.9,)"
        )
    passed: list[float] = []
    for step in range(LOOKED_AT):
        recent = passed[::-1][: len(outputs)]
        passed.append(sum(inputs[: step + 1]) - math.fsum(a * c for a, c in zip(outputs, recent, strict=False)))
    if not min(passed) > 0:
        raise InvalidInput(
            f"inputs={inputs}, outputs={outputs} turn a constant gradient around: its share falls to "
            f"{min(passed):.3g}, must stay > 0; try (0.1,) and (-0.9,)"
        )


@dataclass(frozen=True)
class LowPassed(Around):
    """The recipe's optimizer behind a low-pass filter."""

    inputs: tuple[float, ...] = (0.1,)
    outputs: tuple[float, ...] = (-0.9,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "inputs", tuple(self.inputs))  # TOML has lists
        object.__setattr__(self, "outputs", tuple(self.outputs))
        check_filter(self.inputs, self.outputs)

    def wrap(self, inner: torch.optim.Optimizer) -> LowPass:
        return LowPass(inner, self.inputs, self.outputs)


def low_pass(
    *,
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    inputs: tuple[float, ...] = (0.1,),
    outputs: tuple[float, ...] = (-0.9,),
    inner: Optimizer | None = None,
    **common: Unpack[Common],
) -> Recipe:
    """DP-SGD whose noisy gradients are low-pass filtered (DOPPLER, Zhang et al. 2024, Alg. 2), at no extra price.

    `inner` is another recipe's optimizer, which gets the filtered gradients.

    >>> from sordino import recipes
    >>> recipes.low_pass(batch_size=256, epochs=5).optimizer.outputs
    (-0.9,)
    """
    optimizer = LowPassed(lr=lr, momentum=momentum, inner=inner, inputs=inputs, outputs=outputs)
    return Recipe(name="low_pass", clip=clip, optimizer=optimizer, **common)


MECHANISMS = (
    Mechanism(
        "low_pass",
        title="DOPPLER",
        summary="noisy gradients go through a low-pass filter",
        paper="Zhang et al., DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise "
        "Reduction, NeurIPS 2024",
        recipe=low_pass,
        parts={"Optimizer": {"low-pass": LowPassed}},
    ),
)
