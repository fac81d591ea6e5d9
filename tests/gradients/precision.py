"""How far one record moves the computed sum: layers, dtypes and engines for the tests of rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.book import OneByOne
from sordino.gradients.bookkeeping.keeper import prepare_recording
from sordino.gradients.bookkeeping.proof import Knowledge
from sordino.gradients.engine import Differentiated, Objective
from sordino.gradients.looped import Looped, backpropagate
from sordino.gradients.vmapped import Vmapped
from sordino.parts import Flat
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.oracle import batch_of

RECORDS = 48
CLIP = 1.0


def numbers(*shape: int) -> Callable[[], Tensor]:
    """Records that are alike, so that their gradients add up to a sum whose digits are coarse."""
    return lambda: 3 + torch.randn(RECORDS, *shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 5, (RECORDS, *shape))


def tied() -> nn.Module:
    model = Apply(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.b.weight = model.a.weight
    return model


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(12, 8), numbers(12)),
    "rows": (lambda: nn.Linear(6, 4), numbers(7, 6)),
    "conv": (lambda: nn.Conv1d(3, 4, 3), numbers(3, 9)),
    "conv_transpose": (lambda: nn.ConvTranspose1d(3, 4, 3), numbers(3, 9)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(6), nn.RMSNorm(6)), numbers(4, 6)),
    "embedding": (lambda: nn.Embedding(5, 6), tokens(7)),
    "embedding_bag": (lambda: nn.EmbeddingBag(5, 6, mode="sum"), tokens(7)),
    "lstm": (lambda: Apply(lambda m, x: m.r(x)[0], r=nn.LSTM(4, 5, batch_first=True)), numbers(6, 4)),
    "gru": (lambda: Apply(lambda m, x: m.r(x)[0], r=nn.GRU(4, 5, batch_first=True)), numbers(6, 4)),
    "attention": (
        lambda: Apply(lambda m, x: m.t(x, x[:, :3], x[:, :3])[0], t=nn.MultiheadAttention(4, 2, batch_first=True)),
        numbers(5, 4),
    ),
    "elementwise": (lambda: Apply(lambda m, x: x * m.p + m.q, p=(8,), q=(8,)), numbers(8)),
    "rearranged": (lambda: Apply(lambda m, x: x @ m.p.t(), p=(8, 12)), numbers(12)),
    "cast": (lambda: Apply(lambda m, x: x.bfloat16() @ m.p.bfloat16(), p=(12, 8)), numbers(12)),
    "tied": (tied, numbers(8)),
    "replayed": (lambda: Apply(lambda m, x: torch.addcmul(x, m.p, x), p=(8,)), numbers(8)),
    "weight norm": (lambda: weight_norm(nn.Linear(12, 8)), numbers(12)),
    "spectral norm": (lambda: spectral_norm(nn.Linear(12, 8)).eval(), numbers(12)),
}


def steep(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with one direction for all records, and gradients longer than any bound."""
    flat = model(x).flatten(1)
    return (100 * flat * torch.linspace(0.4, 1.3, flat.shape[1]).to(flat)).sum(1)


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return steep(model, x)


def engine(make: type[Any]) -> Callable[[Objective, list[nn.Parameter], Tensor], Differentiated]:
    return lambda objective, parameters, x: make().differentiate(objective, parameters, batch_of(x, len(x)))


def recorded(objective: Objective, parameters: list[nn.Parameter], x: Tensor) -> Differentiated:
    with BookKeeping().record(objective, parameters, batch_of(x, len(x))) as recorder:
        losses = objective(x)
    return recorder.differentiate(losses)


def one_by_one(objective: Objective, parameters: list[nn.Parameter], x: Tensor) -> Differentiated:
    recording = prepare_recording(objective, batch_of(x, len(x)), Knowledge(), lenient=True)
    with recording:
        losses = objective(x)
    recording.leave()
    return OneByOne(recording, losses, parameters)


def left_to_autograd(objective: Objective, parameters: list[nn.Parameter], x: Tensor) -> Differentiated:
    return backpropagate(objective(x), parameters)


ENGINES: dict[str, Callable[[Objective, list[nn.Parameter], Tensor], Differentiated]] = {
    "bookkeeping": engine(BookKeeping),
    "vmap": engine(Vmapped),
    "loop": engine(Looped),
    "recorded": recorded,
    "one by one": one_by_one,
    "backpropagated": left_to_autograd,
}


def moves(name: str, layer: str, dtype: str, count: int = 4) -> Iterator[float]:
    """|sum over all records - sum over all but one| / clip, for the first `count` records."""
    torch.manual_seed(5)
    make, data = LAYERS[layer]
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)
    model, x = make().to(kind), data()
    x = x.to(kind) if x.is_floating_point() else x
    objective = Objective(model, under_autocast if dtype == "autocast" else steep)
    parameters = list(model.parameters())

    def total(x: Tensor) -> Tensor:
        found = ENGINES[name](objective, parameters, x)
        weights = Flat().weights(found.norms, CLIP, None)  # type: ignore[arg-type]  # it does not look at the draw
        sums = list(found.weighted_sum(weights))
        assert all(each.dtype in (torch.float32, torch.float64) for each in sums)
        return torch.cat([each.double().flatten() for each in sums])

    everybody = total(x)
    for left_out in range(count):
        others = torch.cat([x[:left_out], x[left_out + 1 :]])
        yield float((everybody - total(others)).norm()) / CLIP
