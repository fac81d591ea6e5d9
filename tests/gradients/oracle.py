"""The oracle of all gradient tests: one example at a time, one plain backward pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.gradients.engine import Batch, Differentiated, Engine, Objective

Loss = Callable[[nn.Module, Any], Tensor]


def squared(model: nn.Module, data: Any) -> Tensor:
    """A loss with a different gradient for every entry of the output."""
    output = model(*data) if isinstance(data, tuple) else model(data)
    flat = output.flatten(1)
    targets = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
    return (flat - targets).square().mean(1)


def batch_of(data: Any, size: int) -> Batch:
    def single(i: int) -> Any:
        return tuple(x[i : i + 1] for x in data) if isinstance(data, tuple) else data[i : i + 1]

    return Batch(data, size, single)


def singles(model: nn.Module, loss: Loss, batch: Batch) -> list[list[Tensor]]:
    """Gradients of every trainable parameter for every example, by definition."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(batch.size):
        gradients = torch.autograd.grad(loss(model, batch.single(i)).sum(), parameters, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)])
    return rows


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that an engine must leave as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": copy.deepcopy(model.state_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "on_parameters": [sorted(vars(t)) for t in tensors],
        "grads": [t.grad is None for t in tensors],
        "modes": torch.overrides._get_current_function_mode_stack(),
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    values = before.pop("values"), after.pop("values")
    assert before == after
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


def check(
    engine: Engine, model: nn.Module, data: Any, size: int, loss: Loss = squared, rtol: float = 1e-4
) -> Differentiated:
    """Norms and weighted sums of an engine equal those of the loop over single examples."""
    batch = batch_of(data, size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = singles(model, loss, batch)
    before = state_of(model)
    result = engine.differentiate(Objective(model, loss), parameters, batch)
    assert_matches(result, expected, rtol)
    assert_same_state(before, state_of(model))
    return result


def assert_matches(result: Differentiated, expected: list[list[Tensor]], rtol: float) -> None:
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in expected])
    least = max(rtol * float(norms.max()) * 1e-2, 1e-15)  # what underflow may have taken is added to a norm
    torch.testing.assert_close(result.norms, norms, rtol=rtol, atol=least)
    weights = torch.linspace(0.3, 1.7, len(expected), dtype=norms.dtype)
    for index, total in enumerate(result.weighted_sum(weights)):
        wanted = sum(w * row[index] for w, row in zip(weights, expected, strict=True))
        scale = max(float(wanted.abs().max()), 1e-3 * float(norms.max()))
        torch.testing.assert_close(total, wanted, rtol=rtol, atol=rtol * scale)
