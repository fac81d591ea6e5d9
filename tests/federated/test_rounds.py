"""The private round: noise of the claimed deviation once, Poisson draws, a constant divisor, the ledger first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from sordino import BudgetExhausted, InvalidInput, Recipe, SordinoError, recipes
from sordino.accounting.ledger import Receipt
from sordino.federated.rounds import Round, Rounds
from sordino.noise import Seeded
from sordino.parts import Draw, Foreign, Sampler
from tests.federated.common import QUIET_NOISE, mechanism, released, rounds, vector

SIZE = 20_000


def fits(noise: NDArray[np.float64], std: float) -> bool:
    return bool(stats.kstest(noise / std, "norm").pvalue > 0.001)


def noise_of(run: Rounds, users: int) -> NDArray[np.float64]:
    """Rounds in which all send zeros, each in units of its own clipping bound and noise multiplier."""
    zeros, seen = {"weight": torch.zeros(1, SIZE)}, []
    for _ in range(run.recipe.steps or 0):
        current = run.begin(range(users))
        for user in current.drawn:
            run.add(current, user, zeros, within=True)
        seen.append((released(run, current) / current.terms.noise_std).numpy())
    return np.concatenate(seen)


class NoiseByClients(Rounds):
    """Every client adds noise of its own: the sum has too much of it, or too little when some drop out."""

    def add(self, current: Round, user: int, update: dict[str, Tensor], within: bool) -> None:
        std = current.terms.noise_std / len(current.drawn) ** 0.5
        own = self.run.source.gaussian(current.receipt, SIZE, std).view(1, -1)
        super().add(current, user, update, within)
        current.total["weight"] += own


@pytest.mark.parametrize("users", [0, 6])
@pytest.mark.parametrize("recipe", [recipes.dpsgd, recipes.growing_mu, recipes.dynamic, recipes.sensitivity_decay])
def test_the_noise_has_the_deviation_of_the_round_and_no_other(recipe: type[Recipe], users: int) -> None:
    plan = recipe(batch_size=6, steps=5, noise_multiplier=1.3, clip=0.7, lr=1.0).for_records(6)
    noise = noise_of(mechanism(plan, size=SIZE), users)
    assert fits(noise, 1.0)
    assert not fits(noise, 0.95)
    assert not fits(noise, 1.05)


def test_noise_added_by_the_clients_too_is_noticed() -> None:
    assert not fits(noise_of(mechanism(rounds(6, 6), size=SIZE, kind=NoiseByClients), 6), 1.0)


# -- sampling --------------------------------------------------------------------------------------------------------


class FixedSize(Sampler):
    """As many users in every round: what most federated samplers do, and what amplification does not cover."""

    def __init__(self, size: int) -> None:
        self.size = size

    def draw(self, records: int, source: Seeded, memory: object) -> Draw:
        return Draw(torch.from_numpy(np.argsort(source.uniform(records))[: self.size].copy()))


def draws_of(run: Rounds, users: int, times: int) -> NDArray[np.int64]:
    """Who was drawn, one row per round, without ever releasing."""
    table = np.zeros((times, users), dtype=np.int64)
    for row in table:
        row[list(run.begin(range(users)).drawn)] = 1
    return table


def is_poisson(table: NDArray[np.int64], rate: float) -> bool:
    """Chi-square tests of the sizes against the binomial, and of every user's count against the rate."""
    times, users = table.shape
    expected = times * stats.binom.pmf(np.arange(users + 1), users, rate)
    observed = np.bincount(table.sum(1), minlength=users + 1)
    kept = expected > 5
    tail = expected[~kept].sum()
    sizes = stats.chisquare(
        np.append(observed[kept], observed[~kept].sum()), np.append(expected[kept], tail), sum_check=False
    )
    each = ((table.sum(0) - times * rate) ** 2 / (times * rate * (1 - rate))).sum()
    return bool(sizes.pvalue > 0.001 and stats.chi2.sf(each, users) > 0.001)


def test_users_are_drawn_independently_at_the_rate() -> None:
    assert is_poisson(draws_of(mechanism(rounds(12, 3)), 12, 1500), 0.25)


def test_another_rate_and_another_way_of_drawing_are_noticed() -> None:
    table = draws_of(mechanism(rounds(12, 3)), 12, 1500)
    assert not is_poisson(table, 0.22)
    run = mechanism(rounds(12, 3))
    object.__setattr__(run.recipe, "sampler", _amplifying(FixedSize(3), run.recipe))
    assert not is_poisson(draws_of(run, 12, 1500), 0.25)


def _amplifying(sampler: FixedSize, recipe: Recipe) -> FixedSize:
    sampler.terms = recipe.sampler.terms  # type: ignore[attr-defined,union-attr]
    return sampler


