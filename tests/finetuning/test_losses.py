"""Per-example losses equal the model's own loss on every example by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino import InvalidInput, SordinoError
from sordino.errors import UnsupportedModel

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'sordino[finetuning]'"
)
from sordino.finetuning.losses import find_task, loss, require_own  # noqa: E402

B, T, V = 5, 9, 31
Batch = dict[str, Tensor]


def gpt2(kind: str, **settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=8,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return getattr(transformers, f"GPT2{kind}")(config)


def llama(kind: str, **settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        **settings,
    )
    return getattr(transformers, f"Llama{kind}")(config)


def bert(kind: str, **settings: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        **settings,
    )
    return getattr(transformers, f"Bert{kind}")(config)


def t5(kind: str, **settings: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0, **settings
    )
    return getattr(transformers, f"T5{kind}")(config)


def texts() -> Batch:
    """Rows of different lengths, padded on the right."""
    torch.manual_seed(3)
    ids = torch.randint(3, V, (B, T))
    mask = (torch.arange(T) < torch.tensor([9, 4, 6, 3, 8])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_text_as_labels() -> Batch:
    batch = texts()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def with_a_prompt() -> Batch:
    batch = with_text_as_labels()
    batch["labels"][:, :2] = -100
    return batch


def with_some_masked() -> Batch:
    batch = with_text_as_labels()
    hidden = torch.arange(T) % 3 != 0
    return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}


def with_answers() -> Batch:
    labels = torch.randint(3, V, (B, 6))
    return {**texts(), "labels": labels.masked_fill(torch.arange(6) >= torch.tensor([6, 3, 1, 5, 2])[:, None], -100)}


def with_classes() -> Batch:
    return {**texts(), "labels": torch.tensor([0, 2, 1, 1, 0])}


def with_numbers() -> Batch:
    return {**texts(), "labels": torch.tensor([0.3, -2.0, 1.0, 4.0, 0.0])}


def with_columns_of_numbers() -> Batch:
    return {**texts(), "labels": torch.randn(B, 3)}


def with_several_labels() -> Batch:
    return {**texts(), "labels": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]).float()}


def with_token_classes() -> Batch:
    batch = texts()
    return {**batch, "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)}


def with_spans() -> Batch:
    return {**texts(), "start_positions": torch.tensor([0, 1, 2, 0, 3]), "end_positions": torch.tensor([1, 3, 5, 1, 7])}


def with_choices() -> Batch:
    batch = texts()
    return {**{name: x[:, None].repeat(1, 2, 1) for name, x in batch.items()}, "labels": torch.tensor([0, 1, 1, 0, 1])}


CASES: dict[str, tuple[Callable[..., nn.Module], str, dict[str, Any], Callable[[], Batch]]] = {
    "gpt2, tied": (gpt2, "LMHeadModel", {}, with_text_as_labels),
    "gpt2, a prompt": (gpt2, "LMHeadModel", {}, with_a_prompt),
    "gpt2, classes": (gpt2, "ForSequenceClassification", {"num_labels": 3}, with_classes),
    "llama": (llama, "ForCausalLM", {}, with_a_prompt),
    "llama, classes": (llama, "ForSequenceClassification", {"num_labels": 3}, with_classes),
    "bert, classes": (bert, "ForSequenceClassification", {"num_labels": 3}, with_classes),
    "bert, regression": (bert, "ForSequenceClassification", {"num_labels": 1}, with_numbers),
    "bert, regression of three": (
        bert,
        "ForSequenceClassification",
        {"num_labels": 3, "problem_type": "regression"},
        with_columns_of_numbers,
    ),
    "bert, several labels": (bert, "ForSequenceClassification", {"num_labels": 3}, with_several_labels),
    "bert, masked": (bert, "ForMaskedLM", {}, with_some_masked),
    "bert, causal": (bert, "LMHeadModel", {"is_decoder": True}, with_text_as_labels),
    "bert, tokens": (bert, "ForTokenClassification", {"num_labels": 3}, with_token_classes),
    "bert, span": (bert, "ForQuestionAnswering", {}, with_spans),
    "bert, choice": (bert, "ForMultipleChoice", {}, with_choices),
    "t5": (t5, "ForConditionalGeneration", {}, with_answers),
    "t5, classes": (t5, "ForSequenceClassification", {"num_labels": 3, "eos_token_id": 1}, with_classes),
}


def make(case: str) -> tuple[nn.Module, Batch]:
    build, kind, settings, batch = CASES[case]
    torch.manual_seed(1)
    model, data = build(kind, **settings).eval(), batch()
    if case == "t5, classes":  # T5 reads the last end-of-text
        data["input_ids"][:, 0] = 1
    return model, data


def single(batch: Batch, i: int) -> Batch:
    return {name: x[i : i + 1] for name, x in batch.items()}


@pytest.mark.parametrize("case", CASES)
def test_each_loss_is_the_models_own_on_that_example_alone(case: str) -> None:
    model, batch = make(case)
    losses = loss(model, batch)
    assert losses.shape == (B,)
    own = torch.stack([model(**single(batch, i)).loss for i in range(B)])
    torch.testing.assert_close(losses, own, rtol=1e-5, atol=1e-6)
    require_own(model, single(batch, 1))


@pytest.mark.parametrize("case", ["gpt2, tied", "llama", "bert, masked", "t5", "bert, tokens", "bert, several labels"])
def test_so_are_the_gradients(case: str) -> None:
    model, batch = make(case)
    ours = torch.autograd.grad(loss(model, batch)[1], list(model.parameters()), allow_unused=True)
    own = torch.autograd.grad(model(**single(batch, 1)).loss, list(model.parameters()), allow_unused=True)
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_mean_over_all_tokens_of_the_batch_would_be_another_loss() -> None:
    """What the model's own loss on the batch is: long texts weigh more, and each depends on its neighbours."""
    model, batch = make("gpt2, tied")
    assert abs(float((model(**batch).loss - loss(model, batch).mean()).detach())) > 1e-4


