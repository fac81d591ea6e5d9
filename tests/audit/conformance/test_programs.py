"""Record and replay of what is not training: tables, normalisation, federated rounds, sources, own programs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from randomgen import AESCounter
from torch import Tensor, nn

from sordino import noise, recipes
from sordino.accounting import Budget, Ledger
from sordino.audit import conformance
from sordino.audit.conformance import Neighbours, Tape, replaying
from sordino.federated.rounds import Quantile, Round, Rounds
from sordino.noise import Secure, Seeded, add_noise
from sordino.run import Run
from sordino.tables import labels, normalising, release
from sordino.tables.schema import Schema, describe_header
from sordino.tables.table import Table
from tests.audit import sabotage

Patch = pytest.MonkeyPatch
Sabotage = Callable[[Patch], None]


def half_noise(module: Any) -> Sabotage:
    return lambda patch: patch.setattr(module, "add_noise", lambda s, r, value, std: add_noise(s, r, value, std / 2))


# -- tables ---------------------------------------------------------------------------------------------------------

RECORDS = 1200


def table(*more: tuple[str, str, str]) -> Table:
    rows = [
        (f"{20 + i * 7 % 60}", ("Bern", "Rome", "Oslo")[i % 3], ("no", "yes")[i * 3 % 7 > 3]) for i in range(RECORDS)
    ]
    age, town, outcome = (list(column) for column in zip(*rows, *more, strict=True))
    return Table("patients", {"age": age, "town": town, "outcome": outcome})


def releases(records: Table, tape: Tape) -> Schema:
    schema = describe_header(Schema(), list(records.columns), "outcome", None)
    plan = release.plan_release(schema, RECORDS, Budget(epsilon=6.0, delta=1e-5), 0.5)
    assert plan is not None
    ledger = Ledger.in_memory()
    tape.watch(ledger)
    return release.release(records, "outcome", schema, plan, ledger, tape)


TABLES = [
    Neighbours("a record", table(), table(("33", "Rome", "yes"))),
    Neighbours("a record far out", table(), table(("1e12", "nowhere", "no"))),
    Neighbours("a record of no number", table(), table(("nan", "", "yes"))),
    Neighbours("a class that vanishes", table(), table(("33", "Rome", "maybe"))),
]


def wider_counts(patch: Patch) -> None:
    healthy = release.count_cells
    patch.setattr(release, "count_cells", lambda cells: healthy(cells) * 2)


def true_length(module: Any) -> Sabotage:
    healthy = normalising.private_normalisation

    def normalise(features: Tensor, **options: Any) -> Any:
        return healthy(features, **{**options, "records": len(features)})

    return lambda patch: patch.setattr(module, "private_normalisation", normalise)


def low_threshold(patch: Patch) -> None:
    healthy = labels.find_threshold
    patch.setattr(labels, "find_threshold", lambda noise, unlisted: healthy(noise, 10 * unlisted))


BROKEN_TABLES: dict[str, Sabotage] = {
    "half the noise of class counts": half_noise(labels),
    "half the noise of kinds": half_noise(release),
    "half the noise of scales": half_noise(normalising),
    "a lower threshold for names": low_threshold,
    "counts by two": wider_counts,
    "divided by the records there are": true_length(release),
}


def conforms(run: replaying.Program, pairs: list[Neighbours]) -> conformance.Conformance:
    first, *others = (conformance.replay(run, pair) for pair in pairs)
    return sum(others, first)


def test_the_releases_of_a_table_conform() -> None:
    assert conforms(releases, TABLES).require_passed().releases == 4 * 2 * 4


@pytest.mark.parametrize("name", BROKEN_TABLES)
def test_every_sabotage_of_a_table_is_found(name: str, monkeypatch: Patch) -> None:
    BROKEN_TABLES[name](monkeypatch)
    found = conforms(releases, TABLES)
    assert not found.passed
    assert not any("ended with" in finding for finding in found.findings), found.findings


# -- normalisation --------------------------------------------------------------------------------------------------


def features(*more: float) -> Tensor:
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return torch.cat([rows, *(torch.full((1, 4), value) for value in more)])


def normalised(records: Tensor, tape: Tape) -> dict[str, Tensor]:
    ledger = Ledger.in_memory()
    tape.watch(ledger)
    norm = normalising.private_normalisation(
        records, records=30, clip=1.0, square_clip=2.0, noise_multiplier=2.0, ledger=ledger, source=tape
    )
    return dict(norm.state_dict())


NORMALISED = [Neighbours(f"{value}", features(), features(value)) for value in (0.3, 1e6, float("nan"))]


def by_median(patch: Patch) -> None:
    """The bound of the authors' code: the median norm of the private records."""
    healthy = normalising._clip_rows
    patch.setattr(normalising, "_clip_rows", lambda rows, bound: healthy(rows, float(rows.norm(dim=1).nanmedian()) * 2))


