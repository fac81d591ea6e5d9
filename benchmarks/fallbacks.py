"""How much longer a step takes than plain SGD where operations have no rule of their own, or none sees them.

python -m benchmarks.fallbacks                          # all cases, a line each
python -m benchmarks.fallbacks --case orthogonal --case scripted

Every case is a small network with something that people write and that is hard to follow: a parametrisation, a penalty,
a compiled part, an autograd.Function, a gradient within the loss. Steps of ``Private.steps()`` and of plain SGD take
turns in one process, on one thread, and processor time counts.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from sordino import Private, recipes

RECORDS, BATCH, WIDTH, CLASSES, NODES, EDGES = 4096, 128, 256, 10, 16, 40
UNCOUNTED = 8
"""Steps before the first one that counts: caches warm up, and checks of draws come at steps 1, 2, 4, 8, ..."""

Data = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Any], Tensor]
Wrap = Callable[[nn.Linear], nn.Module]


@dataclass(frozen=True)
class Case:
    """A network, its records and its loss."""

    build: Callable[[], nn.Module]
    loss: Loss
    draw: Callable[[], Data]


def classify(model: nn.Module, data: Any) -> Tensor:
    """Cross-entropy of each example."""
    *inputs, labels = data
    return F.cross_entropy(model(*inputs), labels, reduction="none")


def draw_rows() -> Data:
    """Vectors with classes."""
    return torch.randn(RECORDS, WIDTH), torch.randint(CLASSES, (RECORDS,))


def draw_graphs() -> Data:
    """Nodes and edges with classes."""
    edges = torch.randint(NODES, (RECORDS, 2, EDGES))
    return torch.randn(RECORDS, NODES, 32), edges, torch.randint(CLASSES, (RECORDS,))


def stack(wrap: Wrap = lambda layer: layer) -> nn.Module:
    """Three linear layers, the first two wrapped."""
    first, second = (wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def script_middle() -> nn.Module:
    """A compiled part between two layers that are not."""
    middle = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), middle, nn.Linear(WIDTH, CLASSES))


def script_all() -> nn.Module:
    """All of it compiled from its source."""
    scripted: nn.Module = torch.jit.script(stack())
    return scripted


def trace_all() -> nn.Module:
    """All of it compiled from what it did to an example."""
    traced: nn.Module = torch.jit.trace(stack(), torch.randn(2, WIDTH))
    return traced


class Graph(nn.Module):
    """Messages along the edges of small graphs, all nodes in one long list."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 64), nn.Linear(96, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        first = NODES * torch.arange(len(nodes)).unsqueeze(1)
        sources, targets = ((edges[:, end] + first).flatten() for end in (0, 1))
        flat = nodes.flatten(0, 1)
        sums = flat.new_zeros(len(flat), 64).index_add(0, targets, self.message(flat)[sources].relu())
        hidden = self.update(torch.cat([flat, sums], 1)).relu()
        scores: Tensor = self.head(hidden.unflatten(0, (len(nodes), NODES)).mean(1))
        return scores


class Sign(torch.autograd.Function):
    """A weight of one bit, with the gradient of the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Product(torch.autograd.Function):
    """A linear layer by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class Written(nn.Module):
    """A layer by an autograd.Function, of its weight alone or of the input, too."""

    def __init__(self, width: int, alone: bool) -> None:
        super().__init__()
        self.weight, self.alone = nn.Parameter(torch.randn(width, WIDTH) / 16), alone

    def forward(self, x: Tensor) -> Tensor:
        apply: Callable[..., Tensor] = Sign.apply if self.alone else Product.apply
        return F.linear(x, apply(self.weight)) if self.alone else apply(x, self.weight)


def write(width: int, alone: bool) -> nn.Module:
    """A layer by hand between two others."""
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(width, CLASSES)
    return nn.Sequential(ends[0], nn.Tanh(), Written(width, alone), nn.Tanh(), ends[1])


def penalise_weights(model: nn.Module, data: Any) -> Tensor:
    """L2 within the loss."""
    length = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    losses: Tensor = classify(model, data) + 1e-4 * length
    return losses


def penalise_slope(model: nn.Module, data: Any) -> Tensor:
    """The gradient of the scores by the inputs within the loss."""
    inputs = data[0].detach().requires_grad_()
    scores = model(inputs)
    (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    losses: Tensor = F.cross_entropy(scores, data[1], reduction="none") + slope.square().sum(1)
    return losses


CASES: Mapping[str, Case] = {
    "plain": Case(stack, classify, draw_rows),
    "weight_norm": Case(lambda: stack(parametrizations.weight_norm), classify, draw_rows),
    "spectral_norm": Case(lambda: stack(parametrizations.spectral_norm), classify, draw_rows),
    "orthogonal": Case(lambda: stack(parametrizations.orthogonal), classify, draw_rows),
    "orthogonal-cayley": Case(
        lambda: stack(lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley")), classify, draw_rows
    ),
    "penalty": Case(stack, penalise_weights, draw_rows),
    "graph": Case(Graph, classify, draw_graphs),
    "function-of-weight": Case(lambda: write(WIDTH, alone=True), classify, draw_rows),
    "function": Case(lambda: write(WIDTH, alone=False), classify, draw_rows),
    "function-large": Case(lambda: write(4 * WIDTH, alone=False), classify, draw_rows),
    "scripted-part": Case(script_middle, classify, draw_rows),
    "scripted": Case(script_all, classify, draw_rows),
    "traced": Case(trace_all, classify, draw_rows),
    "gradient-penalty": Case(stack, penalise_slope, draw_rows),
}


def take_ordinary(case: Case) -> Iterator[int]:
    """Steps of plain SGD, and the examples of each."""
    model, optimizer = prepare(case)
    loader = DataLoader(TensorDataset(*case.draw()), BATCH, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            case.loss(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield BATCH


def take_private(case: Case) -> Iterator[int]:
    """Steps of Sordino, and the expected examples of each."""
    model, optimizer = prepare(case)
    recipe = recipes.dpsgd(batch_size=BATCH, steps=100_000, noise_multiplier=1.0).for_records(RECORDS)
    for _ in Private(model, optimizer, TensorDataset(*case.draw()), case.loss, recipe).steps():
        yield BATCH


def prepare(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same network every time."""
    torch.manual_seed(0)
    model = case.build()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def compare(case: Case, steps: int, turns: int = 8) -> tuple[float, float]:
    """Milliseconds of a step of SGD and of Sordino: medians over turns that alternate."""
    loops = take_ordinary(case), take_private(case)
    for loop in loops:
        for _ in range(UNCOUNTED):
            next(loop)
    found: list[list[float]] = [[], []]
    for _ in range(turns):
        for place, loop in enumerate(loops):
            before = time.process_time()
            for _ in range(steps):
                next(loop)
            found[place].append(1000 * (time.process_time() - before) / steps)
    return statistics.median(found[0]), statistics.median(found[1])


def main(case: Annotated[list[str] | None, typer.Option()] = None, steps: int = 6) -> None:
    """Processor time of a step over that of SGD."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is on its way out
    logging.basicConfig(format="    %(message)s", level=logging.INFO)
    for name in case or CASES:
        ordinary, private = compare(CASES[name], steps)
        print(f"{name:20} SGD {ordinary:8.2f} ms   Sordino {private:8.2f} ms   {private / ordinary:6.1f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
