"""The loops that are compared, each as its users write it: a generator that takes a step and says how many examples.

All have the same network, records, loss, expected batch, optimizer, clipping bound and noise. SGD has batches of equal
size from a shuffled DataLoader; Sordino and Opacus draw theirs (Poisson), so that sizes differ from step to step.
Sordino's noise is secure, that of the peers from torch's generator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.speed.cases import Batch, Case, Virtual, collate
from sordino import Private, recipes

Taken = tuple[int, bool]
"""Examples of a step, and whether its time counts: Sordino probes draws 1, 2, 4, 8, ..., few of a long run."""
Loop = Callable[[Case, Path, bool], Iterator[Taken]]
"""Of a case, a folder for durable runs, and whether Sordino probes model and loss, as it does unless told otherwise."""
RATE, CLIP, NOISE = 1e-3, 1.0, 1.0
STEPS = 1_000_000
OPACUS = ("hooks", "functorch", "ew", "ghost")


def optimize(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD on what may change."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def load(case: Case, dataset: Virtual) -> DataLoader[Batch]:
    """Shuffled batches of equal size."""
    return DataLoader(dataset, case.batch, shuffle=True, drop_last=True, collate_fn=collate)


def repeat(loader: Any) -> Iterator[Batch]:
    """One epoch after the other."""
    while True:
        yield from loader


def ordinary(case: Case, folder: Path, validate: bool = True) -> Iterator[Taken]:
    """Non-private SGD."""
    model, dataset = case.ready()
    optimizer = optimize(model)
    for batch in repeat(load(case, dataset)):
        case.loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield len(batch[-1]), True


def bind(case: Case, records: Virtual, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Private:
    """What a user of Sordino writes before the loop; all else is left at its default."""
    recipe = recipes.dpsgd(batch_size=case.batch, steps=STEPS, clip=CLIP, noise_multiplier=NOISE)
    recipe = recipe.for_records(len(records))
    return Private(model, optimizer, records, case.loss, recipe, collate=collate, **options)


def is_probed(number: int) -> bool:
    """Whether Sordino holds the examples of this step against themselves."""
    return number & (number - 1) == 0


def by_steps(durable: bool = False, engine: str = "auto") -> Loop:
    """``for step in private.steps()``."""

    def loop(case: Case, folder: Path, validate: bool = True) -> Iterator[Taken]:
        model, records = case.ready()
        run = folder / "steps" if durable else None
        with bind(case, records, model, optimize(model), run=run, engine=engine, validate=validate) as private:
            records.picked = 0
            for step in private.steps():
                yield records.picked, not is_probed(step.number)
                records.picked = 0

    return loop


def by_loader(durable: bool = False) -> Loop:
    """``for batch in private.loader()``, with `backward` and the user's own ``optimizer.step()``."""

    def loop(case: Case, folder: Path, validate: bool = True) -> Iterator[Taken]:
        model, records = case.ready()
        optimizer, run = optimize(model), folder / "loader" if durable else None
        with bind(case, records, model, optimizer, run=run, validate=validate) as private:
            for number, batch in enumerate(private.loader(), 1):
                optimizer.zero_grad()
                private.backward(case.loss(model, batch))
                optimizer.step()
                yield len(batch[-1]), not is_probed(number)

    return loop


class Criterion(nn.Module):
    """A case's loss in the form that Opacus' ghost mode wants: of the output, with a reduction that it may change."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.reduction = case, "mean"

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean, or one loss per example."""
        losses = self.case.score(output, batch)
        return losses if self.reduction == "none" else losses.mean()


def by_opacus(mode: str) -> Loop:
    """Opacus through its PrivacyEngine, with its replacement layers where it needs them and its Poisson loader."""

    def loop(case: Case, folder: Path, validate: bool = True) -> Iterator[Taken]:
        warnings.filterwarnings("ignore", module="opacus")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        model, dataset = case.ready()
        fixed = ModuleValidator.fix(model)
        for mine, theirs in zip(model.parameters(), fixed.parameters(), strict=False):
            theirs.requires_grad_(mine.requires_grad)
        made = PrivacyEngine(accountant="rdp").make_private(
            module=fixed.train(),
            optimizer=optimize(fixed),
            criterion=Criterion(case),
            data_loader=load(case, dataset),
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            grad_sample_mode=mode,
        )
        wrapped, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if mode == "ghost" else Criterion(case)
        forward = case.helped or case.forward
        for batch in repeat(loader):
            optimizer.zero_grad()
            criterion(forward(wrapped, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()  # lets go of the gradients of all examples
            yield len(batch[-1]), True

    return loop


def by_fastdp(case: Case, folder: Path, validate: bool = True) -> Iterator[Taken]:
    """fastDP with its automatic choice between ghost norms and instantiated gradients; batches of equal size.

    It is not in the lock; the method appears where it is installed.
    """
    from fastDP import PrivacyEngine

    model, dataset = case.ready()
    optimizer = optimize(model)
    engine = PrivacyEngine(
        model,
        batch_size=case.batch,
        sample_size=len(dataset),
        noise_multiplier=NOISE,
        epochs=1,
        max_grad_norm=CLIP,
        clipping_mode="MixOpt",
        clipping_fn="Abadi",
    )
    engine.attach(optimizer)
    for batch in repeat(load(case, dataset)):
        case.loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield len(batch[-1]), True


OURS = ("Sordino", "Sordino, durable", "Sordino loader", "Sordino loader, durable")
METHODS: Mapping[str, Loop] = MappingProxyType(
    {
        "SGD": ordinary,
        **dict(zip(OURS, (by_steps(), by_steps(durable=True), by_loader(), by_loader(durable=True)), strict=True)),
        **{f"Opacus {mode}": by_opacus(mode) for mode in OPACUS},
        "vmap": by_steps(engine="vmap"),
        **({"fastDP": by_fastdp} if find_spec("fastDP") else {}),
    }
)
DURABLE = (OURS[1], OURS[3])
PEERS = (*(f"Opacus {mode}" for mode in OPACUS), "vmap", "fastDP")
"""Who must be overtaken."""
