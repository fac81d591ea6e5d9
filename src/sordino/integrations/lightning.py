"""Private training inside Lightning's Trainer: a callback, and the batches to fit on.

::

    class Digits(lightning.LightningModule):
        def training_step(self, batch, index):
            return loss(self, batch)  # one loss per example

        def backward(self, losses):  # Lightning's own hook, in place of losses.backward()
            PrivateTraining.of(self.trainer).backward(losses)

    privacy = PrivateTraining(train_set, loss, recipe)
    lightning.Trainer(max_epochs=-1, callbacks=[privacy]).fit(module, privacy.loader())
    print(privacy.private.guarantee())

Anything about the training batches in `self.log` (a training loss, an accuracy) is private, and no guarantee covers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.gradients.engine import Loss
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.validation.first_step import require_held


class PrivateTraining(Callback):
    """Binds `recipe` to the module and the optimizer that the Trainer sets up; takes the options of `Private`.

    The Trainer stops after the recipe's last step. If `run` is among the options, the ledger is durable from the first
    step and the run is saved at the end, even if it was interrupted; `resume=True` continues it.
    """

    def __init__(self, dataset: Any, loss: Loss, recipe: Recipe, *, resume: bool = False, **options: Any) -> None:
        self.recipe = recipe
        self.private: Private | None = None
        self._charged = 0
        self._resumed = options.pop("run", None) if resume else None
        self._dataset, self._loss, self._options = dataset, loss, options

    @staticmethod
    def of(trainer: Trainer) -> Private:
        """Return the `Private` of the Trainer's callback, for the module's own `backward`."""
        for callback in trainer.callbacks:
            if isinstance(callback, PrivateTraining) and callback.private is not None:
                return callback.private
        raise InvalidInput("the Trainer has no PrivateTraining: give it one, Trainer(callbacks=[privacy])")

    def loader(self) -> Draws:
        """Return what the Trainer fits on in place of a DataLoader."""
        return Draws(self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer)
        optimizer = trainer.optimizers[0]
        require_held(pl_module, optimizer)
        loss = InBfloat16(self._loss, pl_module.device.type) if trainer.precision == "bf16-mixed" else self._loss
        self.private = Private(pl_module, optimizer, self._dataset, loss, self.recipe, **self._options)
        if self._resumed is not None:
            self.private.load(self._resumed)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after the last step, or when the budget runs out: an epoch that charged nothing."""
        assert self.private is not None
        before, self._charged = self._charged, len(self.private.run.ledger)
        trainer.should_stop |= self.private.position == self.private.total or self._charged == before

    def teardown(self, *_: Any, **__: Any) -> None:
        """Save; `private` stays open for `guarantee()`, and you call its `close()`."""
        if self.private is not None and self.private.run.folder is not None:
            self.private.save()

    on_exception = teardown  # after an error or Ctrl-C, Lightning does not tear down


class Draws:
    """The draws of one epoch after another. It has a length, because Lightning would otherwise fetch a batch ahead."""

    def __init__(self, privacy: PrivateTraining) -> None:
        self.privacy = privacy

    def __len__(self) -> int:
        return max(1, round((self.privacy.recipe.records or 1) / self.privacy.recipe.batch_size))

    def __iter__(self) -> Iterator[Any]:
        assert self.privacy.private is not None
        yield from islice(self.privacy.private.loader(), len(self))


@dataclass(frozen=True)
class InBfloat16:
    """The loss as the Trainer runs it with ``precision="bf16-mixed"``, for the probe and for examples run again."""

    loss: Loss
    device: str

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return self.loss(model, batch)


ACCUMULATES = (
    "the Trainer counts batches, but a draw has a random number of parts: use private.steps() with microbatch="
)
ONE_PROCESS = (
    "processes share each draw, the part of one may be empty, and the Trainer, which counts batches in each, would end "
    "their epochs at different steps and wait for ever: use sordino.Private under torchrun"
)
SCALES = "must be '32-true' or 'bf16-mixed': float16 scales the loss, which changes what is clipped"


def _check(trainer: Trainer) -> None:
    """Refuse settings that would change what is released."""
    if trainer.world_size != 1:
        raise InvalidInput(f"Trainer: world_size={trainer.world_size} must be 1: {ONE_PROCESS}")
    if trainer.accumulate_grad_batches != 1:
        raise InvalidInput(
            f"Trainer: accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1: {ACCUMULATES}"
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise InvalidInput(f"Trainer: precision={trainer.precision!r} {SCALES}")
    if trainer.gradient_clip_val or trainer.ckpt_path or len(trainer.optimizers) != 1:
        raise InvalidInput("Trainer: private training takes no gradient_clip_val, no ckpt_path and one optimizer")
