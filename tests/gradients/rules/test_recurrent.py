"""LSTM, GRU and RNN, stock modules in all their forms, equal a loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from sordino.gradients.rules.recurrent import OVER_TIME
from tests.gradients.oracle import batch_of, check, squared

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


def manners(model: nn.Module, data: Any, size: int) -> set[str]:
    parameters = list(model.parameters())
    rows = BookKeeping().describe(Objective(model, squared), parameters, batch_of(data, size))
    return {row.rule for row in rows if row.operation in OVER_TIME}


@pytest.mark.parametrize("steps", [3, 40], ids=["compared", "formed"])
@pytest.mark.parametrize("cell", CELLS)
def test_short_and_long_sequences(cell: str, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """Few steps are compared with each other, of many the products are formed; packed ones lie in another order."""
    model, data, lengths = build(cell, "layers both ways"), torch.randn(5, steps, 3), torch.tensor([2, 3, 1, 3, 2])
    check(BookKeeping(), model, data, 5, rtol=1e-3)
    check(BookKeeping(), model, (data, lengths * steps // 3), 5, rtol=1e-3)
    assert ("gates: formed" if steps == 40 else "gates: Gram matrices") in manners(model, data, 5)
    assert not caplog.records


@pytest.mark.parametrize("steps", [3, 40], ids=["compared", "formed"])
def test_a_bad_sequence_leaves_the_others_alone(steps: int) -> None:
    model, data = build("lstm", "bidirectional"), torch.randn(4, steps, 3)
    data[2, 1] = torch.nan
    parameters, good = list(model.parameters()), [0, 1, 3]
    found = BookKeeping().differentiate(Objective(model, squared), parameters, batch_of(data, 4))
    wanted = BookKeeping().differentiate(Objective(model, squared), parameters, batch_of(data[good], 3))
    assert torch.isnan(found.norms).tolist() == [False, False, True, False]
    torch.testing.assert_close(found.norms[good], wanted.norms)
    sums = zip(
        found.weighted_sum(torch.tensor([1.0, 2, 0, 3])), wanted.weighted_sum(torch.tensor([1.0, 2, 3])), strict=True
    )
    for mine, theirs in sums:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("steps", [3, 40], ids=["compared", "formed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_layer_that_reads_two_sequences(kind: Any, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn: Any = kind(3, 4, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            left, right = x.chunk(2, 1)
            return self.rnn(left)[0][:, -1] * self.rnn(right)[0][:, -1]

    torch.manual_seed(0)
    check(BookKeeping(), Siamese(), torch.randn(4, 2 * steps, 3), 4)
    assert not caplog.records


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
