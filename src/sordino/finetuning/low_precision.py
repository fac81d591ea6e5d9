"""How the weights of a model are stored: trained ones in float32, frozen ones optionally in fewer bits.

| dtype | what is frozen | what is computed |
|---|---|---|
| float32 | as it is | in float32 |
| bfloat16 | in bfloat16 | under autocast, so that products are in bfloat16; losses, norms, sums and noise are not |
| int8 | linear layers: one byte per weight and one scale per output; the rest in float32 | in float32 |

Only weights are rounded, once, before the run: w ≈ scale · round(w / scale) with scale = max|w| / 127 over the inputs
of an output. No activation is ever scaled by the rest of its batch, so each record is computed separately. The frozen
base is public, and so is its rounding. Trained weights never lose a small step to coarse numbers.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sordino.finetuning.choice import HALF


class ByteLinear(nn.Module):
    """A frozen linear layer whose weights are whole numbers from -127 to 127, with one scale for each output."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), bias)


def autocast(dtype: str, model: nn.Module) -> AbstractContextManager[None]:
    """Return the context that a model of this `dtype` runs in: an empty one, unless products are in half precision."""
    device = next(model.parameters()).device.type
    context: AbstractContextManager[None] = torch.autocast(device, torch.bfloat16, enabled=dtype == HALF)
    return context


def store_in_bytes(model: nn.Module) -> int:
    """Put a `ByteLinear` in the place of every frozen linear layer that shares its weights with no other module.

    Returns how many there are. A layer that is tied to an embedding stays as it is: the table is needed anyway.
    """
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values() if own is not None)
    found = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight = layer._parameters.get("weight") if _is_linear(layer) else None
            if weight is None or uses[id(weight)] > 1 or _is_trained(layer):
                continue
            bias = layer._parameters.get("bias")
            across = weight if isinstance(layer, nn.Linear) else weight.T  # Conv1D keeps inputs first
            setattr(parent, name, ByteLinear(across.detach().float(), None if bias is None else bias.detach()))
            found += 1
    return found


def _is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer itself, not a subclass with its own forward pass; GPT-2 calls its kind Conv1D."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
