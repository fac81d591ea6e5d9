"""Unusual models, on batches as long as every other dimension: an engine agrees with the plain loop, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.errors import SordinoError
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.oracle import assert_matches, batch_of, singles

B = 4


class Doubled(torch.autograd.Function):
    """What no recording sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def constant(**shapes: Any) -> nn.Module:
    """A module of buffers."""
    held = nn.Module()
    for name, shape in shapes.items():
        held.register_buffer(name, torch.randn(shape))
    return held


def padded(m: Any, x: Tensor) -> Tensor:
    """A state that is made from nothing, then written to, example by example."""
    state = torch.zeros(B, len(x), B, dtype=x.dtype)
    for t in range(B):
        state[t].copy_(m.a(x) * (t + 1))
    return (state * m.p).sum(0)


def filled(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2 * B, dtype=x.dtype)
    out[:, :B] = m.a(x)
    out[:, B:] = m.p
    return out


def appended(m: Any, x: Tensor) -> Tensor:
    rows = [row @ m.q + m.p for row in x]
    return torch.stack(rows)


def swapped(m: Any, x: Tensor) -> Tensor:
    """Examples are the last dimension for a while."""
    hidden = (m.q @ x.t()).tanh()
    return (m.q @ hidden + m.p[:, None]).t()


def scanned(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for t in range(3):
        h = torch.tanh(F.linear(h, m.q) + x * m.p + t)
    return h


ZOO: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "einsum twice": (lambda m, x: torch.einsum("bi,ij,jk->bk", x, m.q, m.q), {"q": (B, B)}),
    "quadratic form": (lambda m, x: (x @ m.q * x).sum(1, keepdim=True), {"q": (B, B)}),
    "outer with itself": (lambda m, x: torch.einsum("bi,bj,ij->b", x, x, m.q)[:, None] * m.p, {"p": (B,), "q": (B, B)}),
    "weight on the left": (lambda m, x: (m.q @ x.t()).t(), {"q": (B, B)}),
    "examples last": (swapped, {"p": (B,), "q": (B, B)}),
    "used as weight and as bias": (lambda m, x: F.linear(x, m.q, m.q[0]), {"q": (B, B)}),
    "used as weight and as scale": (lambda m, x: F.linear(x, m.q) * m.q.diagonal() + m.q.sum(0), {"q": (B, B)}),
    "tied and transposed": (lambda m, x: F.linear(torch.tanh(F.linear(x, m.q)), m.q.t()), {"q": (B, B)}),
    "symmetric": (lambda m, x: F.linear(x, m.q + m.q.t()), {"q": (B, B)}),
    "low rank": (lambda m, x: F.linear(x, m.p[:, None] * m.p[None]), {"p": (B,)}),
    "exponential of a matrix": (lambda m, x: x @ torch.matrix_exp(m.q / 4), {"q": (B, B)}),
    "where on parameters": (lambda m, x: torch.where(m.p > 0, m.p, m.p * 0.1) * x, {"p": (B,)}),
    "where by data": (lambda m, x: torch.where(x > 0, m.p, -m.p), {"p": (B,)}),
    "buffer of the batch's length": (lambda m, x: x * (m.p * m.k.c) + m.k.c, {"p": (B,), "k": constant(c=B)}),
    "buffer matrix": (lambda m, x: (x @ m.k.c + m.p) @ m.k.c.t(), {"p": (B,), "k": constant(c=(B, B))}),
    "constant made inside": (lambda m, x: x * m.p + torch.arange(B) * m.p, {"p": (B,)}),
    "eye made inside": (lambda m, x: x @ (m.q + torch.eye(B, dtype=x.dtype)), {"q": (B, B)}),
    "mask made inside": (lambda m, x: x @ (m.q * torch.ones(B, B, dtype=x.dtype).tril()), {"q": (B, B)}),
    "positions": (lambda m, x: x[:, :, None] * m.e(torch.arange(B))[None], {"e": nn.Embedding(B, B)}),
    "cumulated": (lambda m, x: (x * m.p).cumsum(1) * m.p.cumsum(0), {"p": (B,)}),
    "written into": (filled, {"a": nn.Linear(B, B), "p": (B,)}),
    "written into a view": (padded, {"a": nn.Linear(B, B), "p": (B,)}),
    "row by row": (appended, {"p": (B,), "q": (B, B)}),
    "index_put": (
        lambda m, x: (x * 0).index_put((torch.arange(len(x)), torch.zeros(len(x)).long()), x @ m.p),
        {"p": (B,)},
    ),
    "index_add": (lambda m, x: (x * 0).index_add(1, torch.arange(B), x * m.p), {"p": (B,)}),
    "scatter": (lambda m, x: torch.zeros_like(x).scatter(1, x.argsort(1), x * m.p), {"p": (B,)}),
    "scatter of a parameter": (lambda m, x: x.scatter_add(1, x.argsort(1), m.p.expand(len(x), B)), {"p": (B,)}),
    "gather": (lambda m, x: (x * m.p).gather(1, x.argsort(1)), {"p": (B,)}),
    "sorted features": (lambda m, x: m.a(x).sort(1).values * m.p, {"a": nn.Linear(B, B), "p": (B,)}),
    "table by data": (lambda m, x: m.q[x.abs().long() % B].flatten(1), {"q": (B, B)}),
    "in place": (lambda m, x: m.a(x).mul_(2).add_(m.p).relu_(), {"a": nn.Linear(B, B), "p": (B,)}),
    "in place by a parameter": (lambda m, x: m.a(x).mul_(m.p), {"a": nn.Linear(B, B), "p": (B,)}),
    "in place by a number": (
        lambda m, x: m.a(x).mul_(m.p).div_(m.p.exp()).masked_fill_(x > 1, m.p),
        {"a": nn.Linear(B, B), "p": ()},
    ),
    "indexed by a number of the batch": (lambda m, x: x @ m.q[(x * 0).sum().long()], {"q": (2, B, B)}),
    "custom function": (lambda m, x: Doubled.apply(m.a(x)) * m.p, {"a": nn.Linear(B, B), "p": (B,)}),
    "custom function on a parameter": (lambda m, x: x * Doubled.apply(m.p), {"p": (B,)}),
    "recurrence by hand": (scanned, {"p": (B,), "q": (B, B)}),
    "expanded queries": (
        lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), B, B), x[:, None] * m.q, x[:, None] + m.q),
        {"q": (B, B)},
    ),
    "prototypes": (lambda m, x: -torch.cdist(x, m.q), {"q": (B, B)}),
    "radial": (lambda m, x: torch.exp(-(x[:, None] - m.q[None]).square().sum(2)) * m.p, {"p": (B,), "q": (B, B)}),
    "hypernetwork": (
        lambda m, x: torch.bmm(m.a(x).unflatten(1, (B, B)), x[:, :, None])[:, :, 0] + m.p,
        {"a": nn.Linear(B, B * B), "p": (B,)},
    ),
    "fourier": (lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.p[: B // 2 + 1], n=B), {"p": (B,)}),
    "complex filter": (
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.complex(m.p, m.p * 2)[: B // 2 + 1], n=B),
        {"p": (B,)},
    ),
    "numpy integers": (
        lambda m, x: torch.stack([m.a(x).select(0, i) for i in torch.arange(len(x)).numpy()]),
        {"a": nn.Linear(B, B)},
    ),
    "logsumexp of both": (lambda m, x: torch.logsumexp(x[:, :, None] + m.q, 1), {"q": (B, B)}),
    "max over a parameter": (lambda m, x: (x[:, :, None] + m.q).amax(1), {"q": (B, B)}),
    "sequence first": (
        lambda m, x: m.a(x[:, None].expand(-1, B, -1).transpose(0, 1) * m.p)[-1],
        {"a": nn.Linear(B, B), "p": (B,)},
    ),
    "folded time": (
        lambda m, x: m.a((x[:, :, None] * m.p).reshape(-1, B)).reshape(len(x), -1),
        {"a": nn.Linear(B, B), "p": (B,)},
    ),
    "folded, elementwise": (
        lambda m, x: ((x[:, :, None] * m.a(x)[:, None]).reshape(-1, B) * m.p + m.p).reshape(len(x), -1),
        {"a": nn.Linear(B, B), "p": (B,)},
    ),
    "folded, time first": (
        lambda m, x: torch.addcmul((x[:, :, None] * m.p).transpose(0, 1).reshape(-1, B), m.p, m.p)
        .reshape(B, -1, B)
        .transpose(0, 1)
        .flatten(1),
        {"p": (B,)},
    ),
    "detached part": (lambda m, x: m.a(x) * m.a(x).detach() + m.p.detach(), {"a": nn.Linear(B, B), "p": (B,)}),
    "normalised weight": (lambda m, x: x @ F.normalize(m.q, dim=0), {"q": (B, B)}),
    "softmax over parameters": (lambda m, x: x * m.p.softmax(0), {"p": (B,)}),
    "scalar parameter": (lambda m, x: x * m.p.mean() + m.p.norm(), {"p": (B,)}),
    "no dimension": (lambda m, x: torch.addcmul(x, m.p, x * m.p) * m.p.exp(), {"p": ()}),
    "kronecker": (lambda m, x: torch.cat([x, x], 1) @ torch.kron(torch.eye(2, dtype=x.dtype), m.q), {"q": (B, B)}),
    "unused and frozen": (lambda m, x: m.a(x) * 1.0, {"a": nn.Linear(B, B), "p": (B,)}),
}  # fmt: skip


def curved(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x).flatten(1)
    return (output * torch.linspace(-1, 2, output.shape[1], dtype=x.dtype)).sum(1) + output.square().sum(1) / 3


def built(name: str, zero: bool) -> nn.Module:
    torch.manual_seed(2)
    forward, parts = ZOO[name]
    model = Apply(forward, **parts).double()
    if zero:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    else:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("zero", [False, True], ids=["random", "zero"])
@pytest.mark.parametrize("name", ZOO)
def test_agrees_with_the_loop(name: str, zero: bool) -> None:
    model = built(name, zero)
    engine, parameters = BookKeeping(), list(model.parameters())
    objective = Objective(model, curved)
    for size in (B, 1, 2, B, 3):
        batch = batch_of(torch.randn(size, B, dtype=torch.float64), size)
        expected = singles(model, curved, batch)
        assert_matches(engine.differentiate(objective, parameters, batch), expected, 1e-9)


@pytest.mark.parametrize("name", ZOO)
def test_agrees_in_a_loop_of_ones_own(name: str) -> None:
    model = built(name, False)
    engine, parameters = BookKeeping(), list(model.parameters())
    objective = Objective(model, curved)
    for size in (B, 1, 2, B):
        x = torch.randn(size, B, dtype=torch.float64)
        with engine.record(objective, parameters, batch_of(x, size)) as recorder:
            losses = objective(x)
        torch.testing.assert_close(losses, objective(x))
        try:
            found = recorder.differentiate(losses)
        except SordinoError:
            return
        assert_matches(found, singles(model, curved, batch_of(x, size)), 1e-9)


def hinge(model: nn.Module, x: Tensor) -> Tensor:
    """Flat for some of the records."""
    return torch.relu(model(x)[:, 0] + x[:, -1])


def test_silent_examples_prove_nothing_about_later_batches() -> None:
    """Only the first example of the first batch has a gradient, at the first of as many positions as examples."""
    torch.manual_seed(0)
    model = Apply(lambda m, x: (x[:, :, None] * m.e(torch.arange(B)))[:, 0], e=nn.Embedding(B, B)).double()
    engine, parameters, objective = BookKeeping(), list(model.parameters()), Objective(model, hinge)
    first = torch.randn(B, B, dtype=torch.float64)
    first[:, -1] = torch.tensor([100.0, -100.0, -100.0, -100.0])
    second = torch.randn(B, B, dtype=torch.float64)
    second[:, -1] = 100
    for x in (first, second, first):
        batch = batch_of(x, B)
        assert_matches(engine.differentiate(objective, parameters, batch), singles(model, hinge, batch), 1e-9)


def test_what_was_shared_in_another_course_of_the_loss() -> None:
    """The position table is the second operation of one course; in the other that is a layer behind another one."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        if m.training:
            return m.a(x)[:, :, None].mul(m.e(torch.arange(B))).sum(1)
        hidden = torch.tanh(x * m.p)
        return m.a(hidden) + m.e(x.abs().long() % B).sum(1)

    model = Apply(forward, p=(B,), a=nn.Linear(B, B), e=nn.Embedding(B, B)).double()
    engine, parameters, objective = BookKeeping(), list(model.parameters()), Objective(model, curved)
    for course in (True, False, True, False):
        model.train(course)
        batch = batch_of(torch.randn(B, B, dtype=torch.float64), B)
        assert_matches(engine.differentiate(objective, parameters, batch), singles(model, curved, batch), 1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("operation", ["addcmul", "transposed", "einsum"])
def test_a_bad_example_touches_only_itself(operation: str, bad: float) -> None:
    """Where one example's gradient needs the whole batch, an infinity of another one must not reach it as 0 * inf."""
    forward: Callable[[Any, Tensor], Tensor] = {
        "addcmul": lambda m, x: torch.addcmul(x, m.p, x.square()),
        "transposed": lambda m, x: torch.addcmul(x.t(), m.p[:, None], x.t().square()).t(),
        "einsum": lambda m, x: torch.einsum("ib,i,ib->b", x.t(), m.p, x.t())[:, None],
    }[operation]
    torch.manual_seed(0)
    model = Apply(forward, p=(B,)).double()
    engine, parameters, objective = BookKeeping(), list(model.parameters()), Objective(model, curved)
    x = torch.randn(B, B, dtype=torch.float64)
    x[1, 2] = bad
    batch = batch_of(x, B)
    expected = singles(model, curved, batch)
    found = engine.differentiate(objective, parameters, batch)
    wanted = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in expected])
    assert not torch.isfinite(found.norms[1])
    torch.testing.assert_close(found.norms[[0, 2, 3]], wanted[[0, 2, 3]])
    (total,) = found.weighted_sum(torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(total, expected[0][0] + expected[2][0] + expected[3][0])
