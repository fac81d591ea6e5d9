"""Private training inside Hugging Face's Trainer: the same arguments, datasets, collators, callbacks and checkpoints.

::

    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=8, num_train_epochs=3),
        train_dataset=texts,
        data_collator=collator,
        budget=Budget(epsilon=3, delta=1e-5),
    )
    trainer.train()
    print(trainer.guarantee())

A step of the Trainer is one private step: a draw by the recipe, one gradient per example, clipped and summed in
microbatches, and noise added once. `PrivateLoop` replaces the Trainer's inner loop with that step; everything around it
(callbacks, evaluation, saving, the hub) is the Trainer's. `sordino.integrations.arguments` says what each argument
means.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    Seq2SeqTrainer,
    Trainer,
)
from transformers.trainer_utils import TrainOutput

from sordino import books, recipes
from sordino.accounting.budget import Budget
from sordino.accounting.guarantee import UNPROTECTED, Guarantee
from sordino.errors import BudgetExhausted, CheckpointError, InvalidInput
from sordino.finetuning import losses
from sordino.gradients.engine import Loss
from sordino.integrations.arguments import OF_SEQ2SEQ, Meaning, require_private
from sordino.integrations.bridging import AsDict, MaskedRecords, plain_forward, require_apart, require_seen_checkpoints
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.records import count_records
from sordino.run import HELD_OUT
from sordino.units import find_owners, number_owners
from sordino.validation.first_step import require_held, watch_first_step

FOLDER = "sordino"
"""Where the ledger is, within `output_dir`."""
PRIVATE = (
    *("loss", "grad_norm", "train_loss", "total_flos"),
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),  # the time of a draw would tell its size
)
"""Figures that the Trainer would log about training batches; the last one reveals how much text they held."""
STATE = "trainer_state.json"


class PrivateLoop:
    """A Trainer whose steps are private: mix it in before `transformers.Trainer` or a subclass of it.

    `recipe` says how to train. Without one, it is DP-SGD, with draws and steps from the arguments, noise for the
    `budget`, and the optimizer that the arguments name. A recipe that is not calibrated yet is calibrated to the
    budget. `loss` is your own per-example loss. `unit` is who owns each record, or the column that says so: then whole
    owners are drawn and protected. `options` are further options of `sordino.Private`: per_unit, engine, ledger, vault,
    seed (for experiments). The attribute `private` is the run's `Private` once training has begun; its `close` releases
    the ledger.

    Guarantees: what cannot be private is refused before anything is spent. Nothing about training batches is logged.
    """

    ordinary: ClassVar[type] = Trainer
    more_meanings: ClassVar[Mapping[str, Meaning]] = {}

    def __init__(
        self,
        *arguments: Any,
        recipe: Recipe | None = None,
        budget: Budget | None = None,
        loss: Loss | None = None,
        unit: Any = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if (recipe is None or recipe.noise_multiplier is None) == (budget is None):
            raise InvalidInput(
                "give a recipe= with its noise, or a budget= such as Budget(epsilon=3, delta=1e-5), alone or with a "
                "recipe to calibrate"
            )
        given = settings.get("args") or next((each for each in arguments if hasattr(each, "output_dir")), None)
        if given is not None:
            require_private(given, self.more_meanings)
        # As they were given: TRL makes other objects of both.
        bound = inspect.signature(self.ordinary).bind_partial(*arguments, **settings).arguments
        require_apart(bound.get("train_dataset"), bound.get("eval_dataset"))
        super().__init__(*arguments, **settings)
        self.private: Private | None = None
        self._given, self._budget, self._loss, self._unit = recipe, budget, loss, unit
        self._options, self._from_start = dict(options or {}), False
        self._require_ordinary()
        self.recipe = self._make_recipe()

    # -- what is refused, and what is made of the arguments -----------------------------------------------------

    def _require_ordinary(self: Any) -> None:
        """Refuse anything that the private step would silently leave out, or that would mix records."""
        require_private(self.args, self.more_meanings)
        if self.train_dataset is None:
            raise InvalidInput("train_dataset is missing: the records are what is protected")
        count_records(self.train_dataset)
        require_apart(self.train_dataset, self.eval_dataset)
        if self.compute_loss_func is not None and self._loss is None:
            raise InvalidInput(
                "compute_loss_func gives one loss for the batch: pass loss=, which gives one per example"
            )
        for method in ("compute_loss", "training_step"):
            if getattr(type(self), method) is not getattr(self.ordinary, method) and self._loss is None:
                raise InvalidInput(
                    f"{type(self).__name__}.{method} would not be called: pass loss=, one loss per example"
                )
        require_seen_checkpoints(self.model)
        if getattr(self.data_collator, "return_flash_attn_kwargs", None) is not None or getattr(
            self.data_collator, "padding_free", False
        ):
            raise InvalidInput(
                f"{type(self.data_collator).__name__} packs several records into one row: collate with padding"
            )

    def _make_recipe(self: Any) -> Recipe:
        """Return the recipe given, or DP-SGD's, with the draws and steps that the arguments ask for."""
        args, given = self.args, self._given
        records = self._count_units()
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        if given is None:
            steps = args.max_steps
            if steps <= 0:
                steps = math.ceil(args.num_train_epochs * math.ceil(records / batch))
            return recipes.dpsgd(batch_size=batch, steps=steps).calibrate(self._budget, records=records)
        if self._budget is not None:
            recipe: Recipe = given.calibrate(self._budget, records=records)
        else:
            recipe = given if given.records is not None else given.for_records(records)
        if args.max_steps > 0 and args.max_steps != recipe.steps:
            raise InvalidInput(f"max_steps={args.max_steps}, but the recipe has {recipe.steps} steps: leave it out")
        if args.gradient_accumulation_steps > 1 and batch != recipe.batch_size:
            raise InvalidInput(
                f"batch size x gradient_accumulation_steps x processes = {batch}, but the recipe draws "
                f"{recipe.batch_size} records on average: leave gradient_accumulation_steps out"
            )
        epochs = (recipe.steps or 0) * recipe.batch_size / records
        if args.max_steps <= 0 and args.num_train_epochs != 3.0 and abs(args.num_train_epochs - epochs) > 0.5:
            raise InvalidInput(
                f"num_train_epochs={args.num_train_epochs:g}, but the recipe has {epochs:.3g} of them: leave it out"
            )
        return recipe

    def _find_owners(self: Any) -> list[Any] | None:
        """Find each record's owner, by name, if `unit` says so; read before unused columns are removed."""
        if self._unit is None:
            return None
        return list(find_owners(self.train_dataset, self._unit, count_records(self.train_dataset)))

    def _count_units(self: Any) -> int:
        """Count the records, or the owners of records."""
        owners, records = self._find_owners(), count_records(self.train_dataset)
        return records if owners is None else int(number_owners(owners, records)[0].max()) + 1

    def _find_loss(self: Any) -> Loss:
        if self._loss is not None:
            if self.args.label_smoothing_factor:
                raise InvalidInput("label_smoothing_factor belongs to the model's own loss: put it into your loss=")
            return self._loss  # type: ignore[no-any-return]
        dtype = torch.bfloat16 if self.args.bf16 else None
        return losses.TaskLoss(self.args.label_smoothing_factor, self.args.device.type, dtype)

    def _find_records(self: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Return the dataset and how it is collated, without the columns that the model's forward does not know."""
        dataset, collate = self.train_dataset, self.data_collator
        column = self._unit if isinstance(self._unit, str) else None
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
            if column in dataset.column_names:
                dataset = dataset.remove_columns(column)
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        whole, given = AsDict(collate, without=column), self.data_collator
        if not (isinstance(given, DataCollatorForLanguageModeling) and given.mlm):
            return dataset, whole
        pad = DataCollatorForTokenClassification(given.tokenizer, pad_to_multiple_of=given.pad_to_multiple_of)
        return MaskedRecords(dataset, whole), AsDict(pad)

    # -- training -----------------------------------------------------------------------------------------------

    @property
    def folder(self: Any) -> Path:
        """Where the run's ledger is."""
        return Path(self.args.output_dir) / FOLDER

    def guarantee(self, **options: Any) -> Guarantee:
        """Return what is promised: see `sordino.Private.guarantee`."""
        if self.private is None:
            raise InvalidInput("there is no guarantee before train(): nothing was trained")
        return self.private.guarantee(**options)

    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **kwargs: Any) -> Any:
        """Train by the recipe; `resume_from_checkpoint` continues the ledger, even if a kill left no checkpoint."""
        self._require_ordinary()
        if trial is not None:
            raise InvalidInput(TRIALS)
        self._from_start = False
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._find_newest_whole()
            self._from_start = resume_from_checkpoint is None
        resumes = self._from_start or resume_from_checkpoint is not None
        if self.private is not None and not (resumes and self.private.run.folder == self.folder):
            raise InvalidInput(
                "this trainer has trained already, and its guarantee is about that alone: make a new one, with "
                "options={'ledger': Ledger.open(...)} to continue on the same records"
            )
        return super().train(resume_from_checkpoint, trial, *more, **kwargs)  # type: ignore[misc]

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refuse: the price of one run does not cover a choice among many private runs."""
        raise InvalidInput(TRIALS)

    def _find_newest_whole(self: Any) -> str | None:
        """Return the newest complete checkpoint; None if a kill left only the ledger."""
        found = {
            path.name.removeprefix("checkpoint-"): path for path in Path(self.args.output_dir).glob("checkpoint-*")
        }
        whole = {int(step): path for step, path in found.items() if step.isdecimal() and _is_whole(path)}
        if whole:
            return str(whole[max(whole)])
        if (self.folder / books.LEDGER).exists():
            return None
        raise InvalidInput(
            f"{self.args.output_dir} holds no run to resume: call train() without resume_from_checkpoint"
        )

    def _begin(self: Any, checkpoint: str | None) -> Private:
        """Bind the recipe to the model and to the optimizer that the arguments name, and open its ledger."""
        if self.private is not None:
            self.private.close()
        recipe: Recipe = self.recipe
        resumes = checkpoint is not None or self._from_start
        if not resumes:
            books.require_fresh(self.folder)
        self.create_optimizer()
        require_held(self.model, self.optimizer)
        self.create_scheduler(num_training_steps=recipe.steps)
        if checkpoint is not None:
            self._load_optimizer_and_scheduler(checkpoint)
        dataset, collate = self._find_records()
        if self._loss is None:
            losses.require_own(self.model, self._prepare_inputs(collate([dataset[0]])))
        self.model.train()
        with plain_forward(self.model):
            private = Private(
                self.model,
                self.optimizer,
                dataset,
                self._find_loss(),
                recipe,
                collate=collate,
                unit=self._find_owners(),
                run=None if resumes else self.folder,
                **{"microbatch": self.args.per_device_train_batch_size, **self._options},
            )
        try:
            if resumes:
                private.load_position(self.folder, checkpoint)
            private.attach(self.lr_scheduler)
        except BaseException:
            private.close()
            raise
        self.private = private
        if self.eval_dataset is not None:
            self._declare_held_out()
        return private

    def _inner_training_loop(
        self: Any,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        private = self._begin(resume_from_checkpoint)
        recipe, args = private.bench.recipe, self.args
        per_epoch = math.ceil((recipe.records or 1) / recipe.batch_size)
        epochs = math.ceil(private.total / per_epoch)
        self._init_training_state(private.total, per_epoch, epochs, resume_from_checkpoint, trial)
        if self.state.global_step != private.position:
            raise CheckpointError(
                f"{resume_from_checkpoint} is at step {self.state.global_step}, its private position at "
                f"{private.position}: they do not belong together"
            )
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = None
        start = time.time()
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=args.device), 0.0  # and stay so
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self._initial_num_input_tokens_seen, self._rate = 0, self._get_learning_rate()

        def conclude(epoch: int) -> None:
            """Do what the Trainer does after a step and after an epoch: log, evaluate, save."""
            self._maybe_log_save_evaluate(
                self._tr_loss, None, self.model, trial, epoch, ignore_keys_for_eval, start, self._rate
            )

        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in range(private.position // per_epoch, epochs):
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self._take_epoch(private, per_epoch, epoch, conclude)
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            conclude(epoch)
            if self.control.should_training_stop:
                break
        done = self._finalize_training(trial, private.total * recipe.batch_size, start)
        return TrainOutput(done.global_step, math.nan, {"epoch": self.state.epoch, **_drop_private(done.metrics)})

    def _take_epoch(self: Any, private: Private, per_epoch: int, epoch: int, conclude: Callable[[int], None]) -> None:
        """Take the steps up to the end of an epoch, with the Trainer's callbacks around each."""
        call = self.callback_handler
        while private.position < min((epoch + 1) * per_epoch, private.total):
            self.control = call.on_step_begin(self.args, self.state, self.control)
            if not self._step(private):
                self.control.should_training_stop = True
                return
            if private.position == self.state.global_step:
                continue  # the recipe rejected its proposal: the step is taken again
            self.control = call.on_optimizer_step(self.args, self.state, self.control)
            self.state.global_step, self.state.epoch = private.position, private.position / per_epoch
            self.control = call.on_step_end(self.args, self.state, self.control)
            conclude(epoch)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                return

    def _step(self: Any, private: Private) -> bool:
        """Take one private step and watch the first one; return whether the budget could pay for it."""
        self.model.train()
        self._rate = self._get_learning_rate()
        require_held(self.model, self.optimizer)
        first = private.position == self._initial_global_step
        watch = watch_first_step(self.model, self.optimizer) if first else nullcontext()
        try:
            with plain_forward(self.model), watch:
                private.step()
        except BudgetExhausted:  # after a kill: lost work stays paid for
            return False
        return True

    # -- what is shown and saved --------------------------------------------------------------------------------

    def log(self: Any, logs: dict[str, float], *more: Any, **kwargs: Any) -> None:
        """Log only what is public: nothing computed directly from the training batches."""
        if kept := _drop_private(logs):
            super().log(kept, *more, **kwargs)  # type: ignore[misc]

    def evaluate(self: Any, eval_dataset: Any = None, *more: Any, **kwargs: Any) -> Any:
        """Evaluate on held-out records, which are not protected; never on training records."""
        require_apart(self.train_dataset, eval_dataset)
        self._declare_held_out()
        return super().evaluate(eval_dataset, *more, **kwargs)  # type: ignore[misc]

    def predict(self: Any, test_dataset: Any, *more: Any, **kwargs: Any) -> Any:
        """Predict for records outside training: metrics on training records would be published without noise."""
        require_apart(self.train_dataset, test_dataset)
        self._declare_held_out()
        return super().predict(test_dataset, *more, **kwargs)  # type: ignore[misc]

    def _declare_held_out(self: Any) -> None:
        private: Private | None = self.private
        if private is not None and HELD_OUT not in private.run.ledger.declared(UNPROTECTED):
            private.declare(UNPROTECTED, HELD_OUT)

    def _save_rng_state(self: Any, output_dir: str) -> None:
        """Store the position in the ledger instead: the state of generators would reveal the sizes of draws."""
        assert self.private is not None
        self.private.save_position(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """There is none, and no draw or noise is ever replayed."""

    def create_model_card(self: Any, *arguments: Any, **settings: Any) -> None:
        """Create the Trainer's card, with the guarantee."""
        super().create_model_card(*arguments, **settings)  # type: ignore[misc]
        card = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero() and card.exists():
            text = card.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
            card.write_text(f"{text}\n\n{HEADING}\n{self._describe()}\n", encoding="utf-8")

    def _describe(self: Any) -> str:
        """Write the guarantee for a model card."""
        if self.private is None:
            return "This model was not trained by this trainer: nothing is promised."
        recipe: Recipe = self.private.bench.recipe
        return (
            f"Trained with [differential privacy]({ABOUT}) by Sordino: recipe `{recipe.name}`, {recipe.steps} steps, "
            f"{recipe.batch_size} records per step on average, clipping bound {recipe.clip:g}, noise multiplier "
            f"{recipe.noise_multiplier:.4g}.\n\n```text\n{self.guarantee()}\n```\n\nThe ledger of every release is "
            f"`{FOLDER}/{books.LEDGER}`; `sordino verify` checks it."
        )


class PrivateTrainer(PrivateLoop, Trainer):
    """`transformers.Trainer` with private steps: give it `budget=` or `recipe=`; the rest is as usual."""


class PrivateSeq2SeqTrainer(PrivateLoop, Seq2SeqTrainer):
    """The same for `transformers.Seq2SeqTrainer`, which evaluates by generating."""

    ordinary: ClassVar[type] = Seq2SeqTrainer
    more_meanings: ClassVar[Mapping[str, Meaning]] = OF_SEQ2SEQ


HEADING = "## Privacy\n"
ABOUT = "https://en.wikipedia.org/wiki/Differential_privacy"
TRIALS = "trials on private records cost privacy too, and no price covers their choice: fix hyperparameters in advance"


def _drop_private(logs: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if name not in PRIVATE}


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: the Trainer's state comes last, after the private position."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(checkpoint.glob(books.CHECKPOINTS))
