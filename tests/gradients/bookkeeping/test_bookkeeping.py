"""The book-keeping engine equals a loop over single examples, for every rule, and leaves the model as it found it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from tests.gradients.oracle import check


class Apply(nn.Module):
    """A module from named parameters and a function of (them, x)."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: Any) -> None:
        super().__init__()
        self.function = forward
        for name, value in shapes.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(torch.randn(value) * 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "linear": (lambda: nn.Linear(5, 3), lambda b: torch.randn(b, 5)),
    "linear rows": (lambda: nn.Linear(5, 3), lambda b: torch.randn(b, 4, 5)),
    "linear many rows": (lambda: nn.Linear(2, 3), lambda b: torch.randn(b, 6, 5, 2)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 2, bias=False)),
        lambda b: torch.randn(b, 5),
    ),
    "folded": (
        lambda: Apply(lambda m, x: m.l(x.reshape(-1, 5)).reshape(len(x), -1), l=nn.Linear(5, 3)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "sequence first": (
        lambda: Apply(lambda m, x: m.l(x.transpose(0, 1)).transpose(0, 1), l=nn.Linear(5, 3)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "folded minor": (
        lambda: Apply(
            lambda m, x: m.l(x.transpose(0, 1).reshape(-1, 5)).reshape(-1, len(x), 3).transpose(0, 1), l=nn.Linear(5, 3)
        ),
        lambda b: torch.randn(b, 4, 5),
    ),
    "matmul": (lambda: Apply(lambda m, x: x @ m.w, w=(5, 3)), lambda b: torch.randn(b, 4, 5)),
    "matmul vector": (lambda: Apply(lambda m, x: x @ m.w, w=(5,)), lambda b: torch.randn(b, 4, 5)),
    "matmul transposed": (
        lambda: Apply(lambda m, x: x @ m.w.t() + x @ m.v.T, w=(3, 5), v=(3, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), lambda b: torch.randn(b, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), lambda b: torch.randn(b, 2, 7, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2)), lambda b: torch.randn(b, 4, 7, 6)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), lambda b: torch.randn(b, 4, 5, 5)),
    "conv2d same": (
        lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)),
        lambda b: torch.randn(b, 2, 5, 6),
    ),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        lambda b: torch.randn(b, 2, 5, 6),
    ),
    "conv2d wide": (lambda: nn.Conv2d(16, 20, 3, padding=1), lambda b: torch.randn(b, 16, 2, 2)),
    "conv2d folded": (
        lambda: Apply(lambda m, x: m.c(x.flatten(0, 1)).reshape(len(x), -1), c=nn.Conv2d(2, 3, 3)),
        lambda b: torch.randn(b, 4, 2, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), lambda b: torch.randn(b, 2, 3, 4, 5)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 2),
            nn.GroupNorm(2, 8),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        lambda b: torch.randn(b, 1, 8, 8),
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), lambda b: torch.randn(b, 2, 4)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2),
        lambda b: torch.randn(b, 4, 3, 4),
    ),
    "transposed dilated": (
        lambda: nn.ConvTranspose2d(2, 3, 3, dilation=2, bias=False),
        lambda b: torch.randn(b, 2, 3, 4),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda b: torch.randn(b, 2, 2, 3, 2)),
    "bag sum": (lambda: nn.EmbeddingBag(7, 3, mode="sum"), lambda b: tokens(b, 5)),
    "bag mean": (lambda: nn.EmbeddingBag(7, 3, padding_idx=2), lambda b: tokens(b, 5)),
    "bag max": (lambda: nn.EmbeddingBag(7, 3, mode="max"), lambda b: tokens(b, 5)),
    "bag max in the loss": (
        lambda: Apply(lambda m, x: m.e(x).tanh() * m.s, e=nn.EmbeddingBag(7, 3, mode="max"), s=(3,)),
        lambda b: tokens(b, 5),
    ),
    "bag max padding": (lambda: nn.EmbeddingBag(7, 3, mode="max", padding_idx=2), lambda b: tokens(b, 5)),
    "bag offsets": (
        lambda: Apply(lambda m, x: m.e(x.flatten(), torch.arange(len(x)) * 5), e=nn.EmbeddingBag(7, 3)),
        lambda b: tokens(b, 5),
    ),
    "bag of bags": (
        lambda: Apply(lambda m, x: m.e(x.flatten(0, 1)).reshape(len(x), -1), e=nn.EmbeddingBag(7, 3)),
        lambda b: tokens(b, 2, 5),
    ),
    "layer norm": (lambda: nn.LayerNorm(5), lambda b: torch.randn(b, 4, 5)),
    "layer norm 2d": (lambda: nn.LayerNorm((4, 5)), lambda b: torch.randn(b, 4, 5)),
    "layer norm flat": (lambda: nn.LayerNorm(5), lambda b: torch.randn(b, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda b: torch.randn(b, 4, 3, 3)),
    "group norm flat": (lambda: nn.GroupNorm(2, 4), lambda b: torch.randn(b, 4)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), lambda b: torch.randn(b, 3, 4, 4)),
    "rms norm": (lambda: nn.RMSNorm(5), lambda b: torch.randn(b, 4, 5)),
    "batch norm eval": (lambda: nn.BatchNorm2d(3).eval(), lambda b: torch.randn(b, 3, 4, 4)),
    "embedding": (lambda: nn.Embedding(7, 3), lambda b: tokens(b, 6)),
    "embedding mean": (lambda: Apply(lambda m, x: m.e(x).mean(1), e=nn.Embedding(7, 3)), lambda b: tokens(b, 6)),
    "embedding mean twice": (
        lambda: Apply(lambda m, x: m.e(x).mean(1) + m.e(x.flip(1)[:, :4]).sum(1), e=nn.Embedding(7, 3)),
        lambda b: tokens(b, 6),
    ),
    "embedding one": (lambda: nn.Embedding(7, 3), lambda b: tokens(b)),
    "embedding padding": (lambda: nn.Embedding(7, 3, padding_idx=2), lambda b: tokens(b, 6)),
    "embedding sequence first": (
        lambda: Apply(lambda m, x: m.e(x.t()).transpose(0, 1), e=nn.Embedding(7, 3)),
        lambda b: tokens(b, 5),
    ),
    "bias": (lambda: Apply(lambda m, x: x + m.b, b=(5,)), lambda b: torch.randn(b, 4, 5)),
    "bias middle": (lambda: Apply(lambda m, x: m.b - x, b=(4, 1)), lambda b: torch.randn(b, 4, 5)),
    "scale": (lambda: Apply(lambda m, x: m.s * x / m.d, s=(1, 5), d=()), lambda b: torch.randn(b, 4, 5)),
    "in place": (
        lambda: Apply(lambda m, x: m.l(x).add_(m.b), l=nn.Linear(5, 3), b=(3,)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "class token": (
        lambda: Apply(lambda m, x: torch.cat([m.c.expand(len(x), -1, -1), x], 1) ** 2, c=(1, 1, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "class token repeat": (
        lambda: Apply(lambda m, x: torch.cat([m.c.unsqueeze(0).repeat(len(x), 1, 1), x], 1) ** 2, c=(2, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "positions": (
        lambda: Apply(lambda m, x: (x + m.p(torch.arange(4))) ** 2, p=nn.Embedding(9, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "positions slice": (lambda: Apply(lambda m, x: (x + m.p[:, :4]) ** 2, p=(1, 9, 5)), lambda b: torch.randn(b, 4, 5)),
    "tied": (lambda: Apply(lambda m, x: F.linear(m.e(x), m.e.weight), e=nn.Embedding(7, 3)), lambda b: tokens(b, 5)),
    "tied transposed": (
        lambda: Apply(lambda m, x: m.e(x) @ m.e.weight.t(), e=nn.Embedding(7, 3)),
        lambda b: tokens(b, 5),
    ),
    "tied autoencoder": (
        lambda: Apply(lambda m, x: torch.tanh(x @ m.w) @ m.w.t(), w=(5, 3)),
        lambda b: torch.randn(b, 5),
    ),
    "twice": (lambda: Apply(lambda m, x: m.l(torch.tanh(m.l(x))), l=nn.Linear(5, 5)), lambda b: torch.randn(b, 5)),
    "conv twice": (
        lambda: Apply(lambda m, x: m.c(torch.tanh(m.c(x))), c=nn.Conv2d(2, 2, 3, padding=1)),
        lambda b: torch.randn(b, 2, 5, 5),
    ),
    "embedding twice": (
        lambda: Apply(lambda m, x: m.e(x) * m.e(x.flip(1)), e=nn.Embedding(7, 3)),
        lambda b: tokens(b, 5),
    ),
    "split": (
        lambda: Apply(lambda m, x: torch.cat([x @ w.t() for w in m.w.chunk(3)], -1), w=(6, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "overlapping pieces": (
        lambda: Apply(lambda m, x: F.linear(x, m.w[:3]) * F.linear(x, m.w[2:5]), w=(6, 5)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), lambda b: torch.randn(b, 4, 5)),
    "low rank": (lambda: Apply(lambda m, x: F.linear(x, m.a @ m.b), a=(3, 2), b=(2, 5)), lambda b: torch.randn(b, 5)),
    "bilinear": (lambda: Apply(lambda m, x: m.f(x, x.flip(1)), f=nn.Bilinear(5, 5, 3)), lambda b: torch.randn(b, 5)),
    "prelu": (lambda: nn.PReLU(4), lambda b: torch.randn(b, 4, 5)),
    "einsum": (
        lambda: Apply(lambda m, x: torch.einsum("btd,dh->bth", x, m.w), w=(5, 3)),
        lambda b: torch.randn(b, 4, 5),
    ),
    "unused": (lambda: Apply(lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), lambda b: torch.randn(b, 5)),
}


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_rule_equals_loop(name: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes 4 and 5 coincide with other dimensions, so that only the proof tells the examples from them."""
    torch.manual_seed(0)
    build, draw = MODELS[name]
    check(BookKeeping(), build(), draw(size), size)
    assert not caplog.records, "fell back"


@pytest.mark.parametrize("name", MODELS)
def test_rule_equals_loop_in_double(name: str) -> None:
    torch.manual_seed(1)
    build, draw = MODELS[name]
    data = draw(3)
    check(BookKeeping(), build().double(), data.double() if data.is_floating_point() else data, 3, rtol=1e-9)
