"""One recurrent layer as a differentiable function of its input and initial state, its weights left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.recurrent.cells import RecurrentCell, Unrolled


@dataclass(frozen=True)
class Order:
    """The order of time steps and examples: `lengths` of sorted packed sequences, and where each came from."""

    lengths: Tensor | None
    sources: Tensor | None = None

    def reversed(self, steps: Tensor) -> Tensor:
        """[time, examples, ...] with every sequence turned around within its length."""
        if self.lengths is None:
            return steps.flip(0)
        time = torch.arange(len(steps)).unsqueeze(1)
        back = self.lengths - 1 - time
        index = torch.where(back >= 0, back, time)
        return steps[index.to(steps.device), torch.arange(steps.shape[1], device=steps.device)]

    def last(self, output: Tensor, directions: int) -> Tensor:
        """[directions, examples, state]: each direction's state after its last step."""
        forth, *back = output.unflatten(-1, (directions, -1)).unbind(2)
        if self.lengths is None:
            ends = forth[-1]
        else:
            index = (self.lengths - 1).to(output.device)
            ends = forth[index, torch.arange(output.shape[1], device=output.device)]
        return torch.stack([ends, *(each[0] for each in back)])

    def unsorted(self, rows: Tensor) -> Tensor:
        """Rows of sequences in the order in which their examples came."""
        return rows if self.sources is None else torch.empty_like(rows).index_copy_(0, self.sources, rows)


@dataclass(frozen=True)
class Weights:
    """A layer's weights for all directions, as the cells want them.

    `forth` [directions, inputs + 1 + state, blocks * size] maps what a step sees to its gates, with the blocks that a
    tanh follows doubled; `to_input` and `to_state` map gradients of gates back; `project` is an LSTM's projection.
    """

    forth: Tensor
    to_input: Tensor
    to_state: Tensor
    project: Tensor | None
    inputs: int
    size: int

    @staticmethod
    def of(cell: RecurrentCell, parameters: Sequence[Sequence[Tensor]], has_biases: bool) -> Weights:
        first = parameters[0][0]
        inputs, size = first.shape[1], len(first) // len(cell.input_blocks)
        into, onto = list(cell.input_blocks), list(cell.state_blocks)
        state = parameters[0][1].shape[1]
        full = first.new_zeros(len(parameters), cell.blocks, size, inputs + 1 + state)
        for placed, (w_ih, w_hh, *rest) in zip(full, parameters, strict=True):
            placed[into, :, :inputs] = w_ih.unflatten(0, (len(into), size))
            placed[onto, :, inputs + 1 :] = w_hh.unflatten(0, (len(onto), size))
            if has_biases:
                placed[into, :, inputs] += rest[0].unflatten(0, (len(into), size))
                placed[onto, :, inputs] += rest[1].unflatten(0, (len(onto), size))
        to_input = full[..., :inputs].flatten(1, 2).contiguous()
        to_state = torch.stack([w_hh for _, w_hh, *_ in parameters])
        full[:, list(cell.doubled)] *= 2
        count = 4 if has_biases else 2
        project = None
        if len(parameters[0]) > count:
            project = torch.stack([one[count] for one in parameters]).transpose(1, 2)
        return Weights(full.flatten(1, 2).transpose(1, 2).contiguous(), to_input, to_state, project, inputs, size)


