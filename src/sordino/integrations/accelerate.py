"""Private training inside a Hugging Face Accelerate loop.

::

    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    model, optimizer, private = prepare(accelerator, model, optimizer, train_set, loss, recipe)
    private.attach(scheduler)
    for batch in load(accelerator, private):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            private.backward(loss(model, batch))  # in place of accelerator.backward(loss)
            optimizer.step()

The batches come from the recipe's sampler, so there is no DataLoader to prepare. Accumulation cuts a draw into
microbatches, which affects only performance and changes no numbers. Several processes take each step together, each on
its own part of the draw; the model is not wrapped. Anything about the training batches that you pass to
`accelerator.log` is private, and no guarantee covers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from sordino.errors import InvalidInput
from sordino.gradients.engine import Loss
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.validation.first_step import require_held


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    loss: Loss,
    recipe: Recipe,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Private]:
    """Let the accelerator place model and optimizer, then bind `recipe` to them; takes the options of `Private`.

    Returns the prepared model, the prepared optimizer and the `Private`, whose hooks are on the optimizer inside. With
    several processes the model is placed but not wrapped: their clipped sums are added up, not their gradients.
    """
    _check(accelerator)
    require_held(model, optimizer)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer = accelerator.prepare_optimizer(optimizer)
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return model, optimizer, Private(model, inner, dataset, loss, recipe, **options)


def load(accelerator: Accelerator, private: Private, *, num_workers: int = 0) -> Iterator[Any]:
    """The recipe's draws, each in about `gradient_accumulation_steps` parts, for ``accelerator.accumulate(model)``.

    A draw has a random size, so it may have a part more or less. The accelerator counts parts; it is told the position
    of each one, so that it lets the optimizer step after the last part of a draw and never before.
    """
    parts = accelerator.gradient_accumulation_steps
    microbatch = math.ceil(private.bench.recipe.batch_size / parts / accelerator.num_processes) if parts > 1 else None
    for batch in private.loader(num_workers=num_workers, microbatch=microbatch):
        accelerator.step = parts - 1 if private.completes_draw else 0
        yield batch


def _check(accelerator: Accelerator) -> None:
    """Refuse settings that would change what is released."""
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InvalidInput(
            f"Accelerator: mixed_precision={accelerator.mixed_precision!r} scales the loss, which changes what is "
            "clipped: use 'bf16' or 'no'"
        )
    known = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in known:
        raise InvalidInput(
            f"Accelerator: distributed_type={accelerator.distributed_type.value!r} owns the backward pass or shards "
            "the model: use one process per device without it, or sordino.Private with FSDP2 under torchrun"
        )