@pytest.mark.parametrize("case", ["gpt2, a prompt", "bert, masked", "t5", "bert, tokens", "bert, classes"])
def test_label_smoothing_is_the_trainers_on_every_example(case: str) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, batch = make(case)
    smoother = LabelSmoother(epsilon=0.2)
    shift = case.startswith("gpt2")
    own = [smoother(model(**(one := single(batch, i))), one["labels"], shift_labels=shift) for i in range(B)]
    torch.testing.assert_close(loss(model, batch, 0.2), torch.stack(own), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["bert, regression", "bert, several labels", "bert, span", "bert, choice"])
def test_label_smoothing_without_a_meaning_is_refused(case: str) -> None:
    model, batch = make(case)
    with pytest.raises(InvalidInput, match="no exact meaning"):
        loss(model, batch, 0.1)


def test_an_example_without_labelled_tokens_has_no_loss_and_no_gradient() -> None:
    model, batch = make("gpt2, tied")
    batch["labels"][2] = -100
    losses = loss(model, batch)
    assert float(losses[2]) == 0
    assert all(not bool(g.any()) for g in torch.autograd.grad(losses[2], list(model.parameters())))
    assert float(losses[1]) > 0
    require_own(model, single(batch, 2))


def test_the_configuration_is_left_as_it_is() -> None:
    model, batch = make("bert, several labels")
    loss(model, batch)
    assert model.config.problem_type is None  # type: ignore[union-attr]


def test_bf16_losses_are_taken_in_float32() -> None:
    model, batch = make("llama")
    losses = loss(model.to(torch.bfloat16), batch)
    assert losses.dtype == torch.float32
    own = torch.stack([model(**single(batch, i)).loss for i in range(B)])
    torch.testing.assert_close(losses, own.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "lora"])
def test_adapters_have_the_loss_of_their_own_forward_pass(kind: str) -> None:
    peft = pytest.importorskip("peft")
    make_config = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2),
    }[kind]
    model, batch = make("gpt2, a prompt")
    adapted = peft.get_peft_model(model, make_config()).eval()
    own = torch.stack([adapted(**single(batch, i)).loss for i in range(B)])
    torch.testing.assert_close(loss(adapted, batch), own, rtol=1e-5, atol=1e-6)
    assert find_task(adapted) == "causal language model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "no labels"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "packed"),
        ({"num_items_in_batch": torch.tensor(7)}, "num_items_in_batch"),
    ],
)
def test_batches_that_mix_or_lack_labels_are_refused(change: dict[str, Any], message: str) -> None:
    model, batch = make("gpt2, tied")
    with pytest.raises(InvalidInput, match=message):
        loss(model, {**batch, **change})


def test_models_without_a_known_task_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no config"):
        loss(nn.Linear(2, 2), {})
    with pytest.raises(UnsupportedModel, match="names no task"):
        loss(bert("ForPreTraining"), with_text_as_labels())
    model, batch = make("llama")
    model.loss_function = lambda *_, **__: torch.zeros(())  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="its own loss_function"):
        loss(model, batch)


def test_a_loss_with_terms_of_its_own_is_found() -> None:
    class Penalised(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **inputs: Any) -> Any:
            output = super().forward(*args, **inputs)
            if output.loss is not None:
                output.loss = output.loss + 0.5
            return output

    Penalised.__name__ = "PenalisedForCausalLM"
    model = Penalised(llama("ForCausalLM").config)
    with pytest.raises(UnsupportedModel, match="not that of its task alone"):
        require_own(model, single(with_text_as_labels(), 0))


def test_a_routers_balance_over_the_batch_is_refused() -> None:
    model, batch = make("llama")
    model.config.output_router_logits = True  # type: ignore[union-attr]
    with pytest.raises(SordinoError, match="output_router_logits"):
        loss(model, batch)