class RecurrentLayer:
    """Runs a cell over time and keeps what its parameters' gradients are made of."""

    trace: Unrolled

    def __init__(self, cell: RecurrentCell, weights: Weights, order: Order) -> None:
        self.cell, self.weights, self.order = cell, weights, order
        self.on_gates: Callable[[Tensor], None] = lambda g: None
        self.on_states: Callable[[Tensor], None] | None = None
        self.final: Callable[[], bool] = lambda: True

    def run(self, steps: Tensor, state: Tensor, cell_state: Tensor | None, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """[time, examples, in] to ([time, examples, directions * state], last cells [directions, examples, size])."""
        result: tuple[Tensor, Tensor] = OverTime.apply(steps, state, cell_state, anchor, self)  # type: ignore[no-untyped-call]
        return result

    def forward(self, steps: Tensor, state: Tensor, cell_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weights, (time, examples, inputs) = self.weights, steps.shape
        directions, width, gates = weights.forth.shape
        seen = weights.forth.new_empty(time + 1, directions, examples, width)
        seen[:-1, 0, :, :inputs] = steps
        if directions == 2:
            seen[:-1, 1, :, :inputs] = self.order.reversed(steps)
        seen[..., inputs] = 1
        states = seen[..., inputs + 1 :]
        states[0] = state
        self.trace = Unrolled(seen, seen.new_empty(time, directions, examples, gates), states)
        if cell_state is not None:
            self.trace.cells = seen.new_empty(time + 1, directions, examples, weights.size)
            torch.mul(cell_state, 2, out=self.trace.cells[0])
        self.cell.forward(self.trace, weights.forth, weights.project)
        return self.in_time(states[1:]).flatten(2), None if cell_state is None else self.last_cells()

    def in_time(self, each: Tensor) -> Tensor:
        """[time, directions, examples, n], each direction in its own order, to [time, examples, directions, n]."""
        if each.shape[1] == 1:
            return each[:, 0].unsqueeze(2).clone()
        return torch.stack([each[:, 0], self.order.reversed(each[:, 1])], 2)

    def last_cells(self) -> Tensor:
        cells = self.trace.cells
        assert cells is not None
        if self.order.lengths is None:
            return cells[-1] / 2
        rows = torch.arange(cells.shape[2])
        return cells[self.order.lengths, :, rows].transpose(0, 1) / 2

    def backward(self, d_output: Tensor | None, d_cell: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the gates and of the initial state; the former also go to the parameters' shares."""
        trace = self.trace if self.final() else replace(self.trace, gates=self.trace.gates.clone())
        if d_output is None:
            d_states = torch.zeros_like(trace.states[1:])
        else:
            apart = d_output.unflatten(-1, (trace.gates.shape[1], -1)).to(trace.gates.dtype)
            back = [self.order.reversed(apart[:, :, 1])] if apart.shape[2] == 2 else []
            d_states = torch.stack([apart[:, :, 0], *back], 1)
        weights = self.weights
        first = self.cell.backward(trace, weights.to_state, weights.project, d_states, self.d_cells(d_cell))
        if trace is self.trace:
            trace.cells = None  # before the parameters' shares need room
        if self.on_states is None:
            del d_states
        self.on_gates(self.order.unsorted(trace.gates.permute(2, 0, 1, 3)))
        if self.on_states is not None:
            self.on_states(self.order.unsorted(d_states.permute(2, 0, 1, 3)))
        return trace.gates, *first

    def d_cells(self, d_cell: Tensor | None) -> Tensor | None:
        """The gradient of the last cells at each sequence's last step."""
        if d_cell is None or self.trace.cells is None:
            return None
        all_steps = torch.zeros_like(self.trace.cells[1:])
        if self.order.lengths is None:
            all_steps[-1] = d_cell
        else:
            all_steps[self.order.lengths - 1, :, torch.arange(all_steps.shape[2])] = d_cell.transpose(0, 1)
        return all_steps

    def d_input(self, gates: Tensor) -> Tensor:
        """[time, examples, in] from the gates' gradients of all directions."""
        each = zip(gates.unbind(1), self.weights.to_input.unbind(), strict=True)
        first, *second = (torch.bmm(one, weight.expand(len(gates), -1, -1)) for one, weight in each)
        return first.add_(self.order.reversed(second[0])) if second else first

    def seen(self) -> Tensor:
        """What the steps saw, [examples, time, directions, inputs + 1 + state]."""
        return self.order.unsorted(self.trace.seen[:-1].permute(2, 0, 1, 3))

    def unprojected(self) -> Tensor:
        """States before their projection, [examples, time, directions, size]."""
        assert self.trace.raw is not None
        return self.order.unsorted(self.trace.raw.permute(2, 0, 1, 3))


class OverTime(torch.autograd.Function):
    """A layer's run for autograd: input and initial state are differentiated, the anchor makes it always happen."""

    @staticmethod
    def forward(
        ctx: Any, steps: Tensor, state: Tensor, cell: Tensor | None, anchor: Tensor, layer: RecurrentLayer
    ) -> tuple[Tensor, Tensor | None]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        with torch.autocast(steps.device.type, enabled=False):
            return layer.forward(steps, state, cell)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        layer: RecurrentLayer = ctx.layer
        gates, d_state, d_cell = layer.backward(*gradients)
        needs = ctx.needs_input_grad
        d_steps = layer.d_input(gates) if needs[0] else None
        if layer.final():
            del layer.trace  # the graph would hold it until all of the backward pass is done
        return d_steps, d_state if needs[1] else None, d_cell if needs[2] else None, None, None
