"""One loss per example, from any Hugging Face model and a batch of its inputs and labels.

A model's own ``output.loss`` is a mean over the batch: of examples, or of all their labelled tokens together. Neither
can be clipped per example, and in the second a record's weight depends on the lengths of its neighbours. `loss` gives
a vector instead, by the task that the model's class names::

    loss(model, batch)[i] == model(**batch_of_example_i_alone).loss

so that a token weighs one over the number of *its own example's* labelled tokens. An example without any labelled
token has loss 0 and no gradient, where the model's own loss would be 0/0.

Nothing here imports transformers: a model is known by its class name and its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, pad

from sordino.errors import InvalidInput, UnsupportedModel

IGNORED = -100
"""The label of a token that has no loss: padding, a prompt, or a token that was not masked."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lens", "packed_seq_lens")
"""Inputs by which several texts share one row."""

Head = Callable[[Any, Any, Mapping[str, Tensor], float], Tensor]
"""Losses from a configuration, the model's output, the batch's labels and the label smoothing."""


def loss(model: nn.Module, batch: Mapping[str, Any], label_smoothing: float = 0.0) -> Tensor:
    """One loss per example of `batch`: the inputs and labels that the model's own `forward` takes.

    `model` may be wrapped by PEFT, by a data-parallel module or by ``torch.compile``. `label_smoothing` is that of
    transformers' Trainer, applied to each example separately; tasks without classes refuse it.
    """
    base = unwrap(model)
    task = find_task(base)
    wanted = LABELS.get(task, ("labels",))
    labels = {name: batch[name] for name in wanted if batch.get(name) is not None}
    _check(base, task, batch, labels, wanted, label_smoothing)
    inputs = {name: value for name, value in batch.items() if name not in wanted}
    if task == "seq2seq" and not {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys():
        inputs["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(labels=labels["labels"])
    if task in ("causal language model", "seq2seq"):
        inputs.setdefault("use_cache", False)  # nothing is generated, so the keys of all layers would waste memory
    output = model(**inputs)
    return HEADS[task](base.config, output, labels, label_smoothing)


@dataclass(frozen=True)
class TaskLoss:
    """The per-example loss of a model's own task, under autocast if there is a `dtype`."""

    label_smoothing: float = 0.0
    device: str = "cpu"
    dtype: torch.dtype | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None):
            return loss(model, batch, self.label_smoothing)


def unwrap(model: nn.Module) -> Any:
    """Return the Hugging Face model inside a wrapper of PEFT, of data parallelism or of ``torch.compile``."""
    while True:
        peft, wrapped = getattr(model, "get_base_model", None), "module" if not hasattr(model, "config") else ""
        inner = peft() if callable(peft) else getattr(model, "_orig_mod", getattr(model, wrapped, None))
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_task(model: nn.Module) -> str:
    """Find what the model is trained for by the name of its class; refuse a class whose loss is not known."""
    base = unwrap(model)
    name, config = type(base).__name__, getattr(base, "config", None)
    if config is None:
        raise UnsupportedModel(f"{name} has no config: it is not a Hugging Face model; write loss(model, batch)")
    if hasattr(base, "_loss_function"):
        raise UnsupportedModel(f"{name} has its own loss_function: write loss(model, batch) for it")
    for ending, task in TASKS.items():
        if name.endswith(ending):
            encodes_and_decodes = getattr(config, "is_encoder_decoder", False)
            return "seq2seq" if task == "causal language model" and encodes_and_decodes else task
    known = ", ".join(f"*{ending}" for ending in TASKS)
    raise UnsupportedModel(f"{name} names no task with a known per-example loss ({known}): write loss(model, batch)")


def require_own(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Compare `loss` with the model's own ``output.loss`` on one example, without dropout; refuse if they differ.

    A class may add terms that no other has (a router's balance, a penalty on logits). `batch` holds one example.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            own, ours = model(**batch).loss, loss(model, batch)
    finally:
        for module, training in modes:
            module.training = training
    if own is None:
        raise UnsupportedModel(f"{type(unwrap(model)).__name__} gives no loss for these labels: check their names")
    same = torch.allclose(own.float(), ours[0].float(), rtol=2e-2, atol=1e-3)
    if not same and torch.isfinite(own):  # an example without labelled tokens: theirs is 0/0
        raise UnsupportedModel(
            f"the loss of {type(unwrap(model)).__name__} is not that of its task alone: write loss(model, batch) for it"
        )


def _check(
    base: Any,
    task: str,
    batch: Mapping[str, Any],
    labels: Mapping[str, Tensor],
    wanted: tuple[str, ...],
    label_smoothing: float,
) -> None:
    """Refuse anything that would mix examples, or that cannot be taken apart by example."""
    if missing := [name for name in wanted if name not in labels]:
        raise InvalidInput(
            f"the batch has no {' and no '.join(missing)}: a {task} is trained on {' and '.join(wanted)}"
        )
    if packed := [name for name in PACKED if batch.get(name) is not None]:
        raise InvalidInput(f"the batch is packed ({packed[0]}): several records share one row; collate with padding")
    if batch.get("num_items_in_batch") is not None:
        raise InvalidInput("num_items_in_batch divides by what the whole batch holds: leave it out")
    if getattr(base.config, "output_router_logits", False):
        raise UnsupportedModel(
            "output_router_logits=True adds a router's loss over all examples: set config.output_router_logits=False"
        )
    if not 0 <= label_smoothing < 1:
        raise InvalidInput(f"label_smoothing={label_smoothing} must be >= 0 and < 1")
    if label_smoothing and task in UNSMOOTHED:
        raise InvalidInput(f"label_smoothing={label_smoothing} has no exact meaning for a {task}: set it to 0")


# -- one head per task ------------------------------------------------------------------------------------------------


def _mean_of_tokens(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return each example's mean loss over its own labelled tokens, from logits [B, T, V] and labels [B, T]."""
    if logits.shape[:2] != labels.shape:
        raise InvalidInput(
            "logits and labels have different lengths: a token classifier or masked model takes one label per token"
        )
    each = cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
    )
    return each.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _tokens(config: Any, output: Any, labels: Mapping[str, Tensor], smoothing: float) -> Tensor:
    return _mean_of_tokens(output.logits, labels["labels"], smoothing)


def _next_tokens(config: Any, output: Any, labels: Mapping[str, Tensor], smoothing: float) -> Tensor:
    """Position t predicts token t + 1. Prompt tuning puts its own tokens before the text, which have no labels."""
    logits, wanted = output.logits, labels["labels"]
    if (virtual := logits.shape[1] - wanted.shape[1]) > 0:
        wanted = pad(wanted, (virtual, 0), value=IGNORED)
    return _mean_of_tokens(logits[:, :-1], wanted[:, 1:], smoothing)


def _classes(config: Any, output: Any, labels: Mapping[str, Tensor], smoothing: float) -> Tensor:
    """One class of several, several labels at once, or numbers: by `problem_type`, or by the labels if it is None.

    This only reads the configuration, whereas the model's own forward pass writes into it what it inferred.
    """
    logits, wanted = output.logits.float(), labels["labels"]
    kind = getattr(config, "problem_type", None)
    if kind is None:
        whole = wanted.dtype in (torch.long, torch.int)
        many = "single_label_classification" if whole else "multi_label_classification"
        kind = "regression" if config.num_labels == 1 else many
    if kind == "single_label_classification":
        return cross_entropy(logits, wanted.view(-1), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
    if smoothing:
        raise InvalidInput(f"label_smoothing={smoothing} has no exact meaning for problem_type={kind!r}: set it to 0")
    measure = mse_loss if kind == "regression" else binary_cross_entropy_with_logits
    return measure(logits, wanted.reshape(logits.shape).to(logits.dtype), reduction="none").mean(1)


def _choices(config: Any, output: Any, labels: Mapping[str, Tensor], smoothing: float) -> Tensor:
    return cross_entropy(output.logits.float(), labels["labels"].view(-1), reduction="none")


def _span(config: Any, output: Any, labels: Mapping[str, Tensor], smoothing: float) -> Tensor:
    """Return the mean of the losses of start and end; a position beyond the text counts as missing."""
    total: Any = 0.0
    for name in ("start", "end"):
        logits = getattr(output, f"{name}_logits").float()
        beyond = logits.shape[1]
        position = labels[f"{name}_positions"].reshape(-1).clamp(0, beyond)
        total = total + cross_entropy(logits, position, ignore_index=beyond, reduction="none")
    losses: Tensor = total / 2
    return losses


TASKS = {
    "ForCausalLM": "causal language model",
    "GPT2LMHeadModel": "causal language model",  # by name: XLM and XLNet have the same ending and shift nothing
    "OpenAIGPTLMHeadModel": "causal language model",
    "BertLMHeadModel": "causal language model",
    "ForConditionalGeneration": "causal language model",
    "ForMaskedLM": "masked language model",
    "ForTokenClassification": "token classifier",
    "ForSequenceClassification": "classifier",
    "ForImageClassification": "classifier",
    "ForAudioClassification": "classifier",
    "ForVideoClassification": "classifier",
    "ForMultipleChoice": "chooser",
    "ForQuestionAnswering": "question answerer",
}
"""Tasks by the ending of a class name; a language model whose configuration is an encoder-decoder's is seq2seq."""

LABELS = {"question answerer": ("start_positions", "end_positions")}
"""The inputs that take the place of `labels`."""

UNSMOOTHED = ("chooser", "question answerer")

HEADS: dict[str, Head] = {
    "causal language model": _next_tokens,
    "seq2seq": _tokens,
    "masked language model": _tokens,
    "token classifier": _tokens,
    "classifier": _classes,
    "chooser": _choices,
    "question answerer": _span,
}
