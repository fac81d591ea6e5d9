"""Tensors made part by part, folded dimensions, packed sequences, scattered rows: followed, not proven."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.bookkeeping.following import find_dim
from sordino.gradients.bookkeeping.proof import Probe
from sordino.gradients.engine import Objective
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.oracle import assert_matches, batch_of, singles, squared

B = 4
"""The batch, and every other dimension, so that no length tells where the examples are."""


def two_parts(m: Any, x: Tensor) -> Tensor:
    """Keys of latent attention: one part of its own, one that is shared by all heads."""
    mine, shared = m.a(x).unflatten(2, (B, B)), m.b(x).unsqueeze(2).expand(-1, -1, B, -1)
    keys = x.new_empty(*mine.shape[:-1], 2 * B)
    keys[..., :B].copy_(mine)
    keys[..., B:].copy_(shared)
    return keys.tanh()


def step_by_step(m: Any, x: Tensor) -> Tensor:
    states = torch.zeros(B, len(x), B, dtype=x.dtype)
    for t in range(B):
        states[t].copy_(m.b(x[:, t]) * (t + 1))
    return states.transpose(0, 1).tanh()


def written_across(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), B, B, dtype=x.dtype)
    out.transpose(0, 1)[:, :, ::2].copy_(m.b(x).transpose(0, 1)[..., ::2])
    return out.tanh()


def added_to(m: Any, x: Tensor) -> Tensor:
    out = m.b(x) * 1
    out[:, 1].mul_(m.p)
    out[..., 2:].add_(m.b(x)[..., :2])
    return out.tanh()


def heads_first(m: Any, x: Tensor) -> Tensor:
    rows = m.b(x).reshape(-1, 2, B // 2).transpose(0, 1)
    return torch.bmm(rows, m.w).transpose(0, 1).reshape(len(x), -1)


def folded_last(m: Any, x: Tensor) -> Tensor:
    rows = m.b(x).reshape(-1, B).t()
    return torch.einsum("in,io->on", rows, m.q).t().reshape(len(x), -1) * 1.5


def pack(m: Any, x: Tensor) -> PackedSequence:
    lengths = 1 + (10 * x[:, 0, 0].abs()).long() % B
    return pack_padded_sequence(m.b(x), lengths, batch_first=True, enforce_sorted=False)


def packed(m: Any, x: Tensor) -> Tensor:
    """Outputs, last states and cells of a recurrent layer in two directions."""
    outputs, states = m.rnn(pack(m, x))
    rows, _ = pad_packed_sequence(outputs, batch_first=True, total_length=B)
    return torch.cat([rows.flatten(1), *(last.transpose(0, 1).flatten(1) for last in states)], 1)


def packed_by_hand(m: Any, x: Tensor) -> Tensor:
    """The user has sorted the sequences, and changes what is packed."""
    lengths = 1 + (10 * x[:, 0, 0].abs()).long() % B
    order = lengths.argsort(descending=True)
    rows = pack_padded_sequence(x[order], lengths[order], batch_first=True)
    last: Tensor = m.rnn(PackedSequence(m.b(rows.data), rows.batch_sizes))[1][0][-1]
    return last[order.argsort()]


def scattered(m: Any, x: Tensor) -> Tensor:
    """Each example's rows in an order of its own."""
    rows, targets = m.b(x).flatten(0, 1), x[..., 0].argsort(1) + B * torch.arange(len(x)).unsqueeze(1)
    out = torch.zeros_like(rows).scatter_add(0, targets.flatten().unsqueeze(1).expand_as(rows), rows * m.p)
    return out.unflatten(0, (len(x), B)).tanh()


FOLLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two parts": two_parts,
    "step by step": step_by_step,
    "written across": written_across,
    "added to": added_to,
    "bmm, heads first": heads_first,
    "einsum, rows last": folded_last,
    "packed": packed,
    "packed by hand": packed_by_hand,
    "scattered": scattered,
}


