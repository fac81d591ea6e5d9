"""Does training reach what it should? This is checked before every step by name, and after the first by its effect.

If an adapter is wrapped around the model after the optimizer was built, nothing trains it: the run costs its privacy
and its hours, and the model stays as it was. Nothing here looks at a record. It is public which tensors are trainable,
held by the optimizer, given noise or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput, UnsupportedModel

SAMPLE = 256
"""How many entries of a frozen tensor are compared before and after the step."""
NAMED = 4
"""How many tensors an error names; it counts the others."""


def require_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that lacks a trainable parameter of the model, as if built before adapters were added."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise InvalidInput(
            f"the optimizer does not hold {_name(missing)}, which would never be trained: "
            "build it after adapters are added to the model, or freeze what is not to be trained"
        )


@contextmanager
def watch_first_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Watch the first step: every trainable tensor must receive noise, and no frozen one may change.

    Noise has no exact zeros, so the step did not release a gradient of zeros. Whether a gradient moves its tensor
    depends on the learning rate, which a warm-up starts at zero. No copy of the trainable tensors is kept.
    """
    require_held(model, optimizer)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: (p, p._version, _sample(p)) for name, p in model.named_parameters() if not p.requires_grad}
    reached: set[str] = set()

    def look(*_: Any) -> None:
        reached.update(name for name, p in trained.items() if p.grad is not None and bool(_local(p.grad).any()))

    hook = optimizer.register_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
    if idle := [name for name in trained if name not in reached]:
        raise UnsupportedModel(f"after the first step {_name(idle)} had received no noise: it is not trained")
    changed = [
        name
        for name, (p, version, sample) in frozen.items()
        if p._version != version or not torch.equal(_sample(p), sample)
    ]
    if changed:
        raise UnsupportedModel(f"the first step changed {_name(changed)}, which is frozen: see what writes to it")


def _sample(parameter: nn.Parameter) -> Tensor:
    """Sample entries over the whole tensor, as bytes, so that a NaN equals itself."""
    flat = _local(parameter.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone().view(torch.uint8)


def _local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _name(tensors: list[str]) -> str:
    more = f" and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
    return ", ".join(tensors[:NAMED]) + more
