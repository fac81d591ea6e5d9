"""torch.lstm, gru, rnn_tanh and rnn_relu, as the stock modules call them: gates are linear maps of input and state.

With the gates' pre-activation gradients G [examples, time, gates] a recurrence is two linear layers: the weights see
Gᵀ X and Gᵀ H (H the states before each step), the biases the sum of G over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.rules.base import (
    Call,
    Examples,
    NoRule,
    ParameterShare,
    PerExample,
    Rules,
    Settle,
    name_of,
    precise,
)
from sordino.gradients.rules.linear import Outer
from sordino.gradients.rules.recurrent.cells import Gru, Lstm, RecurrentCell, Rnn
from sordino.gradients.rules.recurrent.gradients import Products, Slot
from sordino.gradients.rules.recurrent.layer import Order, RecurrentLayer, Weights


@dataclass(frozen=True)
class Options:
    """The trailing arguments of torch's recurrent functions."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1


def make_rule(cell: RecurrentCell) -> Callable[..., Any]:
    """The rule of one recurrent function; its padded and packed forms differ in their arguments."""

    def rule(call: Call, data: Tensor, second: Any, third: Any, fourth: Any, *rest: Any) -> Any:
        if isinstance(fourth, bool):
            options, batch_first = Options(fourth, *rest[:4]), rest[4]
            steps = data.transpose(0, 1) if batch_first else data
            output, *last = run_layers(call, cell, steps, Order(None), second, third, options)
            return (output.transpose(0, 1) if batch_first else output, *last)
        return run_packed(call, cell, data, second, third, fourth, Options(*rest))

    return rule


def run_packed(
    call: Call,
    cell: RecurrentCell,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    weights: Sequence[Tensor],
    options: Options,
) -> Any:
    """Packed sequences, run as padded ones: what follows a sequence's end reaches no loss and so has no gradient."""
    padded, lengths = torch._VF._pad_packed_sequence(data, batch_sizes, False, 0.0, len(batch_sizes))
    order = Order(lengths, call.order_of(batch_sizes))
    output, *last = run_layers(call, cell, padded, order, hx, weights, options)
    return (torch._VF._pack_padded_sequence(output, lengths, False)[0], *last)


def run_layers(
    call: Call, cell: RecurrentCell, steps: Tensor, order: Order, hx: Any, weights: Sequence[Tensor], options: Options
) -> Any:
    """All layers on [time, examples, features]: the output, the last states and, for an LSTM, the last cells."""
    call.only(*weights)
    if steps.dim() != 3 or len(steps) == 0:
        raise NoRule("recurrent: needs sequences with a dimension for examples")
    is_lstm, directions = isinstance(cell, Lstm), options.directions
    states, cells = hx if is_lstm else (hx, None)
    each = len(weights) // (options.num_layers * directions)
    last_states, last_cells = [], []
    for layer in range(options.num_layers):
        chosen = slice(layer * directions, (layer + 1) * directions)
        mine = [weights[each * d : each * (d + 1)] for d in range(chosen.start, chosen.stop)]
        if layer and options.train and options.dropout:
            steps = F.dropout(steps, options.dropout)
        first_cell = None if cells is None else cells[chosen]
        steps, last_cell = run_layer(call, cell, steps, order, states[chosen], first_cell, mine, options.has_biases)
        last_states.append(order.last(steps, directions))
        last_cells.append(last_cell)
    return (steps, torch.cat(last_states), torch.cat(last_cells)) if is_lstm else (steps, torch.cat(last_states))


def run_layer(
    call: Call,
    cell: RecurrentCell,
    steps: Tensor,
    order: Order,
    state: Tensor,
    cell_state: Tensor | None,
    parameters: Sequence[Sequence[Tensor]],
    has_biases: bool,
) -> tuple[Tensor, Tensor]:
    """One layer in all its directions, with the shares of its parameters."""
    plain = [[call.plain(parameter) for parameter in one] for one in parameters]
    weights = Weights.of(cell, plain, has_biases)
    layer = RecurrentLayer(cell, weights, order)
    products = Products(layer)
    shares = [share for d, one in enumerate(parameters) for share in make_shares(products, d, one, has_biases)]
    shape = (steps.shape[1], len(steps), len(parameters))
    layer.on_gates = call.receive((*shape, weights.forth.shape[-1]), (), shares, 1)
    if weights.project is not None:
        projected = [ParameterShare(one[-1], share_projection(layer, d)) for d, one in enumerate(parameters)]
        layer.on_states = call.receive((*shape, weights.project.shape[-1]), (), projected, 1)
    layer.final = call.final
    return layer.run(steps, state, cell_state, call.anchor)


def make_shares(
    products: Products, direction: int, parameters: Sequence[Tensor], has_biases: bool
) -> list[ParameterShare]:
    """Input weight, state weight and, if there are, both biases of one direction."""
    cell, inputs = products.layer.cell, products.layer.weights.inputs
    from_input, one, from_state = slice(0, inputs), slice(inputs, inputs + 1), slice(inputs + 1, None)
    places = [
        Slot(direction, cell.input_blocks, from_input),
        Slot(direction, cell.state_blocks, from_state),
        Slot(direction, cell.input_blocks, one, squeeze=True),
        Slot(direction, cell.state_blocks, one, squeeze=True),
    ]
    kept = zip(parameters[: 4 if has_biases else 2], places, strict=False)
    return [ParameterShare(parameter, products.settle(place)) for parameter, place in kept]


def share_projection(layer: RecurrentLayer, direction: int) -> Settle:
    """The share of an LSTM's projection: it maps raw states to states."""

    def settle(g: Tensor, at: Examples) -> PerExample:
        raw = layer.unprojected()[:, :, direction]
        return Outer(precise(at.rows(raw)), precise(at.rows(g[:, :, direction])))

    return settle


def make_cell_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm_cell and similar cells: one step written with F.linear, each of which is book-kept by its own rule."""

    def rule(call: Call, x: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = hx[0] if isinstance(hx, (tuple, list)) else hx
        return function(call.use(F.linear, x, w_ih, b_ih), call.use(F.linear, state, w_hh, b_hh), hx)

    return rule


def lstm_step(from_input: Tensor, from_state: Tensor, hx: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One LSTM step from its two projections."""
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    cell = torch.sigmoid(f) * hx[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def gru_step(from_input: Tensor, from_state: Tensor, hx: Tensor) -> Tensor:
    """One GRU step from its two projections."""
    (r, z, n), (sr, sz, sn) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + sr) * sn)
    return torch.lerp(new, hx, torch.sigmoid(z + sz))


RULES: Rules = {
    torch.lstm: make_rule(Lstm()),
    torch.gru: make_rule(Gru()),
    torch.rnn_tanh: make_rule(Rnn(relu=False)),
    torch.rnn_relu: make_rule(Rnn(relu=True)),
    torch.lstm_cell: make_cell_rule(lstm_step),
    torch.gru_cell: make_cell_rule(gru_step),
    torch.rnn_tanh_cell: make_cell_rule(lambda x, h, hx: torch.tanh(x + h)),
    torch.rnn_relu_cell: make_cell_rule(lambda x, h, hx: torch.relu(x + h)),
}

OVER_TIME = frozenset(name_of(function) for function in RULES)
"""The names of operations that are called, or call others, for every step of time."""
