"""LSTM, GRU and RNN, stock modules in all their forms, equal a loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sordino.gradients.bookkeeping import BookKeeping
from tests.gradients.oracle import check

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bidirectional": {"bidirectional": True},
    "layers": {"num_layers": 2},
    "layers both ways": {"num_layers": 2, "bidirectional": True},
}
CELLS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *args, **options: nn.LSTM(*args, proj_size=2, **options),
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu rnn": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}


class Tagger(nn.Module):
    """Uses outputs and last states, so that all of their gradients matter; optionally learned initial states."""

    def __init__(self, rnn: nn.RNNBase, learned: bool = False) -> None:
        super().__init__()
        self.rnn = rnn
        self.inputs = nn.Linear(3, rnn.input_size)
        directions = rnn.num_layers * (2 if rnn.bidirectional else 1)
        width = rnn.proj_size or rnn.hidden_size
        self.first = nn.Parameter(torch.randn(directions, 1, width)) if learned else None
        self.first_cell = nn.Parameter(torch.randn(directions, 1, rnn.hidden_size)) if learned else None

    def initial(self, size: int) -> Any:
        if self.first is None or self.first_cell is None:
            return None
        first, cell = self.first.expand(-1, size, -1), self.first_cell.expand(-1, size, -1)
        return (first, cell) if isinstance(self.rnn, nn.LSTM) else first

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        size = len(x)
        steps = torch.tanh(self.inputs(x))
        if lengths is not None:
            packed = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
            output, last = self.rnn(packed, self.initial(size))
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        elif self.rnn.batch_first:
            output, last = self.rnn(steps, self.initial(size))
        else:
            output, last = self.rnn(steps.transpose(0, 1), self.initial(size))
            output = output.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        return torch.cat([output.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], 1)


def build(cell: str, form: str, batch_first: bool = True, learned: bool = False) -> Tagger:
    torch.manual_seed(0)
    return Tagger(CELLS[cell](3, 4, batch_first=batch_first, **FORMS[form]), learned)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_padded(cell: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    check(BookKeeping(), build(cell, form), torch.randn(4, 4, 3), 4)
    assert not caplog.records


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_packed(cell: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    lengths = torch.tensor([3, 5, 1, 4])
    engine = BookKeeping()
    model = build(cell, form)
    check(engine, model, (torch.randn(4, 5, 3), lengths), 4)
    check(engine, model, (torch.randn(4, 5, 3), lengths.flip(0)), 4)
    assert not caplog.records


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_learned_initial_states(cell: str, batch_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    check(BookKeeping(), build(cell, "layers both ways", batch_first, learned=True), torch.randn(4, 5, 3), 4)
    assert not caplog.records


@pytest.mark.parametrize("cell", CELLS)
def test_in_double(cell: str) -> None:
    data = torch.randn(3, 5, 3, dtype=torch.float64)
    check(BookKeeping(), build(cell, "layers both ways").double(), data, 3, rtol=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_one_example(cell: str) -> None:
    check(BookKeeping(), build(cell, "bidirectional"), torch.randn(1, 5, 3), 1)


class Stepped(nn.Module):
    """A cell called in the user's own loop over time: as many uses as steps, joined into one."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check(BookKeeping(), Stepped(cell(3, 5)), torch.randn(4, 6, 3), 4)
    assert not caplog.records


def test_dropout_between_layers_is_drawn() -> None:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True))
    data = torch.ones(6, 5, 3)
    parameters = list(model.parameters())
    from sordino.gradients.engine import Objective
    from tests.gradients.oracle import batch_of, squared

    result = BookKeeping().differentiate(Objective(model, squared), parameters, batch_of(data, 6))
    assert len(result.norms.unique()) == 6


def test_several_sequences_per_example(caplog: pytest.LogCaptureFixture) -> None:
    class Document(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x.flatten(0, 1))[1][0].reshape(len(x), -1)

    torch.manual_seed(0)
    check(BookKeeping(), Document(), torch.randn(4, 2, 5, 3), 4)
    assert not caplog.records
