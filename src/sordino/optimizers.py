"""An optimizer without a learning rate: it takes its step length from what was released already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.noise import widen

FIRST = 1e-2
"""How far the first step goes, as a share of 1 + ‖x₀‖."""


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Run a step's closure with gradients on and return its result; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class DistanceOverGradients(torch.optim.Optimizer):
    """x ← x − lr·r/√G·g: r is the largest distance from the start so far, G the sum of all ‖g‖² (Ivgi et al. 2023).

    From any small start, r grows until the steps match the distance to go. With noised gradients, G also counts the
    noise, so more noise means shorter steps, as it should. Everything it reads was released, so it costs nothing. `lr`
    is a factor; leave it at 1.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1.0, weight_decay: float = 0.0, first: float = FIRST
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "first": first})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient stay where they are."""
        loss = run_closure(closure)
        moved: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        distance = squares = start = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["start"], state["squares"], state["distance"] = parameter.detach().clone(), 0.0, 0.0
                gradient = parameter.grad + group["weight_decay"] * parameter
                state["squares"] += _square(gradient)
                squares += state["squares"]
                distance += _square(parameter - state["start"])
                start += _square(state["start"])
                moved.append((parameter, gradient, group))
        if not moved or squares <= 0:
            return loss
        reach = max([distance**0.5, *(self.state[parameter]["distance"] for parameter, _, _ in moved)])
        for parameter, gradient, group in moved:
            self.state[parameter]["distance"] = reach
            least = group["first"] * (1 + start**0.5)
            parameter.add_(gradient, alpha=-group["lr"] * max(reach, least) / squares**0.5)
        return loss


def _square(values: Tensor) -> float:
    """Return ‖values‖², over all parts if the tensor is spread over several processes."""
    total: Any = widen(values).square().sum()
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)
