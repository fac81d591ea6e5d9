"""Checks the conformance of a recipe: its own parts take the real private step on small neighbouring datasets.

It also checks a source of noise: its keys are large, its noise is fresh and normal and has the requested deviation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from sordino import mechanisms
from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.audit.conformance.differences import Passes, find_difference
from sordino.audit.conformance.payments import check_prices
from sordino.audit.conformance.replaying import Conformance, Neighbours, Program, replay
from sordino.audit.conformance.tape import Extra, Tape
from sordino.audit.instances import shrink
from sordino.errors import InvalidInput
from sordino.gradients.engine import Loss
from sordino.noise import Seeded, Source
from sordino.parts import Sampler
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.records import Collate

Columns = tuple[Tensor, ...]
STEPS = 6
LOUD = 1e3
"""How many times longer the loud record is than the others."""
AMBIGUOUS = (17, 16)
"""Projections are keyed by 16 coins: with 16 records, a record's coin could not be told from one of these."""
SOURCES = 4096
"""How many sources are made to see whether any two are alike: for keys of b bits, about 2^(23−b) pairs are."""
NUMBERS = 20_000
RECORDS, RATE = 10**7, 1e-3
CERTAIN = 1e-9
"""A true source fails each statistical test with this probability."""
STD = 3.0


def check(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    data: Columns | None = None,
    loss: Loss | None = None,
    prepare: Callable[[Columns], Any] | None = None,
    collate: Collate | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    neighbours: Sequence[Neighbours] | None = None,
    arrange: Callable[[Private], None] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    source: Callable[[int], Source] = Seeded,
    price: bool = True,
    thorough: bool = True,
) -> Conformance:
    """Record and replay `recipe` on neighbours of `data`, and check its prices; ask the result to `require_passed`.

    All parts are the recipe's own, yours included; what changes is the length (`steps`), the number of records and the
    sampling rate, so that something happens. `model`, `data` (tensors with a row per record) and `loss` are small ones
    of the suite unless all three are given. `prepare` makes the dataset from the tensors, for transforms that must not
    look at other records. `optimizer` builds one from parameters. `arrange` changes a bound run before it starts, to
    add schedulers, say. The neighbours are those of `choose_neighbours` unless given; `price=False` leaves prices alone
    and `thorough=False` stops at the first finding.

    Guarantees: everything that is released, saved, printed or logged is compared. Limits: finding nothing is no proof.
    """
    given = (model, data, loss)
    if any(part is None for part in given) and any(part is not None for part in given):
        raise InvalidInput("model, data and loss belong together: give all three or none")
    if not recipe.amplifies:
        raise InvalidInput("sampler=Foreign() does not draw: its batches cannot be replayed; check with Poisson draws")
    if model is None or data is None or loss is None:
        model, data, loss = make_linear_model(), make_few_records(), linear_loss
        recipe = _replace_public(recipe)
    remembers = recipe.sampler is not None and type(recipe.sampler).observe is not Sampler.observe
    chosen = choose_neighbours(data, remembers) if neighbours is None else neighbours
    count = min(pair.count(pair.without) for pair in chosen)
    small = fit(recipe, count, steps)
    build = optimizer or small.optimizer.build
    run = make_program(small, model, loss, build, prepare=prepare, collate=collate, arrange=arrange)
    result = Conformance(recipe.name, 0, 0, tuple(check_prices(small)) if price else ())
    for pair in chosen:
        if result.findings and not thorough:
            break
        result = result + replay(run, pair, seed=seed, source=source, passes=_find_decision(small))
    return result


def build_examples() -> dict[str, Recipe]:
    """Build a small recipe of every mechanism of the library, by name, to check and audit it.

    A mechanism that is added to `sordino.mechanisms` is among them, with the options that its `example` names.
    """
    found = mechanisms.find_all()
    return {name: known.recipe(batch_size=4, epochs=4, **known.example) for name, known in found.items()}


