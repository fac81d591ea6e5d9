"""LSTM, GRU and RNN over time at native speed: both directions at once, in place, gradients of gates left behind.

All tensors are [directions, time, examples, features], time in each direction's own order. The input projections of
all steps are already in `gates`; `forward` turns them into activations, `backward` turns those into gradients of the
pre-activations, with every factor that does not depend on the recursion computed outside the time loop.
tanh(z) = 2σ(2z) - 1 throughout: torch's vectorised sigmoid is several times faster than its tanh. The doubling of z is
folded into the weights (`doubled`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Trace:
    """What a pass over time leaves behind; `states` and `cells` have one step more than `gates`, the initial one.

    `raw` are an LSTM's states before their projection and `squashed` its tanh(cell).
    """

    gates: Tensor
    states: Tensor
    cells: Tensor | None = None
    raw: Tensor | None = None
    squashed: Tensor | None = None

    @property
    def steps(self) -> int:
        return self.gates.shape[1]


class Cell(Protocol):
    """A recurrence over a buffer of `blocks` gates: where torch's blocks go, which the state enters, which tanh."""

    blocks: int
    input_blocks: tuple[int, ...]
    recurrent: slice
    doubled: tuple[int, ...]

    def forward(self, trace: Trace, hidden: Tensor, project: Tensor | None) -> None:
        """Fill states (and cells) and activate gates; `hidden` is [directions, state, gates * size]."""
        ...

    def backward(
        self, trace: Trace, hidden: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Overwrite gates by their gradients, `d_states` by their totals; return the initial state's gradients."""
        ...


def tanh_of_half_(doubled: Tensor) -> Tensor:
    """tanh(z), in place, given 2z."""
    return doubled.sigmoid_().mul_(2).sub_(1)


class Rnn:
    """h = tanh(pre + h U), or relu."""

    blocks, recurrent = 1, slice(0, 1)
    input_blocks: tuple[int, ...] = (0,)

    def __init__(self, relu: bool) -> None:
        self.relu = relu
        self.doubled: tuple[int, ...] = () if relu else (0,)

    def forward(self, trace: Trace, hidden: Tensor, project: Tensor | None) -> None:
        gates, states = trace.gates, trace.states
        for t in range(trace.steps):
            step = gates[:, t].baddbmm_(states[:, t], hidden)
            states[:, t + 1] = step.clamp_min_(0) if self.relu else tanh_of_half_(step)

    def backward(
        self, trace: Trace, hidden: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gates, back = trace.gates, hidden.transpose(1, 2)
        if self.relu:
            gates.sign_()
        else:
            gates.square_().neg_().add_(1)
        for t in reversed(range(trace.steps)):
            gates[:, t].mul_(d_states[:, t])
            if t:
                d_states[:, t - 1].baddbmm_(gates[:, t], back)
        return gates[:, 0] @ back, None


class Lstm:
    """Gates i, f, g, o as in torch; c = f c + i g, h = o tanh(c), projected if there is a projection."""

    blocks, recurrent = 4, slice(0, 4)
    input_blocks: tuple[int, ...] = (0, 1, 2, 3)
    doubled: tuple[int, ...] = (2,)

    def forward(self, trace: Trace, hidden: Tensor, project: Tensor | None) -> None:
        assert trace.cells is not None
        size = trace.cells.shape[-1]
        gates, cells, states = trace.gates, trace.cells, trace.states
        squashed = trace.squashed = torch.empty_like(cells[:, 1:])
        raw = trace.raw = states[:, 1:] if project is None else torch.empty_like(squashed)
        for t in range(trace.steps):
            step = gates[:, t].baddbmm_(states[:, t], hidden).sigmoid_()
            i, f, g, o = step.split(size, -1)
            g.mul_(2).sub_(1)
            cell, tanh = cells[:, t + 1], squashed[:, t]
            torch.mul(f, cells[:, t], out=cell).addcmul_(i, g)
            tanh_of_half_(torch.mul(cell, 2, out=tanh))
            torch.mul(o, tanh, out=raw[:, t])
            if project is not None:
                torch.bmm(raw[:, t], project, out=states[:, t + 1])

    def backward(
        self, trace: Trace, hidden: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert trace.cells is not None
        keep, through_state = self.factors(trace)
        gates, back = trace.gates, hidden.transpose(1, 2)
        size = keep.shape[-1]
        d_cell = torch.zeros_like(keep[:, 0])
        for t in reversed(range(trace.steps)):
            d_state = d_states[:, t]
            if t + 1 < trace.steps:
                d_state.baddbmm_(gates[:, t + 1], back)
            d_raw = d_state if project is None else d_state @ project.transpose(1, 2)
            d_cell.addcmul_(d_raw, through_state[:, t])
            if d_cells is not None:
                d_cell += d_cells[:, t]
            step = gates[:, t]
            step[..., 3 * size :].mul_(d_raw)
            step[..., : 3 * size].unflatten(-1, (3, size)).mul_(d_cell.unsqueeze(2))
            d_cell.mul_(keep[:, t])
        return gates[:, 0] @ back, d_cell

    def factors(self, trace: Trace) -> tuple[Tensor, Tensor]:
        """Overwrite gates by d(gate)/d(cell or state); return f and o (1 - tanh²(c)), whose places are taken."""
        assert trace.cells is not None
        assert trace.squashed is not None
        i, f, g, o = trace.gates.split(trace.cells.shape[-1], -1)
        keep, tanh = f.clone(), trace.squashed
        through_state = torch.mul(tanh, tanh).neg_().add_(1).mul_(o)
        slope = o - o * o
        torch.mul(tanh, slope, out=o)
        torch.mul(f, f, out=slope).neg_().add_(f)
        torch.mul(trace.cells[:, :-1], slope, out=f)
        torch.mul(g, g, out=slope).neg_().add_(1).mul_(i)
        i.sub_(i * i).mul_(g)
        g.copy_(slope)
        return keep, through_state


class Gru:
    """Blocks n, r, z and the state's part m of n: n = tanh(pre + r m), h = n + z (h - n)."""

    blocks, recurrent = 4, slice(1, 4)
    input_blocks: tuple[int, ...] = (1, 2, 0)
    doubled: tuple[int, ...] = (0, 3)

    def forward(self, trace: Trace, hidden: Tensor, project: Tensor | None) -> None:
        gates, states, size = trace.gates, trace.states, trace.states.shape[-1]
        for t in range(trace.steps):
            step = gates[:, t]
            step[..., size:].baddbmm_(states[:, t], hidden)
            step[..., size : 3 * size].sigmoid_()
            n, r, z, m = step.split(size, -1)
            tanh_of_half_(n.addcmul_(r, m))
            torch.lerp(n, states[:, t], z, out=states[:, t + 1])

    def backward(
        self, trace: Trace, hidden: Tensor, project: Tensor | None, d_states: Tensor, d_cells: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        size, back = trace.states.shape[-1], hidden.transpose(1, 2)
        keep = self.factors(trace)
        d_state = torch.zeros_like(d_states[:, 0])
        for t in reversed(range(trace.steps)):
            d_state += d_states[:, t]
            step = trace.gates[:, t]
            n, r, z, m = step.split(size, -1)
            n.mul_(d_state)
            z.mul_(d_state)
            r.mul_(n)
            m.mul_(n)
            d_state.mul_(keep[:, t]).baddbmm_(step[..., size:], back)
        return d_state, None

    def factors(self, trace: Trace) -> Tensor:
        """Overwrite n, z by d/d(state), r, m by d/d(n's pre-activation); return z, whose place is taken."""
        n, r, z, m = trace.gates.split(trace.states.shape[-1], -1)
        keep: Tensor = z.clone()
        z.sub_(z * z).mul_(trace.states[:, :-1] - n)
        n.mul_(n).neg_().add_(1).mul_(1 - keep)
        m.mul_(0.5)  # the state's part was doubled together with n
        active = r.clone()
        r.sub_(r * r).mul_(m)
        m.copy_(active)
        return keep
