"""Correlated noise over rounds: users keep their group while they come and go, and a cycle is charged as one draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino import InvalidInput, Recipe, recipes
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.federated import FedSGD, InProcessGrid, Quantile
from sordino.federated.rounds import Rounds
from sordino.mechanisms.banded import Banded, Cyclic
from tests.federated.common import QUIET_NOISE, honest_app, mechanism, released, strategy, vector
from tests.helpers import mlp

SIZE = 4_000


def banded(bands: int = 3, *, users: int = 60, expected: int = 5, steps: int = 12, noise: float = 1.0) -> Recipe:
    options: dict[str, Any] = {"batch_size": expected, "steps": steps, "noise_multiplier": noise, "lr": 1.0}
    return recipes.banded(bands=bands, **options).for_records(users)


def take(run: Rounds, rounds: int, users: range) -> torch.Tensor:
    """Rounds in which everybody sends zeros: the noise of each, in units of its deviation."""
    zeros = {"weight": torch.zeros(1, SIZE)}
    seen = []
    for _ in range(rounds):
        current = run.begin(users)
        for user in current.drawn:
            run.add(current, user, zeros, within=True)
        seen.append(released(run, current) / current.terms.noise_std)
    return torch.stack(seen)


def test_the_noise_of_the_rounds_is_that_of_the_strategy_matrix() -> None:
    recipe = banded()
    noise = take(mechanism(recipe, size=SIZE), 12, range(60)).numpy()
    assert isinstance(recipe.noise, Banded)
    assert recipe.noise.coefficients is not None
    c = np.array(recipe.noise.coefficients) / np.linalg.norm(recipe.noise.coefficients)
    matrix = sum(weight * np.eye(12, k=-lag) for lag, weight in enumerate(c))
    white = matrix @ noise
    assert np.allclose(white @ white.T / SIZE, np.eye(12), atol=0.1)
    assert not np.allclose(noise @ noise.T / SIZE, np.eye(12), atol=0.1)


def test_a_cycle_is_charged_once_before_anybody_is_asked() -> None:
    recipe = banded()
    run = mechanism(recipe)
    for _ in range(4):
        take_one(run, range(60))
    opened = PoissonSampledDpEvent(3 * 5 / 60, GaussianDpEvent(1.0))
    history = [event for _, event, *_ in run.run.ledger.history()]
    assert history == [opened, PaidByEpoch(1.0), PaidByEpoch(1.0), opened]
    assert run.run.guarantee(1e-5).epsilon == pytest.approx(recipe.price(1e-5))


def take_one(run: Rounds, users: range) -> tuple[int, ...]:
    current = run.begin(users)
    for user in current.drawn:
        run.add(current, user, vector(0.0), within=True)
    run.release(current)
    return current.drawn


class ByPlace(Cyclic):
    """Groups belong to the places in the list of who is connected: the mistake that names prevent."""

    knows_users = True

    def draw_among(self, users: Any, source: Any, state: Any) -> list[int]:
        return [users[place] for place in self.draw(12, source, state).indices.tolist() if place < len(users)]


@pytest.mark.parametrize(("kind", "keeps"), [(Cyclic, True), (ByPlace, False)])
def test_users_who_come_and_go_stay_in_their_group(kind: type[Cyclic], keeps: bool) -> None:
    """A user is asked every third round at most, counted from the first time, whoever else is there."""
    recipe = banded(users=12, expected=4, steps=60)
    run = mechanism(recipe)
    object.__setattr__(run.recipe, "sampler", kind(3, 4 / 12))
    turns: dict[int, set[int]] = {}
    for number in range(60):
        here = [user for user in range(12) if (user + number) % 5]  # some are away each time
        current = run.begin(here)
        for user in current.drawn:
            turns.setdefault(user, set()).add(number % 3)
        run.release(current)
    assert all(len(seen) == 1 for seen in turns.values()) is keeps
    assert len(set().union(*turns.values())) == 3


def test_whoever_joins_contributes_once_a_cycle_and_expectedly_as_often_as_by_poisson() -> None:
    run = mechanism(banded(bands=2, users=200, expected=20, steps=200))
    asked = np.array([len(take_one(run, range(200))) for _ in range(200)])
    assert abs(asked.mean() - 20) < 1.5


def test_a_round_that_is_never_released_breaks_the_chain_and_stays_paid() -> None:
    run = mechanism(banded(), size=SIZE)
    take(run, 2, range(60))
    run.begin(range(60))  # lost
    later = take(run, 1, range(60))
    c = run.recipe.noise._weights()  # type: ignore[attr-defined]
    assert float(later.square().mean()) == pytest.approx(1 / c[0] ** 2, rel=0.1), "fresh noise, nothing taken back"
    assert [type(event) for _, event, *_ in run.run.ledger.history()][3] is PoissonSampledDpEvent


def test_one_band_is_federated_dp_sgd_bit_for_bit() -> None:
    plain = recipes.dpsgd(batch_size=5, steps=4, noise_multiplier=1.0, lr=1.0).for_records(60)
    first, second = (take(mechanism(recipe, size=8, kind=Rounds), 4, range(0)) for recipe in (plain, one_band()))
    assert torch.equal(first, second)


def one_band() -> Recipe:
    return banded(1, steps=4)


def test_a_bound_that_finds_itself_goes_with_it() -> None:
    run = mechanism(banded(noise=1.0), adaptive=Quantile())
    before = run.clip
    for _ in range(6):
        take_one(run, range(60))
    assert run.clip != before
    assert run.run.guarantee(1e-5).epsilon == pytest.approx(banded(noise=1.0).price(1e-5))


def test_it_trains_on_a_grid_and_goes_on_with_a_new_cycle(tmp_path: Any) -> None:
    recipe = replace(banded(2, users=8, expected=4, steps=6, noise=QUIET_NOISE), clip=1.0)
    with strategy(recipe, mlp(seed=1), work=FedSGD(), run=tmp_path / "run", seed=3) as first:
        first.start(InProcessGrid(honest_app(), 8), num_rounds=3)
        assert [type(event) for _, event, *_ in first.run.ledger.history()][2] is PoissonSampledDpEvent
    with strategy(recipe, mlp(seed=1), work=FedSGD(), run=tmp_path / "run", resume=True, seed=4) as second:
        second.start(InProcessGrid(honest_app(), 8), num_rounds=1)
        kinds = [type(event) for _, event, *_ in second.run.ledger.history()]
        assert kinds[3] is PoissonSampledDpEvent, "groups and noise are gone: a new cycle, paid for"


def test_other_samplers_are_still_refused() -> None:
    class Mine(Cyclic):
        """A subclass that says nothing may do anything."""

    recipe = replace(recipes.dpsgd(batch_size=5, steps=4, noise_multiplier=1.0), sampler=Mine(1, 0.1), records=60)
    with pytest.raises(InvalidInput, match="proven for users who come and go"):
        mechanism(recipe)


def test_the_average_of_the_models_is_what_a_federation_returns() -> None:
    recipe = recipes.averaged(after=0, batch_size=4, steps=5, noise_multiplier=QUIET_NOISE, lr=0.5).for_records(8)
    seen: list[dict[str, torch.Tensor]] = []

    def look(number: int, arrays: Any) -> None:
        if number > 0:  # before the first round it is the model that all begin with
            seen.append(arrays.to_torch_state_dict())

    with strategy(recipe, mlp(seed=1)) as run:
        result = run.start(InProcessGrid(honest_app(), 8), evaluate_fn=look)
    returned = result.arrays.to_torch_state_dict()
    assert len(seen) == 5
    for name, value in returned.items():
        torch.testing.assert_close(value, torch.stack([each[name] for each in seen]).mean(0), rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, seen[-1][name])