BROKEN_NORMALISATION: dict[str, Sabotage] = {
    "half the noise": half_noise(normalising),
    "clipping off": lambda patch: patch.setattr(normalising, "_clip_rows", lambda rows, bound: rows.nan_to_num()),
    "a median of the records": by_median,
    "divided by the records there are": true_length(normalising),
}


def test_normalisation_conforms() -> None:
    assert conforms(normalised, NORMALISED).require_passed().releases == 3 * 2 * 2


@pytest.mark.parametrize("name", BROKEN_NORMALISATION)
def test_every_sabotage_of_normalisation_is_found(name: str, monkeypatch: Patch) -> None:
    BROKEN_NORMALISATION[name](monkeypatch)
    assert not conforms(normalised, NORMALISED).passed


# -- federated rounds -----------------------------------------------------------------------------------------------

USERS = 8


def federated(kind: type[Rounds], adaptive: Quantile | None) -> replaying.Program:
    def run(updates: list[float], tape: Tape) -> list[Any]:
        recipe = recipes.dpsgd(batch_size=4, steps=3, noise_multiplier=1.0, lr=1.0).for_records(USERS)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        books = Run(recipe, unit="user", source=tape)
        books.begin()
        tape.watch(books.ledger)
        run = kind(model, recipe, torch.optim.SGD(model.parameters(), lr=1.0), books, adaptive)
        seen: list[Any] = []
        for _ in range(3):
            current = run.begin(range(len(updates)))
            for user in range(len(updates)):
                run.add(current, user, {"weight": torch.tensor([[updates[user]]])}, within=abs(updates[user]) < 1)
            run.release(current)
            seen.append((model.weight.detach().clone(), run.clip))
        return seen

    return run


OTHERS = [0.5, -2.0, 1.0, 0.2, 3.0, -0.7, 0.1]
FEDERATED = [
    *(Neighbours(f"{value}", OTHERS, [*OTHERS, value]) for value in (0.5, 100.0, float("nan"))),
    Neighbours("not drawn", OTHERS, [*OTHERS, 100.0], extra="stays out"),
    Neighbours("alone", OTHERS, [*OTHERS, 100.0], empty=True),
]


class TrustsClients(Rounds):
    def weight(self, update: Mapping[str, Tensor], clip: float) -> float:
        return 1.0


class DividesByAnswers(Rounds):
    def release(self, current: Round) -> None:
        current.terms = replace(current.terms, divisor=float(max(1, len(current.drawn) - len(current.waiting))))
        super().release(current)


class AddsWhoeverAnswers(Rounds):
    def add(self, current: Round, user: int, update: Mapping[str, Tensor], within: bool) -> None:
        current.waiting.add(user)
        super().add(current, user, update, within)


class FreeVotes(Rounds):
    """Votes are noised, but their share is not taken from the updates' noise."""

    def terms(self) -> Any:
        return replace(self.recipe.terms(self.run.position), clip=self.clip)


class QuietVotes(Rounds):
    def _count_noise(self) -> float:
        return super()._count_noise() / 2


