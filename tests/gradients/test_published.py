"""Architectures of `transformers`, built small from their configurations: as exact as a plain loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino
from sordino import recipes
from sordino.gradients.bookkeeping import BookKeeping
from tests.gradients.oracle import check

transformers: Any = pytest.importorskip("transformers")

CLASSES = 3
SIZE = 3

Build = Callable[[], nn.Module]


def vision(name: str, **sizes: Any) -> Build:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **sizes)
        model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
        return model

    return build


def text(name: str, **sizes: Any) -> Build:
    def build() -> nn.Module:
        common = {"vocab_size": 30, "num_labels": CLASSES, "pad_token_id": 0}
        config = getattr(transformers, f"{name}Config")(**common, **sizes)
        model: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(config)
        return model

    return build


PATCHES = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WINDOWS = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2],
    "num_heads": [2],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
WORDS = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}
VISION: dict[str, Build] = {
    "ViT": vision("ViT", **PATCHES),
    "DeiT": vision("DeiT", **PATCHES),
    "BEiT": vision("Beit", **PATCHES, use_relative_position_bias=True, layer_scale_init_value=0.1, drop_path_rate=0.0),
    "Swin": vision("Swin", **WINDOWS),
    "Swin v2": vision("Swinv2", **WINDOWS),
    "BiT": vision("Bit", embedding_size=8, hidden_sizes=[8], depths=[1], num_groups=4),
}
TEXT: dict[str, Build] = {
    "DeBERTa v2": text("DebertaV2", **WORDS, **RELATIVE),
    "XLNet": text("XLNet", d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0, summary_last_dropout=0.0),
}


def classify_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


def classify_words(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits
    return F.cross_entropy(logits, batch[1], reduction="none")


def draw_images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.randint(CLASSES, (size,))


def draw_words(size: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(3, 30, (size, 7))
    words[::2, 5:] = 0
    return words, torch.randint(CLASSES, (size,))


def find_case(name: str) -> tuple[nn.Module, Callable[[int], Any], Any]:
    torch.manual_seed(0)
    if name in VISION:
        return VISION[name](), draw_images, classify_images
    return TEXT[name](), draw_words, classify_words


@pytest.mark.parametrize("name", [*VISION, *TEXT])
def test_equals_the_loop_and_keeps_books(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sordino")
    model, draw, loss = find_case(name)
    check(BookKeeping(), model, draw(SIZE), SIZE, loss, rtol=1e-3)
    assert not [record for record in caplog.records if record.name == "sordino"]


@pytest.mark.parametrize("way", ["steps", "loader"])
@pytest.mark.parametrize("name", ["ViT", "Swin", "BiT", "XLNet"])
def test_trains(name: str, way: str) -> None:
    model, draw, loss = find_case(name)
    recipe = recipes.dpsgd(batch_size=4, steps=3).calibrate(sordino.Budget(epsilon=50, delta=1e-2), records=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    private = sordino.Private(model, optimizer, TensorDataset(*draw(16)), loss, recipe)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if way == "steps":
        assert len(list(private.steps())) == 3
    else:
        for batch in private.loader():
            optimizer.zero_grad()
            private.backward(loss(model, batch))
            optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    assert all(bool(torch.isfinite(p).all()) and not torch.equal(old, p) for old, p in pairs)