def make_program(
    recipe: Recipe,
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    prepare: Callable[[Columns], Any] | None = None,
    collate: Collate | None = None,
    arrange: Callable[[Private], None] | None = None,
) -> Program:
    """Make training by `recipe` a program to replay; its public state is what a checkpoint holds after every step."""

    def run(data: Columns, tape: Tape) -> list[Any]:
        trained = copy.deepcopy(model)
        dataset = prepare(data) if prepare else data
        made = optimizer(trained.parameters())
        private = Private(trained, made, dataset, loss, recipe, collate=collate, source=tape, validate=False)
        if arrange is not None:
            arrange(private)
        tape.watch(private.bench.ledger)
        states = [copy.deepcopy(_read_public(private))]
        for step in private.steps():
            states.append(copy.deepcopy({**_read_public(private), "step": step.number}))
            _check_erased(states[-2], states[-1], tape)
        tape.close()
        private.close()
        return states

    return run


def _check_erased(before: dict[str, Any], after: dict[str, Any], tape: Tape) -> None:
    """Check that a proposal that is paid for as erased leaves nothing in the optimizer when it is rolled back."""
    erases = bool(tape.charges) and isinstance(tape.charges[-1], Erasure | AnnealedErasure)
    saved, now = before["saved"], after["saved"]
    if (
        erases
        and not find_difference(saved["model"], now["model"])
        and find_difference(saved["optimizer"], now["optimizer"])
    ):
        tape.findings.append("a rejected proposal lives on in the optimizer, and is paid for as if it were erased")


def _read_public(private: Private) -> dict[str, Any]:
    """Read what a checkpoint holds, and the learning rates and schedules that the next step will use."""
    bench = private.bench
    groups = [{key: value for key, value in group.items() if key != "params"} for group in bench.optimizer.param_groups]
    schedules = [scheduler.state_dict() for scheduler in bench.schedulers]
    return {
        "saved": {**private.state_dict(), "position": private.position, "events": len(bench.ledger)},
        "groups": groups,
        "by": schedules,
    }


def choose_neighbours(data: Columns, remembers: bool = False) -> list[Neighbours]:
    """Choose neighbours: a record that is ordinary, far out, not a number, alone in its class or draw, or not drawn.

    If draws depend on what a sampler `remembers` from earlier ones, also a record that is drawn once.
    """
    while len(data[0]) in AMBIGUOUS:
        data = tuple(column[1:] for column in data)
    last, rest = tuple(column[-1:] for column in data), tuple(column[:-1] for column in data)
    loud, nothing = (_scale(last, factor) for factor in (LOUD, float("nan")))

    def pair(
        name: str, last: Columns, without: Columns = rest, coin: Extra = "joins", empty: bool = False
    ) -> Neighbours:
        present = tuple(torch.cat(both) for both in zip(without, last, strict=True))
        return Neighbours(name, without, present, coin, empty, lambda columns: len(columns[0]))

    return [
        pair("a record", last),
        pair("a record far out", loud),
        pair("a record far out on the other side", _scale(last, -LOUD)),
        pair("a record that is not a number", nothing),
        *(pair("a class that vanishes", only, without) for without, only in _split_last_class(data)),
        pair("an empty draw", loud, empty=True),
        pair("a record that is not drawn", loud, coin="stays out"),
        *([pair("a record that is drawn once", loud, coin="joins once")] if remembers else []),
    ]


def _scale(record: Columns, factor: float) -> Columns:
    return tuple(column * factor if column.is_floating_point() else column for column in record)


def _split_last_class(data: Columns) -> Iterator[tuple[Columns, Columns]]:
    """Return the records without the last one's class, and one record of that class; for data with one label column."""
    labels = [column for column in data if column.dim() == 1 and not column.is_floating_point()]
    if not labels:
        return
    same = labels[-1] == labels[-1][-1]
    if int((~same).sum()) > 1:
        yield tuple(column[~same] for column in data), tuple(column[-1:] for column in data)