def test_the_rate_comes_from_the_public_population_not_from_who_is_connected() -> None:
    run = mechanism(rounds(100, 25))
    few = draws_of(run, 10, 400).mean()
    many = draws_of(run, 1000, 20).mean()
    assert abs(few - 0.25) < 0.03
    assert abs(many - 0.25) < 0.03


# -- what a user can do ----------------------------------------------------------------------------------------------


def everyone(users: int = 4, **changes: object) -> Rounds:
    return mechanism(rounds(users, users, noise=QUIET_NOISE, **changes), size=2)


def test_updates_are_clipped_again_and_summed_without_weights() -> None:
    run = everyone()
    current = run.begin(range(4))
    for user, update in enumerate([vector(0.3, 0.0), vector(1e30, 0.0), vector(0.0, 0.5), vector(0.0, -7.0)]):
        run.add(current, user, update, within=True)
    assert torch.allclose(released(run, current), torch.tensor([1.3, -0.5], dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_is_a_zero(value: float) -> None:
    run = everyone()
    current = run.begin(range(4))
    run.add(current, 0, vector(value, 1.0), within=True)
    run.add(current, 1, vector(0.25, 0.0), within=True)
    assert torch.allclose(released(run, current), torch.tensor([0.25, 0.0], dtype=torch.float64), atol=1e-4)


def test_a_second_answer_and_one_that_nobody_asked_for_change_nothing() -> None:
    run = everyone()
    current = run.begin(range(4))
    for user in (0, 0, 0, 77):
        run.add(current, user, vector(1.0, 0.0), within=True)
    assert torch.allclose(released(run, current), torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-4)


def test_missing_users_count_as_zero_and_the_divisor_stays() -> None:
    moved = []
    for answering in (4, 1, 0):
        run = everyone()
        current = run.begin(range(4))
        for user in range(answering):
            run.add(current, user, vector(0.5, 0.0), within=True)
        run.release(current)
        moved.append(-next(run.model.parameters())[0, 0].item())
    assert moved == pytest.approx([0.5, 0.125, 0.0], abs=1e-6)


# -- the ledger ------------------------------------------------------------------------------------------------------


class Watching(Seeded):
    """Notes how many events were in the ledger whenever randomness was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[tuple[str, int]] = []
        self.run: Rounds | None = None

    def _note(self, what: str) -> None:
        assert self.run is not None
        self.seen.append((what, len(self.run.run.ledger)))

    def uniform(self, size: int) -> NDArray[np.float64]:
        self._note("draw")
        return super().uniform(size)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self._note("noise")
        return super().gaussian(receipt, size, std)


def test_the_event_is_recorded_before_the_draw_and_the_noise() -> None:
    source = Watching()
    run = source.run = mechanism(rounds(8, 4, steps=3), source=source)
    for _ in range(3):
        run.release(run.begin(range(8)))
    assert source.seen == [(what, number) for number in (1, 2, 3) for what in ("draw", "noise")]


def test_a_round_that_was_begun_stays_charged_and_the_ledger_never_falls_behind() -> None:
    run, noised = mechanism(rounds(8, 4, steps=9)), 0
    for step in range(5):
        current = run.begin(range(8))
        if step % 2:  # the others break off here
            run.release(current)
            noised += 1
        assert len(run.run.ledger) == step + 1
    assert (len(run.run.ledger), run.run.position, noised) == (5, 2, 2)


def test_the_ledger_holds_the_plan_of_the_recipe() -> None:
    plan = recipes.dynamic(batch_size=4, steps=4, noise_multiplier=1.5).for_records(8)
    run = mechanism(plan)
    for step in range(4):
        current = run.begin(range(8))
        assert current.terms == plan.terms(step)
        run.release(current)
    assert run.run.ledger.events() == plan.plan()
    assert plan.terms(0).event == PoissonSampledDpEvent(0.5, GaussianDpEvent(1.5))


def test_a_round_is_released_once_and_a_finished_recipe_goes_no_further() -> None:
    run = mechanism(rounds(8, 4, steps=1))
    current = run.begin(range(8))
    run.release(current)
    with pytest.raises(SordinoError, match="released already"):
        run.release(current)
    with pytest.raises(BudgetExhausted, match="all 1 rounds"):
        run.begin(range(8))


# -- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (recipes.dpsgd(steps=3, batch_size=4), "not calibrated"),
        (recipes.dpsgd(steps=3, batch_size=4, noise_multiplier=1.0, sampler=Foreign()).for_records(8), "Poisson"),
        (recipes.jl(projections=24, steps=3, batch_size=4, noise_multiplier=1.0).for_records(8), "must be Exact"),
        (recipes.dpsur(steps=3, batch_size=4, noise_multiplier=1.0).for_records(999), "must be Always"),
        (recipes.dpis(steps=3, batch_size=4, noise_multiplier=1.0).for_records(8), "Poisson|calibrated"),
    ],
)
def test_recipes_that_have_no_meaning_for_users_are_refused(recipe: Recipe, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        mechanism(recipe)
