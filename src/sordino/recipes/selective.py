"""Selective updates: DPSUR, noise screening and DPAGD."""

from __future__ import annotations

from typing import Any, Unpack

from sordino.errors import InvalidInput
from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.records import Collate
from sordino.schedules import Constant, Schedule
from sordino.selection import Selector
from sordino.selection.annealing import Annealing, Public
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.selective import Selective
from sordino.selection.step_length import StepLength
from sordino.weighing import Flat


def dpsur(
    *,
    clip: float = 0.1,
    lr: float = 2.0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    validation_size: int = 256,
    validation_noise: float = 1.3,
    validation_clip: float = 0.001,
    validation_share: float | None = 0.39,
    threshold: float = -1.0,
    validation_schedule: Schedule | None = None,
    reuse: bool = False,
    line_search: bool = False,
    tests: int = 2,
    test_every: int = 1,
    accounting: str = "proven",
    **common: Unpack[Common],
) -> Recipe:
    """Keep an update if a noisy test on fresh records says that it helps (DPSUR, Alg. 2; defaults of its MNIST run).

    Every attempt is a step of the recipe and is charged. accounting="published" counts accepted updates alone, as the
    paper does; that is no guarantee. `reuse`, `line_search` and `test_every` go beyond the paper (see `Selective`), and
    so does `validation_share`: one record moves the test by that share of its clipping bound at most, which makes an
    attempt cheaper; None is the paper's test, which "published" always takes.

    >>> from sordino import recipes
    >>> recipe = recipes.dpsur(batch_size=1024, noise_multiplier=2.0, steps=1152).for_records(60_000)
    >>> f"{recipe.price(1e-5):.2f}"
    '0.86'
    """
    share = None if accounting == "published" else validation_share
    schedule = validation_schedule or Constant()
    test = NoisyTest(validation_size, validation_clip, validation_noise, threshold, schedule, share)
    selection = Selective(
        test=test, reuse=reuse, line_search=line_search, tests=tests, test_every=test_every, accounting=accounting
    )
    proposer = Optimizer(optimizer, lr=lr, momentum=momentum if optimizer == "sgd" else 0.0)
    return _recipe("dpsur", selection, clip, proposer, accounting, common)


def screening(
    *,
    public: Any = None,
    public_name: str | None = None,
    collate: Collate | None = None,
    clip: float = 0.1,
    lr: float = 0.5,
    momentum: float = 0.0,
    optimizer: str = "sgd",
    temperature: float = 10.0,
    patience: int = 10,
    validation_size: int | None = None,
    validation_noise: float | None = None,
    validation_clip: float = 0.001,
    accounting: str = "proven",
    **common: Unpack[Common],
) -> Recipe:
    """Screen proposals by simulated annealing (noise screening, Alg. 2; defaults of its MNIST run).

    The energy is the mean loss on `public` records, which the guarantee names by `public_name`; or on a draw of
    `validation_size` private ones, clipped and noised by `validation_noise`. Every attempt is charged.
    accounting="published" charges accepted updates alone, and allows private records without noise: no guarantee.

    >>> import torch
    >>> from sordino import recipes
    >>> held_out = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    >>> recipe = recipes.screening(public=held_out, public_name="zeros", batch_size=512, epochs=1)
    >>> recipe.selection.assumptions[1]
    'proposals were screened on public records (zeros), which are not protected'
    """
    if (public is None) != (public_name is None):
        raise InvalidInput("public and public_name go together: the guarantee says which records were not protected")
    source: Public | None = None
    test: NoisyTest | None = None
    if public is not None:
        source = Public.of(str(public_name), public, collate)
    if validation_noise is not None:
        test = NoisyTest(validation_size or 256, validation_clip, validation_noise)
    selection = Annealing(
        temperature=temperature,
        patience=patience,
        public=source,
        test=test,
        private_size=validation_size if test is None else None,
        accounting=accounting,
    )
    return _recipe("screening", selection, clip, Optimizer(optimizer, lr=lr, momentum=momentum), accounting, common)


def dpagd(
    *,
    clip: float = 3.0,
    loss_clip: float = 3.0,
    choice_epsilon: float = 0.1,
    validation_size: int = 256,
    longest: float = 2.0,
    candidates: int = 21,
    **common: Unpack[Common],
) -> Recipe:
    """Choose every step's length privately, and give the gradient more budget when none helps (Lee & Kifer 2018).

    Of `candidates` lengths up to `longest` the one with the smallest noisy loss is taken, by a choice that is
    `choice_epsilon`-private on a draw of `validation_size` records. The learning rate has no effect: the gradient gives
    the direction alone.

    >>> from sordino import recipes
    >>> recipes.dpagd(batch_size=512, epochs=10, choice_epsilon=0.5).selection.candidates
    21
    """
    selection = StepLength(
        epsilon=choice_epsilon, size=validation_size, loss_clip=loss_clip, longest=longest, candidates=candidates
    )
    return _recipe("dpagd", selection, clip, Optimizer("sgd", lr=1.0), "proven", common)


def _recipe(
    name: str, selection: Selector, clip: float, optimizer: Optimizer, accounting: str, common: Common
) -> Recipe:
    return Recipe(
        name=name,
        clip=clip,
        weighing=Flat(),
        selection=selection,
        optimizer=optimizer,
        basis="published" if accounting == "published" else "proven",
        **common,
    )
