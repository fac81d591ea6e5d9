"""Masks of dropout and random views must not follow a seed that all know: one record more would move them all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sordino import Private, recipes
from sordino.augmentation import OWN_COINS
from sordino.chance import SecretChance
from sordino.errors import UnsupportedModel
from sordino.loops import GIVEN
from sordino.validation.watching import ONE_COIN

RECORDS, WIDTH = 4, 64
NOISELESS = 1e-7


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) @ self.weight


class Views(Dataset[Tensor]):
    """Each record is seen in a random view, by all three generators."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(WIDTH) * (torch.rand(()) + random.random() + float(np.random.rand()))  # noqa: NPY002


def train(data: Any, loop: Callable[[Private], None], seed: int | None = None, **options: Any) -> tuple[Tensor, Any]:
    """The weights after two steps from public seeds, and where the three generators stand then."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    model = Dropped() if isinstance(data, Tensor) else nn.Linear(WIDTH, 1, bias=False)
    recipe = recipes.dpsgd(batch_size=RECORDS, steps=2, noise_multiplier=NOISELESS, clip=100.0, **options)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses: Tensor = model(x).reshape(len(x)) + 0.0
        return losses

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = Private(model, optimizer, data, loss, recipe.for_records(RECORDS), seed=seed, validate=False)
    loop(private)
    private.close()
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    stand = torch.get_rng_state().tolist(), of_numpy[1].tolist(), random.getstate()
    return next(model.parameters()).detach().clone(), stand


def by_steps(private: Private) -> None:
    for _ in private.steps():
        pass


def by_loader(private: Private) -> None:
    bench = private.bench
    for batch in private.loader(microbatch=3):
        bench.optimizer.zero_grad()
        private.backward(bench.objective.loss(bench.objective.model, batch))
        bench.optimizer.step()


@pytest.mark.parametrize("loop", [by_steps, by_loader])
@pytest.mark.parametrize("data", [torch.ones(RECORDS, WIDTH), Views()])
def test_what_a_loss_and_a_dataset_draw_is_secret(data: Any, loop: Callable[[Private], None]) -> None:
    """And the caller's generators are as they were."""
    first, stand = train(data, loop)
    again, same = train(data, loop)
    assert (first - again).abs().max() > 1000 * NOISELESS
    assert stand == same
    torch.manual_seed(0)
    _ = Dropped() if isinstance(data, Tensor) else nn.Linear(WIDTH, 1, bias=False)
    assert stand[0] == torch.get_rng_state().tolist()


def test_an_experiment_with_a_seed_repeats_its_masks() -> None:
    data = torch.ones(RECORDS, WIDTH)
    assert torch.equal(train(data, by_steps, seed=1)[0], train(data, by_steps, seed=1)[0])


def test_a_loop_that_is_left_gives_the_generators_back() -> None:
    def leave(private: Private) -> None:
        batches: Any = private.loader()
        next(batches)
        torch.rand(3)
        batches.close()

    _, stand = train(torch.ones(RECORDS, WIDTH), leave)
    torch.manual_seed(0)
    assert stand[0] == torch.get_rng_state().tolist()


def test_a_block_within_a_block_goes_on() -> None:
    chance, device = SecretChance(), torch.device("cpu")
    before = torch.get_rng_state()
    chance.enter(device)
    chance.enter(device)
    inside = torch.rand(3)
    chance.leave()
    assert not torch.equal(torch.get_rng_state(), before)
    assert inside.numel() == 3
    chance.leave()
    chance.leave()
    assert torch.equal(torch.get_rng_state(), before)


# -- what a step cannot make secret is refused, or stated ------------------------------------------------------------


def mask(x: Tensor, coins: Any) -> Tensor:
    return x * torch.as_tensor(coins < 0.5)


def seeds_torch(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return model(mask(x, torch.rand(x.shape)))


def seeds_torch_for_a_while(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(mask(x, torch.rand(x.shape)))


def seeds_a_generator(model: nn.Module, x: Tensor) -> Tensor:
    return model(mask(x, torch.rand(x.shape, generator=torch.Generator().manual_seed(0))))


def seeds_numpy(model: nn.Module, x: Tensor) -> Tensor:
    np.random.seed(0)  # noqa: NPY002
    return model(mask(x, np.random.rand(*x.shape)))  # noqa: NPY002


def seeds_python(model: nn.Module, x: Tensor) -> Tensor:
    random.seed(0)
    return model(mask(x, torch.tensor([[random.random() for _ in row] for row in x])))


HELD = torch.Generator().manual_seed(0)


def holds_a_generator(model: nn.Module, x: Tensor) -> Tensor:
    return model(mask(x, torch.rand(x.shape, generator=HELD)))


def prepare(loss: Any, data: Any = None, steps: int = 1, **options: Any) -> Private:
    torch.manual_seed(0)
    recipe = recipes.dpsgd(batch_size=8, steps=steps, noise_multiplier=1.0).for_records(16)
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0))
    data = torch.randn(16, WIDTH) if data is None else data
    return Private(model, torch.optim.SGD(model.parameters(), lr=1.0), data, loss, recipe, **options)