BROKEN_ROUNDS: dict[str, type[Rounds]] = {
    "trusts clients": TrustsClients,
    "divides by answers": DividesByAnswers,
    "adds whoever answers": AddsWhoeverAnswers,
    "votes are free": FreeVotes,
    "half the noise of votes": QuietVotes,
}


@pytest.mark.parametrize("adaptive", [None, Quantile()])
def test_federated_rounds_conform(adaptive: Quantile | None) -> None:
    conforms(federated(Rounds, adaptive), FEDERATED).require_passed()


@pytest.mark.parametrize("name", BROKEN_ROUNDS)
def test_every_sabotage_of_a_round_is_found(name: str) -> None:
    found = conforms(federated(BROKEN_ROUNDS[name], Quantile()), FEDERATED)
    assert not found.passed
    assert not any("ended with" in finding for finding in found.findings), found.findings


def test_half_the_noise_of_a_round_is_found(monkeypatch: Patch) -> None:
    healthy = noise.perturb
    monkeypatch.setattr(noise, "perturb", lambda source, receipt, sums, std: healthy(source, receipt, sums, std / 2))
    assert not conforms(federated(Rounds, None), FEDERATED).passed


# -- sources --------------------------------------------------------------------------------------------------------


class SixteenBits(Secure):
    """Keyed with two bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = np.random.Generator(AESCounter(key=secrets.randbits(16)))

    def _words(self, size: int) -> np.ndarray:
        return self._generator.integers(2**64, size=size, dtype=np.uint64)


def test_the_secure_source_conforms() -> None:
    conformance.check_source(Secure).require_passed()


@pytest.mark.parametrize(
    "make",
    [
        SixteenBits,
        *(
            lambda kind=kind, seeds=iter(range(10_000)): kind(next(seeds))
            for kind in (
                sabotage.Halved,
                sabotage.Repeated,
                sabotage.SharedAmongParts,
                sabotage.SomeCoordinates,
                sabotage.OneSided,
            )
        ),
    ],
)
def test_a_broken_source_is_found(make: Callable[[], Any]) -> None:
    assert not conformance.check_source(make, sources=2048).passed


def test_seeded_sources_conform() -> None:
    seeds = iter(range(10_000))
    conformance.check_source(lambda: Seeded(next(seeds)), sources=512).require_passed()


# -- a program of one's own -----------------------------------------------------------------------------------------


def mean_of(records: list[float], tape: Tape, bound: float = 1.0, note: str = "") -> float:
    ledger = Ledger.in_memory()
    tape.watch(ledger)
    receipt = ledger.charge(GaussianDpEvent(2.0))
    total = torch.tensor([sum(max(-bound, min(bound, value)) for value in records)], dtype=torch.float64)
    if note:
        raise ValueError(f"{note}: {records[-1]}")
    return add_noise(tape, receipt, total, 2.0).item() / 10


LOUD = Neighbours("loud", [0.5, -0.5], [0.5, -0.5, 40.0])


def test_a_program_of_ones_own() -> None:
    conformance.replay(mean_of, LOUD).require_passed()
    wide = conformance.replay(lambda records, tape: mean_of(records, tape, bound=5.0), LOUD)
    assert "moved by 5" in str(wide.findings)
    silent = conformance.replay(lambda records, tape: (mean_of(records, tape), len(records)), LOUD)
    assert "what is public[1] depends" in str(silent.findings)


def test_an_error_for_one_neighbour_alone_is_a_finding_without_its_text() -> None:
    found = conformance.replay(lambda r, tape: mean_of(r, tape, note="bad" if len(r) == 3 else ""), LOUD)
    assert "ValueError is raised for one of two neighbours" in str(found.findings)
    assert "40" not in str(found.findings)


def test_an_event_that_nobody_knows_is_said() -> None:
    from dp_accounting import LaplaceDpEvent

    def run(records: list[float], tape: Tape) -> None:
        ledger = Ledger.in_memory()
        tape.watch(ledger)
        add_noise(tape, ledger.charge(LaplaceDpEvent(1.0)), torch.zeros(1), 1.0)

    assert "unknown to the conformance suite" in str(conformance.replay(run, LOUD).findings)