def fit(recipe: Recipe, count: int, steps: int) -> Recipe:
    """Fit `recipe` to about `count` records, half of them in a draw, with its own noise, or 1 if it has none."""
    noisy = replace(recipe, noise_multiplier=recipe.noise_multiplier or 1.0)
    return shrink(noisy, count, max(1, count // 2), steps, tested=max(1, count // 3))


def _find_decision(recipe: Recipe) -> Passes | None:
    test = getattr(recipe.selection, "test", None)
    return getattr(test, "passes", None)


# -- the suite's own small problem ------------------------------------------------------------------------------


def linear_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the output for the record's class: its gradient is the record itself, whatever the weights."""
    outputs: Tensor = model(batch[0])
    return outputs.gather(1, batch[1].unsqueeze(1)).squeeze(1)


def make_linear_model() -> nn.Module:
    """One output per class, at zero."""
    model = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(model.weight)
    return model


def make_few_records(count: int = 14) -> Columns:
    """Make short and long records of three classes; only the last three records are in the last class."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 3, generator=generator) * torch.linspace(0.3, 4.0, count).unsqueeze(1)
    labels = torch.arange(count) % 2
    labels[-3:] = 2
    return inputs, labels


def _replace_public(recipe: Recipe) -> Recipe:
    """Replace public records by ones with the shape that the suite's own model takes."""
    selection: Any = recipe.selection
    public = getattr(selection, "public", None)
    if public is None:
        return recipe
    inputs, labels = make_few_records()
    others = type(public).of(public.name, (inputs[:4].flip(1), labels[:4]))
    return replace(recipe, selection=replace(selection, public=others))


# -- sources of noise -------------------------------------------------------------------------------------------------


def check_source(make: Callable[[], Source], *, sources: int = SOURCES) -> Conformance:
    """Check the sources that `make` makes, such as `sordino.noise.Secure`: every call must return a new source.

    Guarantees: a true source fails with probability below 1e-7. Keys of 16 bits pass with probability below 1e-50, keys
    of 20 bits with 3e-4. Whether the operating system's randomness is any good cannot be seen from outside.
    """
    findings = [*_check_keys(make, sources), *_check_distribution(make())]
    return Conformance("source", 1, 0, tuple(findings))


def _check_keys(make: Callable[[], Source], sources: int) -> list[str]:
    """The birthday test: two sources that begin alike have the same key."""
    begins = [tuple(make().uniform(2).tolist()) for _ in range(sources)]
    alike = sources - len(set(begins))
    return [f"{alike} of {sources} sources begin as another does: their keys are too short"] if alike else []


def _check_distribution(made: Source) -> list[str]:
    one, other = (
        made.gaussian(Receipt(number, GaussianDpEvent(1.0)), NUMBERS, STD).double().numpy() for number in (1, 2)
    )
    both = np.concatenate([one, other])
    found = []
    if stats.kstest(both, "norm", args=(0.0, STD)).pvalue < CERTAIN:
        found.append(f"noise of deviation {STD:g} was asked for, {both.std():.4g} was drawn, or it is not normal")
    if abs(float(np.corrcoef(one, other)[0, 1])) > stats.norm.isf(CERTAIN) / NUMBERS**0.5:
        found.append("the noise of two releases is correlated: its differences reveal what was released")
    if bool((one == 0).any()) or len(np.unique(both)) < 0.99 * len(both):
        found.append("some numbers get no noise of their own")
    coins = made.uniform(NUMBERS)
    if stats.kstest(coins, "uniform").pvalue < CERTAIN:
        found.append("sampling coins are not uniform: draws are not what is charged")
    return [*found, *_check_draw(made)]


def _check_draw(made: Source) -> list[str]:
    """Check who joins a large draw: as many as coins would choose, equally in all parts of the records, each once."""
    joined = made.toss(RECORDS, RATE)
    where, expected = np.asarray(joined.indices), RECORDS * RATE
    if len(where) and not (where.min() >= 0 and where.max() < RECORDS and (np.diff(where) > 0).all()):
        return ["a draw holds a record twice, out of order, or one that does not exist"]
    off = abs(len(where) - expected) > stats.norm.isf(CERTAIN) * (expected * (1 - RATE)) ** 0.5
    if off or stats.kstest(where / RECORDS, "uniform").pvalue < CERTAIN:
        return [f"{len(where)} of {RECORDS} records joined at rate {RATE:g}: draws are not what is charged"]
    if stats.kstest(joined.coins, "uniform", args=(0.0, RATE)).pvalue < CERTAIN:
        return ["the coins of those who joined are not uniform below the rate"]
    return []
