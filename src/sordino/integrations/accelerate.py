"""Private training inside a Hugging Face Accelerate loop.

::

    accelerator = Accelerator()
    model, optimizer, private = prepare(accelerator, model, optimizer, train_set, loss, recipe)
    scheduler = accelerator.prepare(scheduler)
    for batch in private.loader():
        optimizer.zero_grad()
        private.backward(loss(model, batch))  # in place of accelerator.backward(loss)
        optimizer.step()
        scheduler.step()

The batches come from the recipe's sampler, so there is no DataLoader to prepare. What `accelerator.log` shows of the
training batches is private and no guarantee covers it.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from sordino.errors import InvalidInput
from sordino.gradients.engine import Loss
from sordino.private import Private
from sordino.recipe import Recipe


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

    Returns the prepared model, the prepared optimizer and the `Private`, whose hooks are on the optimizer inside.
    """
    _check(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return model, optimizer, Private(model, inner, dataset, loss, recipe, **options)


def _check(accelerator: Accelerator) -> None:
    """Refuse settings that would change what is released."""
    wanted = {
        "num_processes": (accelerator.num_processes, 1),
        "gradient_accumulation_steps": (accelerator.gradient_accumulation_steps, 1),
        "mixed_precision": (accelerator.mixed_precision, "no"),
    }
    for name, (value, required) in wanted.items():
        if value != required:
            raise InvalidInput(f"Accelerator: {name}={value!r} must be {required!r} for private training")
