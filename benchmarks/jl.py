"""DP-SGD-JL's figure 8 with proven prices, and its tables 2 to 5 with today's engines.

python benchmarks/jl.py figure     # docs/mechanisms/img/jl_epsilon.svg
python benchmarks/jl.py tables     # time and memory of a step, every measurement in a process of its own
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import typer
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.accounting import pricing
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.gradients import Batch, Objective, find_engine
from sordino.gradients.projected import ProjectedEngine
from sordino.lab import networks
from sordino.noise import Secure
from sordino.parts import Draw, Flat

app = typer.Typer(add_completion=False)
FIGURE = Path(__file__).parent.parent / "docs" / "mechanisms" / "img" / "jl_epsilon.svg"

# -- figure 8 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One of the two settings of the paper's figure 8."""

    records: int
    batch_size: int
    noise: float
    projections: tuple[int, ...]

    def prices(self, inner: DpEvent, epochs: range) -> list[float]:
        """ε at δ = 1e-5 after each number of epochs."""
        event = PoissonSampledDpEvent(self.batch_size / self.records, inner)
        steps = [round(epoch * self.records / self.batch_size) for epoch in epochs]
        return [pricing.epsilon([(event, count)], 1e-5) for count in steps]


PANELS = (
    Panel(60_000, 256, 1.3, (8, 10, 12, 16, 20, 30, 100)),
    Panel(25_000, 64, 0.5, (8, 10, 12, 16, 20, 30, 100)),
)


@app.command()
def figure(output: Path = FIGURE) -> None:
    """Draw ε against epochs for several numbers of projections, and print the last values."""
    drawing, axes = plt.subplots(1, len(PANELS), figsize=(9, 3.6), layout="constrained")
    for panel, axis in zip(PANELS, axes, strict=True):
        draw_panel(panel, axis)
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    output.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(output, metadata={"Date": None})
    print(f"wrote {output}")


def draw_panel(panel: Panel, axis: Axes) -> None:
    """One curve per number of projections; where ε is infinite there is nothing to draw."""
    epochs = range(1, 6)
    inner: dict[str, DpEvent] = {f"r = {r}": ProjectedGaussian(panel.noise, r) for r in panel.projections}
    inner["exact norms"] = GaussianDpEvent(panel.noise)
    for label, event in inner.items():
        prices = panel.prices(event, epochs)
        axis.plot(epochs, prices, linestyle="--" if label == "exact norms" else "-", marker=".", label=label)
        print(f"N={panel.records} B={panel.batch_size} sigma={panel.noise} {label}: {prices[-1]:.4g}")
    axis.set(xlabel="epochs", ylabel="ε at δ = 1e-5", yscale="log", xticks=list(epochs))
    axis.set_title(f"N = {panel.records:,}, B = {panel.batch_size}, σ = {panel.noise}", fontsize="medium")


# -- tables 2 to 5 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network of the paper, data of its shape, and how many records an epoch has."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    batch_size: int
    records: int


def pixels(*shape: int) -> Callable[[int], Tensor]:
    """Random images of one shape."""
    return lambda size: torch.randn(size, *shape)


NETWORKS = {
    "mnist-cnn": Network(lambda: networks.mnist_cnn("relu", padding=3), pixels(1, 28, 28), 10, 256, 60_000),
    "jl-cifar": Network(networks.jl_cifar, pixels(3, 32, 32), 10, 256, 50_000),
    "jl-bilstm": Network(networks.jl_bilstm, lambda size: torch.randint(1, 8000, (size, 150)), 2, 256, 25_000),
    "alexnet": Network(networks.alexnet, pixels(3, 32, 32), 10, 64, 50_000),
    "vgg13": Network(networks.vgg13, pixels(3, 32, 32), 10, 64, 50_000),
}
METHODS = ("non-private", "exact", "vmap", "jl-1", "jl-10", "jl-24", "opacus")
"""exact: book-keeping, the generalised outer-product method; vmap: the paper's multiple method."""