@pytest.mark.parametrize(
    "loss",
    [seeds_torch, seeds_torch_for_a_while, seeds_a_generator, seeds_numpy, seeds_python, holds_a_generator],
    ids=lambda loss: loss.__name__,
)
def test_a_loss_whose_masks_anyone_can_know_is_refused_before_anything_is_spent(loss: Any) -> None:
    with pytest.raises(UnsupportedModel, match="whoever knows the seed"):
        prepare(loss)


def test_numbers_that_are_the_same_for_every_record_may_have_a_known_seed() -> None:
    """As a fixed random projection that is made anew each time: one record more gives the others no other numbers."""

    def project(model: nn.Module, x: Tensor) -> Tensor:
        return model(x @ torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))

    prepare(project).step()


@pytest.mark.parametrize("loop", [by_steps, by_loader])
def test_a_step_in_which_torch_is_seeded_is_not_released(loop: Callable[[Private], None]) -> None:
    """Whoever skips the probe, or seeds torch now and then, learns it before the noise is drawn."""
    private = prepare(seeds_torch, validate=False)
    before = private.bench.objective.model[0].weight.detach().clone()
    with pytest.raises(UnsupportedModel, match="torch was seeded within a step"):
        loop(private)
    assert torch.equal(private.bench.objective.model[0].weight, before)
    assert len(private.bench.ledger) == 1, "the attempt is charged"
    private.close()


class Own(Dataset[Tensor]):
    """Each record is masked by numbers of a generator that the dataset holds, or seeds."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return mask(torch.ones(WIDTH), self.draw(index)).float()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    losses: Tensor = model(x)
    return losses


def test_a_generator_that_the_dataset_holds_is_named_in_the_headline() -> None:
    held = np.random.default_rng(0)
    stated = prepare(plain, Own(lambda _: held.random(WIDTH))).guarantee(1e-5)
    assert f"proven provided that {OWN_COINS}, which nobody checked" in str(stated)
    for draw in (lambda _: torch.rand(WIDTH), lambda i: np.random.default_rng(i).random(WIDTH)):
        assert prepare(plain, Own(draw)).guarantee(1e-5).conditions == ()


def test_a_dataset_that_seeds_torch_is_refused() -> None:
    def draw(index: int) -> Tensor:
        torch.manual_seed(index)
        return torch.rand(WIDTH)

    with pytest.raises(UnsupportedModel, match="dataset or collate function seeds"):
        prepare(plain, Own(draw))


def test_masks_that_every_pass_draws_again_are_stated() -> None:
    def again(model: nn.Module, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return model(nn.functional.dropout(x))

    assert ONE_COIN in prepare(again).guarantee(1e-5).assumptions
    assert ONE_COIN not in prepare(lambda m, x: m(nn.functional.dropout(x))).guarantee(1e-5).assumptions


def test_what_a_guarantee_rests_on_is_said_before_the_first_draw() -> None:
    """Its place in the ledger would tell which draw first held two records."""

    def toss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) * random.choice([1.0, 2.0])

    private = prepare(toss)
    assert ONE_COIN in private.bench.ledger.declared("assumption")
    before = private.bench.ledger.head().declarations
    private.step()
    assert private.bench.ledger.head().declarations == before


def test_what_a_loop_cannot_compare_is_said_before_its_first_draw() -> None:
    """Said after the first batch, it would tell which draw was the first to hold a record."""
    private = prepare(lambda m, x: m(nn.functional.dropout(x)))
    batches: Any = private.loader()
    next(batches)
    assert private.bench.ledger.declared("condition") == [GIVEN]
    lines = private.bench.ledger._connection.execute("SELECT after FROM declarations WHERE kind = 'condition'")
    assert lines.fetchall() == [(0,)]
    batches.close()
    private.close()
