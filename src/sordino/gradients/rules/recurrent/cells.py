"""LSTM, GRU and RNN over time at native speed: both directions at once, in place, gradients of gates left behind.

Tensors are [time, directions, examples, features], time in each direction's own order, so that one step is contiguous.
A step sees (input, 1, state) side by side and multiplies once by (W_ih, bias, W_hh) stacked. `forward` leaves activated
gates, `backward` overwrites them by the gradients of their pre-activations, a block of steps at a time, so that all
that does not depend on the recursion is computed for many steps at once and stays in the cache.
tanh(z) = 2σ(2z) - 1 throughout: torch's vectorised sigmoid is several times faster than its tanh. The doubling of z is
folded into the weights (`doubled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Unrolled:
    """What a pass over time leaves behind.

    `seen` [time + 1, …, inputs + 1 + state] is what each step saw, the last one only for its state. An LSTM also has
    `cells` (doubled, one step more), and `raw` states if they are projected.
    """

    seen: Tensor
    gates: Tensor
    states: Tensor
    cells: Tensor | None = None
    raw: Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of steps, last first, whose gates take about a quarter of a megabyte."""
        steps = len(self.gates)
        count = max(1, 2**16 // max(1, self.gates[0].numel()))
        for stop in range(steps, 0, -count):
            yield max(0, stop - count), stop


class RecurrentCell(Protocol):
    """A recurrence over `blocks` gates: where torch's input blocks go, which the state enters, which a tanh follows."""

    blocks: int
    input_blocks: tuple[int, ...]
    state_blocks: tuple[int, ...]
    doubled: tuple[int, ...]

    def forward(self, trace: Unrolled, weights: Tensor, project: Tensor | None) -> None:
        """Fill states, gates and cells; `weights` is [directions, inputs + 1 + state, blocks * size]."""
        ...

    def backward(
        self, trace: Unrolled, back: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Overwrite gates by their gradients, `d_states` by their totals; return the initial state's gradients."""
        ...


class Rnn:
    """h = tanh(pre), or relu."""

    blocks = 1
    input_blocks: tuple[int, ...] = (0,)
    state_blocks: tuple[int, ...] = (0,)

    def __init__(self, relu: bool) -> None:
        self.relu = relu
        self.doubled: tuple[int, ...] = () if relu else (0,)

    def forward(self, trace: Unrolled, weights: Tensor, project: Tensor | None) -> None:
        states = trace.states.unbind()
        for t, (seen, gate) in enumerate(zip(trace.seen[:-1].unbind(), trace.gates.unbind(), strict=True)):
            torch.bmm(seen, weights, out=gate)
            states[t + 1].copy_(gate.relu_() if self.relu else gate.sigmoid_().mul_(2).sub_(1))

    def backward(
        self, trace: Unrolled, back: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gates, d_state = trace.gates.unbind(), d_states.unbind()
        for start, stop in trace.blocks():
            block = trace.gates[start:stop]
            block.sign_() if self.relu else block.square_().neg_().add_(1)
            for t in range(stop - 1, start - 1, -1):
                gates[t].mul_(d_state[t])
                if t:
                    d_state[t - 1].baddbmm_(gates[t], back)
        return gates[0] @ back, None


class Lstm:
    """Gates i, f, g, o as in torch; c = f c + i g, h = o tanh(c), projected if there is a projection."""

    blocks = 4
    input_blocks: tuple[int, ...] = (0, 1, 2, 3)
    state_blocks: tuple[int, ...] = (0, 1, 2, 3)
    doubled: tuple[int, ...] = (2,)

    def forward(self, trace: Unrolled, weights: Tensor, project: Tensor | None) -> None:
        assert trace.cells is not None
        squashed = torch.empty_like(trace.cells[0])
        trace.raw = trace.states[1:] if project is None else torch.empty_like(trace.cells[1:])
        cells, raws, states = trace.cells.unbind(), trace.raw.unbind(), trace.states.unbind()
        each = [block.unbind() for block in trace.gates.split(trace.cells.shape[-1], -1)]
        steps = zip(trace.seen[:-1].unbind(), trace.gates.unbind(), *each, strict=True)
        for t, (seen, gate, i, f, g, o) in enumerate(steps):
            torch.bmm(seen, weights, out=gate).sigmoid_()
            # 2c' = f 2c + 2 i (2g - 1), and h = o (2σ(2c') - 1): fewest operations, no copies
            cell = torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g, value=4).sub_(i, alpha=2)
            torch.sigmoid(cell, out=squashed)
            torch.addcmul(o, o, squashed, value=-2, out=raws[t]).neg_()
            if project is not None:
                states[t + 1].copy_(raws[t] @ project)

    def backward(
        self, trace: Unrolled, back: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert trace.cells is not None
        size = trace.cells.shape[-1]
        gates, d_state = trace.gates.unbind(), d_states.unbind()
        by_state = trace.gates[..., 3 * size :].unbind()
        by_cell = trace.gates[..., : 3 * size].unflatten(-1, (3, size)).unbind()
        d_cell = torch.zeros_like(trace.cells[0])
        to_three = d_cell.unsqueeze(2)
        unproject = None if project is None else project.transpose(1, 2)
        longest = next(trace.blocks())[1] - next(trace.blocks())[0]
        room = [torch.empty_like(each[:longest]) for each in (trace.gates, trace.cells, trace.cells)]
        for start, stop in trace.blocks():
            keep, through = self.factors(trace, start, stop, *(each[: stop - start] for each in room))
            for t in range(stop - 1, start - 1, -1):
                if t + 1 < len(gates):
                    d_state[t].baddbmm_(gates[t + 1], back)
                d_raw = d_state[t] if unproject is None else d_state[t] @ unproject
                d_cell.addcmul_(d_raw, through[t - start], value=4)
                if d_cells is not None:
                    d_cell.add_(d_cells[t])
                by_state[t].mul_(d_raw)
                by_cell[t].mul_(to_three)
                d_cell.mul_(keep[t - start])
        return gates[0] @ back, d_cell

    def factors(
        self, trace: Unrolled, start: int, stop: int, others: Tensor, keep: Tensor, through: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Overwrite a block of gates by d(gate)/d(cell or state), its slope times what the gate was multiplied with.

        Returns f and a quarter of d(state)/d(cell), which the loop needs, in the room given for them. With s = σ(2z):
        tanh(z) = 2s - 1 and its slope is 4 s (1 - s).
        """
        assert trace.cells is not None
        block, size = trace.gates[start:stop], keep.shape[-1]
        i, f, g, o = block.split(size, -1)
        of_i, of_f, of_g, of_o = others.split(size, -1)
        less = block.new_tensor(-1.0)
        squashed = torch.sigmoid(trace.cells[start + 1 : stop + 1], out=through)
        torch.add(less, g, alpha=2, out=of_i)
        torch.mul(trace.cells[start:stop], 0.5, out=of_f)
        torch.mul(i, 4, out=of_g)
        torch.add(less, squashed, alpha=2, out=of_o)
        keep.copy_(f)
        through.addcmul_(squashed, squashed, value=-1).mul_(o)
        block.addcmul_(block, block, value=-1).mul_(others)
        return keep, through


class Gru:
    """Blocks n, r, z and m, the state's part of n: n = tanh(pre_n + r m), h = n + z (h - n)."""

    blocks = 4
    input_blocks: tuple[int, ...] = (1, 2, 0)
    state_blocks: tuple[int, ...] = (1, 2, 3)
    doubled: tuple[int, ...] = (0, 3)

    def forward(self, trace: Unrolled, weights: Tensor, project: Tensor | None) -> None:
        size, states = trace.states.shape[-1], trace.states.unbind()
        for t, (seen, gate) in enumerate(zip(trace.seen[:-1].unbind(), trace.gates.unbind(), strict=True)):
            n, r, z, m = torch.bmm(seen, weights, out=gate).split(size, -1)
            gate[..., size : 3 * size].sigmoid_()
            n.addcmul_(r, m).sigmoid_().mul_(2).sub_(1)
            torch.lerp(n, states[t], z, out=states[t + 1])

    def backward(
        self, trace: Unrolled, back: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        size = trace.states.shape[-1]
        gates, given = trace.gates.unbind(), d_states.unbind()
        d_state = torch.zeros_like(given[0])
        for start, stop in trace.blocks():
            keep = self.factors(trace, start, stop)
            for t in range(stop - 1, start - 1, -1):
                d_state.add_(given[t])
                n, r, z, m = gates[t].split(size, -1)
                n.mul_(d_state)
                z.mul_(d_state)
                r.mul_(n)
                m.mul_(n)
                d_state.mul_(keep[t - start]).baddbmm_(gates[t][..., size:], back)
        return d_state, None

    def factors(self, trace: Unrolled, start: int, stop: int) -> Tensor:
        """Overwrite a block's n, z by d/d(state) and its r, m by d/d(n's pre-activation); return z for the loop."""
        n, r, z, m = trace.gates[start:stop].split(trace.states.shape[-1], -1)
        keep: Tensor = z.clone()
        z.sub_(z * z).mul_(trace.states[start:stop] - n)
        n.square_().neg_().add_(1).mul_(1 - keep)
        active = r.clone()
        r.sub_(r * r).mul_(m).mul_(0.5)  # m was doubled together with n
        m.copy_(active)
        return keep
