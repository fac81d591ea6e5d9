"""What DPIS takes: processor time of its epochs over DP-SGD's, and of a draw that tosses no coin for all records.

``python -m benchmarks.importance`` prints both tables and writes them into docs/mechanisms/dpis.md. Runs take turns,
epoch by epoch, on one thread; the medians are compared, so that other programs on the machine matter little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from benchmarks import units
from benchmarks.draws import measure
from benchmarks.results import CHOICE, put
from sordino import Budget, Private, Recipe, recipes
from sordino.lab import data
from sordino.lab.experiments.summaries import write_markdown
from sordino.mechanisms.dpis import Epoch, Importance, Learnt
from sordino.noise import Secure, Source
from sordino.parts import Draw
from sordino.tables.dataset import tensors

PAGE = CHOICE.parent / "mechanisms" / "dpis.md"
BUDGET, CLIP, PASSES = Budget(3.0, 1e-5), 1.0, 5
"""What runs are calibrated for, their clipping bound, and the epochs that share a pass where norms are old."""


@dataclass(frozen=True)
class Setting:
    """A network on the first MNIST images, and how many it draws."""

    name: str
    build: Callable[[], nn.Module]
    records: int
    batch_size: int


SETTINGS = (
    Setting("CNN, 26,000 parameters, b = 64", units.make_convolutions, 2_560, 64),
    Setting("perceptron, 203,000 parameters, b = 256", units.make_perceptron, 10_240, 256),
)
VARIANTS: dict[str, tuple[float, int]] = {
    f"k = {k:g}, {words}": (k, refresh)
    for k in (5.0, 2.0)
    for words, refresh in (("all norms each epoch", 1), (f"`refresh={PASSES}`", PASSES))
}


def bind(setting: Setting, recipe: Recipe) -> Private:
    """A run on real records from one start."""
    inputs, labels = tensors(data.load("mnist").train_set)
    torch.manual_seed(0)
    model = setting.build()
    train = (inputs[: setting.records], labels[: setting.records])
    return Private(model, recipe.optimizer.build(model.parameters()), train, units.loss, recipe, validate=False)


def time_epochs(setting: Setting, turns: int) -> dict[str, float]:
    """Processor seconds of an epoch by variant: the median over turns, each of as many epochs as share a pass."""
    common: dict[str, Any] = {"batch_size": setting.batch_size, "epochs": (turns + 1) * PASSES, "clip": CLIP}
    made = {"dpsgd": recipes.dpsgd(lr=0.1, **common)}
    for name, (multiplier, refresh) in VARIANTS.items():
        made[name] = recipes.dpis(lr=0.1, momentum=0.0, multiplier=multiplier, refresh=refresh, **common)
    runs = {name: bind(setting, each.calibrate(BUDGET, records=setting.records)) for name, each in made.items()}
    steps = {name: run.steps() for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, taken in steps.items():
            begun = time.process_time()
            for _ in islice(taken, PASSES * setting.records // setting.batch_size):
                pass
            found[name].append((time.process_time() - begun) / PASSES)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def toss_for_all(sampler: Importance, records: int, source: Source, state: Learnt) -> Draw:
    """The same draw by a coin for every record."""
    assert state.epoch is not None
    assert state.bounds is not None
    heights = torch.from_numpy(source.uniform(records)) * state.epoch.reach
    drawn = (heights < state.bounds).nonzero().squeeze(1)
    return Draw(drawn, heights[drawn], sampler.floor * state.epoch.clip)


def time_draws(batch_size: int = 256) -> list[list[str]]:
    """Milliseconds of a draw where half of the norms are at the bound and half at a tenth of it."""
    lines, sampler, source = [], Importance(), Secure()
    for records in (60_000, 1_000_000, 10_000_000):
        norms = torch.where(torch.arange(records) % 2 == 0, CLIP, CLIP / 10)
        epoch = Epoch.bounded(0, records, float(norms.double().sum()), CLIP, batch_size)
        state = Learnt(epoch, noise=1.0, bounds=sampler.bounds(norms, CLIP))
        ways: dict[str, Callable[[], object]] = {
            "all": partial(toss_for_all, sampler, records, source, state),
            "thinned": partial(sampler.draw, records, source, state),
        }
        taken = measure(ways, 1)
        lines.append([f"{records:,}", *(f"{taken[name] * 1e3:.2f} ms" for name in ways)])
        print(lines[-1], flush=True)
    return lines


def main(turns: int = 2) -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    columns = {setting.name: time_epochs(setting, turns) for setting in SETTINGS}
    lines = []
    for name in VARIANTS:
        lines.append([name, *(f"{times[name] / times['dpsgd']:.2f}" for times in columns.values())])
        print(lines[-1], flush=True)
    heads = ["time of an epoch over DP-SGD's", *columns]
    put(PAGE, write_markdown(heads, lines), " epochs", by="benchmarks.importance")
    heads = ["records", "a coin for each", "coins for those who can be drawn"]
    put(PAGE, write_markdown(heads, time_draws()), " draws", by="benchmarks.importance")


if __name__ == "__main__":
    main()
