"""What each of transformers' `TrainingArguments` means in private training: accepted, changed or refused, and why.

`MEANINGS` is the whole table: the documentation shows it, a test compares it with the installed version, and
`require_private` uses it to refuse arguments before anything is spent. An unknown field is refused unless it has its
default value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

from sordino.errors import InvalidInput

Verdict = Literal["accepted", "changed", "refused"]


@dataclass(frozen=True)
class Meaning:
    """What becomes of an argument. A `refused` one may still have values that are `fine`: those without effect."""

    verdict: Verdict
    why: str
    fine: Callable[[Any], bool] = lambda value: True


def _off(value: Any) -> bool:
    """Whether a switch is off, in any spelling."""
    return value in (None, False, "", "no", "none", [], {})


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: str(getattr(value, "value", value)) in values


def _accept(why: str, *names: str) -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("accepted", why))


def _change(why: str, *names: str) -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("changed", why))


def _refuse(why: str, *names: str, fine: Callable[[Any], bool] = _off) -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("refused", why, fine))


def keeps_parameters(settings: Mapping[str, Any]) -> bool:
    """Whether autograd sees the parameters inside checkpoints with these settings."""
    return set(settings) <= {"use_reentrant", "every_n_layers"} and not settings.get("use_reentrant", False)


OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""The optimizers that take one gradient per step and are tested here."""

AS_USUAL = "as usual"
PUBLIC = "as usual: a function of the released gradients"
HELD_OUT = "as usual, on held-out records, which the guarantee names as unprotected"
EVALUATION = "evaluation only: training draws its own batches"
NO_WRAPPER = "no effect: the model is not wrapped, and the processes add up clipped sums"

