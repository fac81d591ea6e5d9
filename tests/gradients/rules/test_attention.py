"""Attention and transformer layers, stock modules in all their forms, equal a loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from tests.gradients.oracle import check


class Attend(nn.Module):
    """Self-attention, or attention to another sequence; the weights count too when they are asked for."""

    def __init__(self, cross: bool = False, masks: bool = False, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.cross, self.masks, self.weights = cross, masks, weights
        self.other = nn.Linear(4, options.get("kdim") or 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.other(x) if self.cross else x
        masks: dict[str, Any] = {}
        if self.masks:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[:, -1] = x[:, -1, 0] > 0
            masks = {"key_padding_mask": padding, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}
        mixed, weights = self.attention(x, memory, memory, need_weights=self.weights, **masks)
        return mixed if weights is None else torch.cat([mixed.flatten(1), weights.flatten(1)], 1)


FORMS: dict[str, dict[str, Any]] = {
    "self": {},
    "weights": {"weights": True},
    "cross": {"cross": True},
    "other width": {"cross": True, "kdim": 3, "vdim": 3},
    "learned step": {"add_bias_kv": True, "add_zero_attn": True},
    "learned step, weights, masks": {"add_bias_kv": True, "weights": True, "masks": True},
    "masks": {"masks": True},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_attention(form: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check(BookKeeping(), Attend(**FORMS[form]), torch.randn(size, 5, 4), size)
    assert not caplog.records


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder(batch_first: bool, norm_first: bool, training: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=batch_first, norm_first=norm_first)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) if batch_first else self.layers(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    check(BookKeeping(), Encoder().train(training), torch.randn(5, 5, 4), 5)
    assert not caplog.records


def test_transformer_with_causal_mask(caplog: pytest.LogCaptureFixture) -> None:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            return self.transformer(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)

    torch.manual_seed(0)
    check(BookKeeping(), Translate(), torch.randn(4, 5, 4), 4)
    assert not caplog.records


def test_language_model_with_positions_and_tied_head(caplog: pytest.LogCaptureFixture) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.positions = nn.Embedding(9, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            steps = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            return self.layer(steps) @ self.tokens.weight.t()

    torch.manual_seed(0)
    for size in (4, 5):
        check(BookKeeping(), Model(), torch.randint(0, 7, (size, 5)), size)
    assert not caplog.records