def per_example(model: nn.Module, batch: Any) -> Tensor:
    """One loss per example."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def make_step(network: Network, method: str, microbatch: int) -> Callable[[], None]:
    """One training step on a batch, in the way of `method`."""
    torch.manual_seed(0)
    model = network.build()
    x, y = network.inputs(network.batch_size), torch.randint(0, network.classes, (network.batch_size,))
    parts = [(x[i : i + microbatch], y[i : i + microbatch]) for i in range(0, len(x), microbatch)]
    if method == "opacus":
        return opacus_step(model, parts, network.batch_size)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if method == "non-private":
        return lambda: plain_step(model, optimizer, parts)
    return private_step(model, optimizer, parts, method)


def single(x: Tensor, y: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """Example `i` alone."""
    return x[i : i + 1], y[i : i + 1]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[tuple[Tensor, Tensor]]) -> None:
    """A step without privacy."""
    optimizer.zero_grad()
    for part in parts:
        per_example(model, part).sum().backward()
    optimizer.step()


def private_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[tuple[Tensor, Tensor]], method: str
) -> Callable[[], None]:
    """A step of Sordino: norms, weights, sum, noise."""
    source = Secure()
    name, _, projections = method.partition("-")
    engine = (
        ProjectedEngine(int(projections), source) if name == "jl" else find_engine("auto" if name == "exact" else name)
    )
    objective = Objective(model, per_example)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        if isinstance(engine, ProjectedEngine):
            engine.renew()
        total = [torch.zeros_like(p) for p in parameters]
        for x, y in parts:
            batch = Batch((x, y), len(y), partial(single, x, y))
            found = engine.differentiate(objective, parameters, batch)
            weights = Flat().weights(found.norms, 1.0, Draw(torch.arange(len(y))))
            for into, part in zip(total, found.weighted_sum(weights), strict=True):
                into += part
        for parameter, gradient in zip(parameters, total, strict=True):
            noise = torch.from_numpy(source.directions(parameter.numel())).view_as(parameter)
            parameter.grad = gradient + noise
        optimizer.step()

    return step


def opacus_step(model: nn.Module, parts: list[tuple[Tensor, Tensor]], batch_size: int) -> Callable[[], None]:
    """A step of Opacus, with its own replacements for layers that it does not know."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.validators import ModuleValidator

    wrapped = GradSampleModule(ModuleValidator.fix(model))
    inner = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1e-3)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch_size)

    def step() -> None:
        for number, part in enumerate(parts):
            optimizer.signal_skip_step(do_skip=number < len(parts) - 1)
            per_example(wrapped, part).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


@app.command()
def measure(network: str, method: str, microbatch: int = 64, repeats: int = 3) -> None:
    """One measurement, as a line of JSON: median processor seconds per step, and megabytes above the loaded data."""
    torch.set_num_threads(1)
    before = peak_megabytes()
    step = make_step(NETWORKS[network], method, microbatch)
    loaded = peak_megabytes()
    step()
    times = []
    for _ in range(repeats):
        start = time.process_time()  # a step is one thread's work: other load on the machine does not count
        step()
        times.append(time.process_time() - start)
    found = {"seconds": statistics.median(times), "step": peak_megabytes() - loaded, "model": loaded - before}
    print(json.dumps(found))


def peak_megabytes() -> float:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@app.command()
def tables(only: str = ",".join(NETWORKS), methods: str = ",".join(METHODS), microbatch: int = 64) -> None:
    """A Markdown table per network: seconds per epoch, and memory of a step."""
    for name in only.split(","):
        network = NETWORKS[name]
        count = networks.parameter_count(network.build(), trained=True)
        print(f"\n**{name}**, {count:,} parameters, batch {network.batch_size} in parts of {microbatch}\n")
        print("| method | s / step | s / epoch | × non-private | MB / step |\n|---|---|---|---|---|")
        reference = math.nan
        for method in methods.split(","):
            found = measured(name, method, microbatch)
            if isinstance(found, str):
                print(f"| {method} | {found} | | | |", flush=True)
                continue
            seconds = found["seconds"]
            reference = seconds if method == "non-private" else reference
            epoch = seconds * network.records / network.batch_size
            print(
                f"| {method} | {seconds:.3g} | {epoch:.3g} | {seconds / reference:.2f} | {found['step']:.0f} |",
                flush=True,
            )


def measured(network: str, method: str, microbatch: int) -> dict[str, float] | str:
    """What a fresh process measured, or the last line of its complaint."""
    command = [sys.executable, __file__, "measure", network, method, "--microbatch", str(microbatch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:80] if done.stderr else f"exit {done.returncode}"
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    app()