MEANINGS: dict[str, Meaning] = {
    # what is drawn, and for how long
    **_change(
        "it also holds the ledger, in `sordino/`; without the ledger, no ε can be stated for a checkpoint", "output_dir"
    ),
    **_change(
        "how many examples are differentiated at once. Times accumulation and processes it is the *expected* size of a "
        "draw: every record joins by its own coin toss",
        "per_device_train_batch_size",
    ),
    **_change(
        "more microbatches of one draw, which is clipped per example and noised once", "gradient_accumulation_steps"
    ),
    **_change(
        "sets the number of steps, and so the noise; must not contradict a recipe",
        "num_train_epochs",
        "max_steps",
    ),
    **_refuse(
        "lengths or order decide who shares a batch; the guarantee needs a coin per record",
        "train_sampling_strategy",
        fine=_one_of("random"),
    ),
    **_change("no effect: nothing is grouped by length", "length_column_name"),
    **_refuse("a smaller batch after a failure would be a second run on the same budget", "auto_find_batch_size"),
    **_change(EVALUATION, "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    **_change(EVALUATION, "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
    **_change(EVALUATION, "dataloader_multiprocessing_context"),
    **_change("as usual; the column that names the unit is read first", "remove_unused_columns"),
    **_accept("as usual, for evaluation; training reads `labels`, or the two positions of an answer", "label_names"),
    # how the model moves
    **_accept(PUBLIC, "learning_rate", "lr_scheduler_kwargs", "warmup_steps", "optim_args", "weight_decay"),
    **_accept(PUBLIC, "adam_beta1", "adam_beta2", "adam_epsilon"),
    "lr_scheduler_type": Meaning(
        "changed",
        "as usual, once per proposal; schedulers that follow a loss (`reduce_lr_on_plateau`, `greedy`) are refused",
        lambda value: not _one_of("reduce_lr_on_plateau", "greedy")(value),
    ),
    "optim": Meaning(
        "changed",
        f"{', '.join(f'`{name}`' for name in OPTIMIZERS)}; others are refused: some take their step "
        "inside the backward pass, before there is noise",
        _one_of(*OPTIMIZERS),
    ),
    **_refuse("GaLore and similar methods project gradients before the noise is added", "optim_target_modules"),
    **_refuse(
        "it clips the noisy sum, not each example: privacy comes from `clip` of the recipe (1.0 unless you say "
        "otherwise). The default 1.0 and 0 are ignored",
        "max_grad_norm",
        fine=lambda value: value in (None, 0, 1.0),
    ),
    **_accept(
        "exact: applied to each example's own tokens or class; refused for regression and spans",
        "label_smoothing_factor",
    ),
    **_change("no effect: a token counts within its own example", "average_tokens_across_devices"),
    **_refuse("its noise depends on the longest text of the batch, and so on other examples", "neftune_noise_alpha"),
    **_refuse("its fused losses are means over the batch", "use_liger_kernel", "liger_kernel_config"),
    **_change("no effect: keys are never kept in training", "use_cache"),
    # precision and memory
    **_accept("autocast without loss scaling; norms, sums and noise stay in float32", "bf16"),
    **_refuse("float16 needs loss scaling, which changes what is clipped: use `bf16`", "fp16"),
    **_accept("as usual, for evaluation only", "bf16_full_eval", "fp16_full_eval"),
    **_change("for the model; norms and sums are taken in full float32", "tf32"),
    **_accept(
        "exact: parts of the model are run a second time, and each example's gradient is the same",
        "activation_checkpointing",
        "gradient_checkpointing",
    ),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        Meaning(
            "changed",
            "`every_n_layers` as usual. `use_reentrant=True` hides parameters from autograd, so no gradient per "
            "example can be found: leave it out, or set it to False. Other keys are refused, because they are not "
            "tested here",
            lambda value: not value or keeps_parameters(value),
        ),
    ),
    **_refuse(
        "per-example norms are found by watching the model's operations, which a compiled graph hides",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
    ),
    **_change("no effect", "torch_empty_cache_steps"),
    # what is shown
    **_change(
        "steps, learning rate, evaluation. The loss of training batches, their gradients' norm and counts of "
        "operations are private: they are never computed for a log",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
    ),
    **_change("no effect: no training loss is logged", "logging_nan_inf_filter"),
    **_refuse("the number of tokens seen reveals the sizes of draws", "include_num_input_tokens_seen"),
    **_accept(AS_USUAL, "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "run_name", "project"),
    **_accept("as usual, with the contents described under `logging_strategy`", "report_to"),
    **_accept(AS_USUAL, "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    **_refuse(
        "peak memory reveals the size of the largest draw", "skip_memory_metrics", fine=lambda value: value is True
    ),
    **_refuse("it prints activations of private records", "debug"),
    # evaluation
    **_accept(HELD_OUT, "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "do_eval", "do_predict"),
    **_accept(AS_USUAL, "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches"),
    **_accept(
        AS_USUAL, "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"
    ),
    **_accept(
        "as usual, by held-out records: the guarantee covers the whole plan, whichever model is chosen",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    # saving and resuming
    **_change(
        "as usual; a checkpoint also holds its position in the ledger, but no state of random generators, which would "
        "reveal the sizes of draws",
        "save_strategy",
        "save_steps",
    ),
    **_accept("as usual; such a checkpoint cannot be resumed", "save_only_model"),
    **_accept(AS_USUAL, "save_on_each_node", "save_total_limit"),
    **_refuse("not tested here", "enable_jit_checkpoint"),
    **_change(
        "`train(resume_from_checkpoint=...)` reopens the ledger: what was charged stays charged",
        "resume_from_checkpoint",
    ),
    **_change("no effect: a resumed run makes fresh draws and replays none", "ignore_data_skip"),
    **_accept(AS_USUAL, "restore_callback_states_from_checkpoint", "do_train"),
    **_accept("as usual; the model card states the guarantee", "push_to_hub", "hub_strategy"),
    **_accept(AS_USUAL, "hub_token", "hub_private_repo", "hub_model_id", "hub_always_push", "hub_revision"),
    # randomness and machines
    **_change(
        "only initial weights and dropout, never noise or draws: those come from the operating system",
        "seed",
        "full_determinism",
    ),
    **_change("no effect: draws are secret", "data_seed"),
    **_accept(AS_USUAL, "use_cpu", "ddp_backend", "ddp_timeout", "local_rank"),
    **_change(
        NO_WRAPPER, "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"
    ),
    **_change("no effect on training, which needs no prepared loader", "accelerator_config"),
    **_refuse("shards of one example's tokens are not tested here", "parallelism_config"),
    **_refuse(
        "not tested through Trainer: shard the model yourself and use `sordino.Private` under `torchrun`",
        "fsdp",
        "fsdp_config",
        fine=lambda value: _off(value) or not value or (isinstance(value, Mapping) and not any(value.values())),
    ),
    **_refuse("it owns the backward pass and the optimizer, so no gradient can be clipped per example", "deepspeed"),
}

OF_SEQ2SEQ: dict[str, Meaning] = {
    **_accept(
        "as usual, for evaluation only",
        "predict_with_generate",
        "generation_max_length",
        "generation_num_beams",
        "generation_config",
    ),
    **_refuse("lengths decide who shares a batch; the guarantee needs a coin per record", "sortish_sampler"),
}
"""The arguments that transformers' `Seq2SeqTrainingArguments` adds."""

OF_SFT: dict[str, Meaning] = {
    **_accept(AS_USUAL, "model_init_kwargs", "trust_remote_code", "chat_template_path", "dataset_text_field"),
    **_accept(AS_USUAL, "dataset_kwargs", "dataset_num_proc", "eos_token", "pad_token", "pad_to_multiple_of"),
    **_change("a longer text is cut, never split into several records", "max_length", "truncation_mode"),
    **_change("no effect: every record joins by a coin", "shuffle_dataset"),
    **_refuse(
        "several records would share a row, or one record several rows: neither is a unit",
        "packing",
        "packing_strategy",
    ),
    **_refuse("a row with several records has no loss for each record", "padding_free"),
    **_accept("as usual: held-out records are not protected", "eval_packing"),
    **_accept("as usual, in the labels", "completion_only_loss", "assistant_only_loss"),
    **_refuse("only the mean over each record's own tokens, `nll`, is exact", "loss_type", fine=_one_of("nll")),
    **_refuse(
        "a router's balance is a loss over all examples", "router_aux_loss_coef", fine=lambda value: value in (None, 0)
    ),
    **_refuse("not tested here", "activation_offloading"),
}
"""The arguments that TRL's `SFTConfig` adds."""
OF_SFT["packing_strategy"] = Meaning("changed", "no effect: nothing is packed")


def require_private(arguments: Any, more: Mapping[str, Meaning] | None = None) -> None:
    """Refuse arguments under which the guarantee would not hold, or which would be silently ignored."""
    known = {**MEANINGS, **(more or {})}
    for each in fields(arguments):
        value, meaning = getattr(arguments, each.name), known.get(each.name)
        if meaning is None:
            meaning = Meaning("refused", "this version of Sordino does not know it", _is_default(each))
        if not meaning.fine(value):
            shown = getattr(value, "value", value)
            raise InvalidInput(f"{each.name}={shown!r} is refused for private training: {meaning.why}")
    if getattr(arguments, "n_gpu", 0) > 1:
        raise InvalidInput(
            f"{arguments.n_gpu} GPUs in one process would be DataParallel: start one process for each with torchrun"
        )


def _is_default(each: Field[Any]) -> Callable[[Any], bool]:
    if each.default is not MISSING:
        return lambda value: value == each.default
    return lambda value: each.default_factory is not MISSING and value == each.default_factory()