def build(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    rnn = nn.LSTM(B, B, bidirectional=True, batch_first=True)
    layers = {"a": nn.Linear(B, B * B), "b": nn.Linear(B, B), "rnn": rnn}
    return Apply(forward, **layers, p=(B,), q=(B, B), w=(2, B // 2, B // 2)).double()


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed_without_a_proof(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FOLLOWED[name])
    engine, objective = BookKeeping(), Objective(model, squared)
    monkeypatch.setattr(Probe, "run", lambda *_: pytest.fail("a backward pass had to prove the places"))
    for size in (B, 3, B):
        batch = batch_of(torch.randn(size, B, B, dtype=torch.float64), size)
        found = engine.differentiate(objective, list(model.parameters()), batch)
        assert not engine._knowledge[objective].refused
        assert_matches(found, singles(model, squared, batch), 1e-9)


def neighbours(m: Any, x: Tensor) -> Tensor:
    """The second part is written with examples where positions are."""
    hidden = m.b(x)
    out = x.new_zeros(B, B, 2 * B)
    out[..., :B].copy_(hidden)
    out[..., B:].copy_(hidden.transpose(0, 1))
    return out.tanh()


def overwritten(m: Any, x: Tensor) -> Tensor:
    """What was written first holds examples elsewhere, and some of it is left."""
    hidden = m.b(x)
    out = hidden.transpose(0, 1) * 1
    out[:, :2].copy_(hidden[:, :2])
    return out.tanh()


def shifted(m: Any, x: Tensor) -> Tensor:
    """Rows of the view begin in the middle of one row and end in the next."""
    out = x.new_zeros(B + 1, B)
    out.as_strided((B, B), (B, 1), 2).copy_(m.b(x)[:, 0])
    return out[:B].tanh()


def scattered_to_neighbours(m: Any, x: Tensor) -> Tensor:
    rows, count = m.b(x).flatten(0, 1), B * len(x)
    targets = (torch.arange(count) + B) % count
    out = torch.zeros_like(rows).scatter_add(0, targets.unsqueeze(1).expand_as(rows), rows)
    return out.unflatten(0, (len(x), B)).tanh()


def crossed_sequences(m: Any, x: Tensor) -> Tensor:
    """After the first step every sequence goes on with another one's rows."""
    rows = pack_padded_sequence(x, torch.full((len(x),), B), batch_first=True)
    first, later = torch.arange(len(rows.data)).tensor_split([len(x)])
    crossed = m.b(rows.data)[torch.cat([first, later.flip(0)])]
    last: Tensor = m.rnn(PackedSequence(crossed, rows.batch_sizes))[1][0][-1]
    return last


@pytest.mark.parametrize("forward", [neighbours, overwritten, shifted, scattered_to_neighbours, crossed_sequences])
def test_mixed_parts_are_not_followed(
    forward: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward passes have to look where the examples are, and mostly find that they are nowhere."""
    model, passes, run = build(forward), [], Probe.run
    monkeypatch.setattr(Probe, "run", lambda *args: (passes.append(1), run(*args)))
    engine, objective = BookKeeping(), Objective(model, squared)
    x = torch.randn(B, B, B, dtype=torch.float64)
    with suppress(UnsupportedModel, RuntimeError):  # of the loop: some take whole batches only
        engine.differentiate(objective, list(model.parameters()), batch_of(x, B))
    assert passes


def list_views() -> list[Tensor]:
    whole = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    cut = [whole[1:], whole[:, 1:3], whole[..., ::2], whole[1], whole[:, 2], whole[..., 3], whole[None], whole[::2]]
    turned = [each.transpose(0, 1) for each in (whole, whole[:, 1:3], whole[..., 1:4])]
    folded = [
        whole.reshape(12, 5),
        whole.reshape(3, 20),
        whole.reshape(3, 2, 2, 5),
        whole[..., :4].unflatten(2, (2, 2)),
    ]
    shapes = [((3, 4, 5), (20, 5, 1), 0), ((2, 4, 5), (20, 5, 1), 3), ((3, 4), (20, 1), 4), ((3, 5), (20, 4), 0)]
    odd = [whole.as_strided(shape, strides, offset) for shape, strides, offset in shapes]
    return [*cut, *turned, *folded, *odd, whole.expand(2, 3, 4, 5), whole.diagonal(0, 1, 2)]


def test_a_dimension_is_found_entry_by_entry_or_not_at_all() -> None:
    """By what the entries say: each holds its own place in the whole tensor."""
    found = []
    for view in list_views():
        whole = view._base
        assert whole is not None
        whole = whole.reshape(3, 4, 5)
        for dim in range(view.dim()):
            mine = find_dim(whole, view, dim)
            if mine is not None:
                stride = whole.stride(mine)
                places = view // stride % whole.shape[mine]
                wanted = torch.arange(view.shape[dim]).reshape([-1 if d == dim else 1 for d in range(view.dim())])
                assert torch.equal(places, wanted.expand_as(places))
                assert view.shape[dim] == whole.shape[mine]
                found.append(mine)
    assert {0, 1, 2} <= set(found)
    assert len(found) > 20


def test_a_dimension_of_another_type_is_not_found() -> None:
    """A complex tensor seen as a real one has strides that count halves: this one's rows look like those of another."""
    whole = torch.zeros(2, 2, 3, dtype=torch.complex64)
    view = torch.view_as_real(whole)
    assert view.stride(1) == whole.stride(0)
    assert [find_dim(whole, view, dim) for dim in range(view.dim())] == [None] * 4
