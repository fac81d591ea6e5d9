"""One recurrent layer as a differentiable function of its input and initial state, its weights left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.rules.recurrent_cells import Cell, Trace


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

    def examples_first(self, steps: Tensor) -> Tensor:
        """[time, examples, ...] as [examples, time, ...] in the order in which the examples came."""
        first = steps.transpose(0, 1)
        if self.sources is None:
            return first
        return torch.empty_like(first).index_copy_(0, self.sources, first)


@dataclass(frozen=True)
class Weights:
    """A layer's weights for all directions: input [d, in, k·size], bias, hidden [d, state, k·size], projection.

    The blocks that a tanh follows are doubled, see `recurrent_cells`.
    """

    input: Tensor
    bias: Tensor
    hidden: Tensor
    hidden_plain: Tensor
    project: Tensor | None
    size: int

    @staticmethod
    def of(cell: Cell, parameters: Sequence[Sequence[Tensor]], has_biases: bool) -> Weights:
        into, onto = list(cell.input_blocks), list(range(cell.blocks)[cell.recurrent])
        size = len(parameters[0][0]) // len(into)
        scale = torch.ones(cell.blocks, 1, dtype=parameters[0][0].dtype, device=parameters[0][0].device)
        scale[list(cell.doubled)] = 2

        def place(weight: Tensor, blocks: list[int]) -> Tensor:
            placed = weight.new_zeros(cell.blocks, size, *weight.shape[1:])
            placed[blocks] = weight.unflatten(0, (len(blocks), size))
            return placed

        def together(each: list[Tensor]) -> Tensor:
            scaled = [placed * scale.reshape(-1, *[1] * (placed.dim() - 1)) for placed in each]
            return torch.stack([placed.flatten(0, 1) for placed in scaled])

        input = together([place(one[0], into) for one in parameters]).transpose(1, 2)
        used = slice(onto[0] * size, (onto[-1] + 1) * size)
        hidden = together([place(one[1], onto) for one in parameters])[:, used].transpose(1, 2).contiguous()
        plain = torch.stack([one[1] for one in parameters]).transpose(1, 2)
        bias = torch.zeros_like(input[:, 0])
        if has_biases:
            bias = together([place(one[2], into) + place(one[3], onto) for one in parameters])
        count = 4 if has_biases else 2
        project = (
            torch.stack([one[count] for one in parameters]).transpose(1, 2) if len(parameters[0]) > count else None
        )
        return Weights(input, bias.unsqueeze(1), hidden, plain, project, size)


class Layer:
    """Runs a cell over time and remembers what its parameters' shares look at."""

    def __init__(self, cell: Cell, weights: Weights, order: Order) -> None:
        self.cell, self.weights, self.order = cell, weights, order
        self.on_gates: Callable[[Tensor], None] = lambda g: None
        self.on_states: Callable[[Tensor], None] | None = None
        self.final: Callable[[], bool] = lambda: True
        self.inputs: Tensor
        self.trace: Trace

    def run(self, steps: Tensor, state: Tensor, cell_state: Tensor | None, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """[time, examples, in] to ([time, examples, directions * state], last cells [directions, examples, size])."""
        result: tuple[Tensor, Tensor] = OverTime.apply(steps, state, cell_state, anchor, self)  # type: ignore[no-untyped-call]
        return result

    def forward(self, steps: Tensor, state: Tensor, cell_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weights, directions = self.weights, len(self.weights.input)
        steps, state = steps.to(weights.input.dtype), state.to(weights.input.dtype)
        time, examples = steps.shape[:2]
        self.inputs = torch.stack([steps, self.order.reversed(steps)]) if directions == 2 else steps.unsqueeze(0)
        gates = torch.baddbmm(weights.bias, self.inputs.flatten(1, 2), weights.input).unflatten(1, (time, examples))
        states = gates.new_empty(directions, time + 1, examples, state.shape[-1])
        states[:, 0] = state
        self.trace = Trace(gates, states)
        if cell_state is not None:
            self.trace.cells = gates.new_empty(directions, time + 1, examples, weights.size)
            self.trace.cells[:, 0] = cell_state
        self.cell.forward(self.trace, weights.hidden, weights.project)
        output = self.to_time(states[:, 1:]).flatten(2)
        return output, None if cell_state is None else self.last_cells()

    def to_time(self, each: Tensor) -> Tensor:
        """[directions, time, examples, n], each in its own order, to [time, examples, directions, n] in time's."""
        if len(each) == 1:
            return each[0].unsqueeze(2).clone()
        return torch.stack([each[0], self.order.reversed(each[1])], 2)

    def last_cells(self) -> Tensor:
        cells = self.trace.cells
        assert cells is not None
        if self.order.lengths is None:
            return cells[:, -1].clone()
        return cells[:, self.order.lengths, torch.arange(cells.shape[2])]

    def backward(self, d_output: Tensor | None, d_cell: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the input of every direction and of the initial state; the gates' go to their shares."""
        trace = self.trace if self.final() else Trace(**{**vars(self.trace), "gates": self.trace.gates.clone()})
        directions = len(trace.gates)
        d_states = torch.zeros_like(trace.states[:, 1:])
        if d_output is not None:
            apart = d_output.unflatten(-1, (directions, -1))
            d_states[0] = apart[:, :, 0]
            if directions == 2:
                d_states[1] = self.order.reversed(apart[:, :, 1])
        hidden = self.weights.hidden_plain
        first = self.cell.backward(trace, hidden, self.weights.project, d_states, self.d_cells(d_cell))
        gates = trace.gates
        self.on_gates(self.order.examples_first(gates.permute(1, 2, 0, 3)).flatten(2))
        if self.on_states is not None:
            self.on_states(self.order.examples_first(d_states.permute(1, 2, 0, 3)).flatten(2))
        return gates, *first

    def d_cells(self, d_cell: Tensor | None) -> Tensor | None:
        """The gradient of the last cells at each sequence's last step."""
        if d_cell is None or self.trace.cells is None:
            return None
        all_steps = torch.zeros_like(self.trace.cells[:, 1:])
        if self.order.lengths is None:
            all_steps[:, -1] = d_cell
        else:
            all_steps[:, self.order.lengths - 1, torch.arange(all_steps.shape[2])] = d_cell
        return all_steps

    def d_input(self, gates: Tensor) -> Tensor:
        """[time, examples, in] from the gates' gradients of all directions."""
        plain = self.weights.input.clone()
        doubled = torch.tensor(self.cell.doubled, dtype=torch.long)
        plain.unflatten(2, (self.cell.blocks, -1))[:, :, doubled] /= 2
        each: Tensor = (gates.flatten(1, 2) @ plain.transpose(1, 2)).unflatten(1, gates.shape[1:3])
        return each[0] if len(each) == 1 else each[0] + self.order.reversed(each[1])

    def seen(self, direction: int) -> Tensor:
        """Inputs [examples, time, in] in a direction's order."""
        return self.order.examples_first(self.inputs[direction])

    def remembered(self, direction: int) -> Tensor:
        """States before each step, [examples, time, state]."""
        return self.order.examples_first(self.trace.states[direction, :-1])

    def unprojected(self, direction: int) -> Tensor:
        """States before their projection, [examples, time, size]."""
        assert self.trace.raw is not None
        return self.order.examples_first(self.trace.raw[direction])


class OverTime(torch.autograd.Function):
    """A layer's run for autograd: input and initial state are differentiated, the anchor makes it always happen."""

    @staticmethod
    def forward(
        ctx: Any, steps: Tensor, state: Tensor, cell: Tensor | None, anchor: Tensor, layer: Layer
    ) -> tuple[Tensor, Tensor | None]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        with torch.autocast(steps.device.type, enabled=False):
            return layer.forward(steps, state, cell)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gates, d_state, d_cell = ctx.layer.backward(gradients[0], gradients[1] if len(gradients) > 1 else None)
        needs = ctx.needs_input_grad
        d_steps = ctx.layer.d_input(gates) if needs[0] else None
        return d_steps, d_state if needs[1] else None, d_cell if needs[2] else None, None, None
