"""Law 8: engine and microbatch change no numbers, over random shapes of every family of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from sordino.gradients.looped import Looped
from sordino.gradients.vmapped import Vmapped
from tests.gradients.oracle import batch_of, squared

Drawn = tuple[nn.Module, Callable[[int], Tensor]]


class Last(nn.Module):
    """A recurrent layer's output."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@st.composite
def linear(draw: st.DrawFn) -> Drawn:
    d, o, bias = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.booleans())
    lead = draw(st.lists(st.integers(1, 4), max_size=2))
    return nn.Linear(d, o, bias), lambda size: torch.randn(size, *lead, d)


@st.composite
def convolution(draw: st.DrawFn) -> Drawn:
    space, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kind = draw(
        st.sampled_from(
            [(nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)]
        )
    )
    few_or_many = st.sampled_from([1, 2, 3, 7])  # more channels than positions lie otherwise in memory
    channels, outputs = groups * draw(few_or_many), groups * draw(few_or_many)
    options = {
        "kernel_size": draw(st.integers(1, 3)),
        "stride": draw(st.integers(1, 2)),
        "padding": draw(st.integers(0, 1)),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    side = draw(st.integers(5, 6))
    return kind[space - 1](channels, outputs, **options), lambda size: torch.randn(size, channels, *[side] * space)


@st.composite
def normalisation(draw: st.DrawFn) -> Drawn:
    channels, side = 2 * draw(st.integers(1, 2)), draw(st.integers(2, 4))
    layer = draw(
        st.sampled_from(
            [
                *(nn.LayerNorm(side), nn.LayerNorm((channels, side)), nn.GroupNorm(2, channels)),
                *(nn.RMSNorm(side), nn.InstanceNorm1d(channels, affine=True)),
            ]
        )
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, lambda size: torch.randn(size, channels, side)


@st.composite
def embedding(draw: st.DrawFn) -> Drawn:
    words, d, length = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    padding = draw(st.sampled_from([None, 0, -1]))
    return nn.Embedding(words, d, padding_idx=padding), lambda size: torch.randint(0, words, (size, length))


@st.composite
def recurrent(draw: st.DrawFn) -> Drawn:
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    d, h, length = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 5))
    options: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 2)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if kind is nn.LSTM and draw(st.booleans()):
        options["proj_size"] = h - 1
    return Last(kind(d, h, batch_first=True, **options)), lambda size: torch.randn(size, length, d)


@st.composite
def transformer(draw: st.DrawFn) -> Drawn:
    heads, length = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    width = heads * draw(st.integers(2, 3))  # one feature, normalised, has gradients of rounding alone
    layer = nn.TransformerEncoderLayer(width, heads, 5, 0.0, batch_first=True, norm_first=draw(st.booleans()))
    return layer, lambda size: torch.randn(size, length, width)


FAMILIES = [linear(), convolution(), normalisation(), embedding(), recurrent(), transformer()]


def answers(engine: Any, model: nn.Module, data: Tensor, microbatch: int) -> tuple[Tensor, list[Tensor]]:
    """Norms and the sum weighted by position, microbatch by microbatch."""
    objective, parameters = Objective(model, squared), list(model.parameters())
    norms, sums = [], [torch.zeros_like(p) for p in parameters]
    for part, weights in zip(data.split(microbatch), torch.arange(1.0, len(data) + 1).split(microbatch), strict=True):
        result = engine.differentiate(objective, parameters, batch_of(part, len(part)))
        norms.append(result.norms)
        for total, more in zip(sums, result.weighted_sum(weights.to(result.norms.dtype)), strict=True):
            total += more
    return torch.cat(norms), sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60)
@given(drawn=st.one_of(FAMILIES), size=st.integers(1, 6), microbatch=st.integers(1, 6))
def test_engines_and_microbatches_agree(drawn: Drawn, size: int, microbatch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, data = drawn[0].to(dtype), drawn[1](size)
    data = data.to(dtype) if data.is_floating_point() else data
    rtol = 1e-4 if dtype == torch.float32 else 1e-9
    norms, sums = answers(Looped(), model, data, size)
    engines = [BookKeeping()] if isinstance(model, Last) else [BookKeeping(), Vmapped()]
    for engine in engines:
        mine, totals = answers(engine, model, data, microbatch)
        torch.testing.assert_close(mine, norms, rtol=rtol, atol=rtol * float(norms.max()) * 0.1)
        for total, wanted in zip(totals, sums, strict=True):
            scale = max(float(wanted.detach().abs().max()), float(norms.max()))
            torch.testing.assert_close(total, wanted.detach(), rtol=rtol, atol=rtol * scale)
