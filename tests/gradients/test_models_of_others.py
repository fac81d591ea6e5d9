"""Models that nobody here wrote, built from their configurations: exact, and without an extra backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.proof import Probe
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.looped import Looped

transformers = pytest.importorskip("transformers", reason="models of others come from transformers (bench extra)")

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 60}
FEW_KEYS = {**WIDE, "num_key_value_heads": 1}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
Data = dict[str, Tensor]
Loss = Callable[[nn.Module, Data], Tensor]


def texts(size: int, length: int = 6) -> Data:
    """Tokens with padding: no two examples are equally long."""
    tokens = torch.randint(5, 60, (size, length))
    seen = (torch.arange(length) < length - torch.arange(size).unsqueeze(1) % 4).long()
    return {"input_ids": tokens * seen, "attention_mask": seen, "labels": torch.randint(2, (size,))}


def images(size: int) -> Data:
    return {"pixel_values": torch.randn(size, 3, 16, 16, dtype=torch.float64), "labels": torch.randint(2, (size,))}


def classified(model: nn.Module, data: Data) -> Tensor:
    given = {name: value for name, value in data.items() if name != "labels"}
    return F.cross_entropy(model(**given).logits, data["labels"], reduction="none")


def modelled(model: nn.Module, data: Data) -> Tensor:
    """The next token of each, averaged over those that are not padding."""
    scores = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits[:, :-1]
    wanted, counts = data["input_ids"][:, 1:], data["attention_mask"][:, 1:]
    losses = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), wanted.reshape(-1), reduction="none")
    return (losses.view(wanted.shape) * counts).sum(1) / counts.sum(1)


def translated(model: nn.Module, data: Data) -> Tensor:
    tokens = data["input_ids"]
    given = {"input_ids": tokens, "attention_mask": data["attention_mask"], "decoder_input_ids": tokens}
    losses = F.cross_entropy(model(**given).logits.transpose(1, 2), tokens, reduction="none")
    return (losses * data["attention_mask"]).sum(1) / data["attention_mask"].sum(1)


def of_texts(kind: str, task: str, loss: Loss, **options: Any) -> tuple[Callable[[], nn.Module], Loss, Any]:
    return lambda: build(kind, task, {"pad_token_id": 0, **options}), loss, texts


def of_images(kind: str, **options: Any) -> tuple[Callable[[], nn.Module], Loss, Any]:
    return lambda: build(kind, "ForImageClassification", {"image_size": 16, **options}), classified, images


def build(kind: str, task: str, options: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**options)
    model: nn.Module = getattr(transformers, kind + task)(config)
    # Mixtures of experts multiply groups of rows, for which torch has no double precision.
    return model.eval() if kind == "Mixtral" else model.double().eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    "BERT": of_texts("Bert", "ForSequenceClassification", classified, **WIDE),
    "DeBERTa": of_texts(
        "DebertaV2",
        "ForSequenceClassification",
        classified,
        **WIDE,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=8,
    ),
    "XLNet": of_texts(
        "XLNet", "ForSequenceClassification", classified, d_model=16, n_layer=2, n_head=2, d_inner=24, vocab_size=60
    ),
    "GPT-2, tied": of_texts("GPT2", "LMHeadModel", modelled, n_embd=16, n_layer=2, n_head=2, vocab_size=60),
    "GPT-2, last token": of_texts(
        "GPT2", "ForSequenceClassification", classified, n_embd=16, n_layer=2, n_head=2, vocab_size=60
    ),
    "Llama": of_texts("Llama", "ForCausalLM", modelled, **FEW_KEYS),
    "Gemma 2": of_texts("Gemma2", "ForCausalLM", modelled, **FEW_KEYS, head_dim=8),
    "Mixtral": of_texts("Mixtral", "ForCausalLM", modelled, **FEW_KEYS, num_local_experts=3),
    "T5": of_texts(
        "T5",
        "ForConditionalGeneration",
        translated,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        vocab_size=60,
    ),
    "Funnel, in place on a view": of_texts(
        "Funnel",
        "ForSequenceClassification",
        classified,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
        block_sizes=[1, 1],
        vocab_size=60,
        num_decoder_layers=1,
    ),
    "Longformer, in place on a layer's output": of_texts(
        "Longformer", "ForSequenceClassification", classified, **WIDE, attention_window=4, max_position_embeddings=20
    ),
    "Falcon": of_texts(
        "Falcon", "ForCausalLM", modelled, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=60
    ),
    "ViT, a class token": of_images("ViT", **IMAGES, patch_size=4),
    "Swin, windows and shifts": of_images(
        "Swin", patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    ),
    "ConvNeXt": of_images("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2),
}


PROVEN = ("Longformer, in place on a layer's output",)
"""Those that move examples by numbers made from data, so that each batch is proven by a backward pass."""


@pytest.mark.parametrize("name", MODELS)
def test_exact_without_a_proof_by_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several sizes, one of them as large as the sequences are long; that one alone may need a proof."""
    torch.manual_seed(0)
    make, loss, draw = MODELS[name]
    model = make()
    objective, parameters = Objective(model, loss), [p for p in model.parameters() if p.requires_grad]
    engine, passes = BookKeeping(), []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda *args: (passes.append(1), run(*args)))
    for size in (6, 3, 6):
        passes.clear()
        data = draw(size)
        batch = Batch(data, size, lambda i, data=data: tree_map(lambda x: x[i : i + 1], data))
        found = engine.differentiate(objective, parameters, batch)
        wanted = Looped().differentiate(objective, parameters, batch)
        close = {"rtol": 1e-5, "atol": 1e-7} if found.norms.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-6}
        torch.testing.assert_close(found.norms, wanted.norms, **close)
        weights = torch.linspace(0.3, 1.7, size, dtype=found.norms.dtype)
        torch.testing.assert_close(list(found.weighted_sum(weights)), list(wanted.weighted_sum(weights)), **close)
    (knowledge,) = engine._knowledge.values()
    assert not knowledge.refused
    assert not passes or name in PROVEN
