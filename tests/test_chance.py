"""Masks of dropout and random views must not follow a seed that all know: one record more would move them all."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sordino import Budget, Private, recipes
from sordino.augmentation import OWN_COINS
from sordino.chance import SecretChance
from sordino.errors import UnsupportedModel
from sordino.loops import GIVEN
from sordino.mechanisms.shuffled import ShuffledLoader
from sordino.parts import SEEDED_BY_LOADER, Foreign
from sordino.run import list_assumptions
from sordino.validation.watching import HALF_IN_LOOP, ONE_COIN

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


def prepare(loss: Any, data: Any = None, steps: int = 1, size: int = 8, **options: Any) -> Private:
    torch.manual_seed(0)
    recipe = recipes.dpsgd(batch_size=size, steps=steps, noise_multiplier=1.0).for_records(16)
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


def by_chunks(size: int) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        parts = []
        for part in x.split(size):
            with torch.random.fork_rng():
                parts.append(nn.functional.dropout(part))
        torch.rand(())  # or it would be where it began, as after a whole pass within fork_rng
        losses: Tensor = model(torch.cat(parts))
        return losses

    return loss


def begun_again(model: nn.Module, x: Tensor) -> Tensor:
    first, second = x.tensor_split(2)
    first = nn.functional.dropout(first)
    torch.manual_seed(torch.initial_seed())  # which stays secret, and still both halves have the same masks
    losses: Tensor = model(torch.cat([first, nn.functional.dropout(second)]))
    torch.rand(())
    return losses


@pytest.mark.parametrize("loss", [by_chunks(3), by_chunks(7), begun_again])
def test_masks_that_records_share_by_their_places_are_refused(loss: Any) -> None:
    """One record more gives all after it the mask of another: a coin of all records it is not."""
    with pytest.raises(UnsupportedModel, match="draws the same random numbers twice"):
        prepare(loss)


def test_what_a_guarantee_rests_on_is_said_before_the_first_draw() -> None:
    """Its place in the ledger would tell which draw first held two records."""

    def toss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) * random.choice([1.0, 2.0])

    private = prepare(toss)
    assert ONE_COIN in private.bench.ledger.declared("assumption")
    before = private.bench.ledger.head().declarations
    private.step()
    assert private.bench.ledger.head().declarations == before


@pytest.mark.parametrize("kind", ["a common coin", "half precision"])
def test_what_a_guarantee_rests_on_for_some_records_only_is_refused(kind: str) -> None:
    """A line that followed after a draw would tell which draw first held such a record."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses, far = model(x), x[:, 0] > 50
        if not bool(far.any()):
            return losses
        other = losses * (torch.rand(()) < 2) if kind == "a common coin" else losses.bfloat16().float()
        return torch.where(far, other, losses)

    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    data[7, 0] = 100.0  # not among the four that are probed
    private = prepare(loss, data, size=16)
    before = private.bench.ledger.head().declarations
    with pytest.raises(UnsupportedModel, match="for some records the loss uses half precision, or a random number"):
        private.step()
    assert private.bench.ledger.head().declarations == before
    private.close()


def test_a_loop_says_before_its_first_draw_what_half_precision_would_rest_on() -> None:
    """Autocast around the user's own forward pass is seen by nobody: the loss that was probed is in float32."""
    private = prepare(plain)
    assert HALF_IN_LOOP not in private.guarantee(1e-5).assumptions
    batches: Any = private.loader()
    next(batches)
    assert HALF_IN_LOOP in private.guarantee(1e-5).assumptions
    lines = private.bench.ledger._connection.execute("SELECT after FROM declarations WHERE text = ?", [HALF_IN_LOOP])
    assert lines.fetchall() == [(0,)]
    batches.close()
    private.close()


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


@pytest.mark.parametrize("sampler", [Foreign(), ShuffledLoader()])
def test_the_seeds_of_a_foreign_loader_are_an_assumption(sampler: Foreign) -> None:
    """Of its generator= and worker_init_fn= nothing is known."""
    assert SEEDED_BY_LOADER in list_assumptions(recipes.dpsgd(batch_size=8, steps=1, sampler=sampler), "")


def test_a_loop_that_an_error_ended_leaves_no_known_seeds_to_the_next() -> None:
    """A notebook keeps the loop in its last traceback; its cell, run again, begins with a public seed."""
    private = prepare(plain, steps=3)
    first: Any = private.loader()
    next(first)
    torch.manual_seed(0)
    public = torch.rand(WIDTH)
    torch.manual_seed(0)
    second: Any = private.loader()
    batch = next(second)
    assert not torch.equal(torch.rand(WIDTH), public)
    first.close()  # as the garbage collector does, whenever it likes
    assert not torch.equal(torch.rand(WIDTH), public)
    private.bench.optimizer.zero_grad()
    private.backward(plain(private.bench.objective.model, batch))
    private.bench.optimizer.step()
    second.close()
    private.close()


def test_a_block_that_could_not_begin_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, device = SecretChance(), torch.device("cpu")
    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(SecretChance, "_renew", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chance.enter(device)
    chance.enter(device)
    assert chance.is_secret
    chance.leave()
    assert torch.equal(torch.get_rng_state(), before)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- collate functions, and datasets that leave a generator seeded ----------------------------------------------------


class Rows(Dataset[Tensor]):
    """Equal records; `leave` seeds something whenever one is read."""

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        self.leave = leave

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.leave()
        return torch.ones(WIDTH) * (1 + index)


def collates_with_a_seed_of_numpy(items: list[Tensor]) -> Tensor:
    np.random.seed(0)  # noqa: NPY002
    return mask(torch.stack(items), np.random.rand(len(items), WIDTH))  # noqa: NPY002


def collates_with_a_seed_of_python(items: list[Tensor]) -> Tensor:
    random.seed(0)
    return mask(torch.stack(items), torch.tensor([[random.random() for _ in range(WIDTH)] for _ in items]))


def collates_with_a_new_generator(items: list[Tensor]) -> Tensor:
    return mask(torch.stack(items), torch.rand(len(items), WIDTH, generator=torch.Generator().manual_seed(0)))


def collates_with_a_new_generator_of_numpy(items: list[Tensor]) -> Tensor:
    return mask(torch.stack(items), np.random.default_rng(0).random((len(items), WIDTH)))


def collates_with_torch_seeded_for_a_while(items: list[Tensor]) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.functional.dropout(torch.stack(items))


def collates_with_coins_of_its_own_behind_secret_ones(items: list[Tensor]) -> Tensor:
    x = nn.functional.dropout(torch.stack(items))
    return mask(x, np.random.default_rng(0).random((len(items), WIDTH)))


@pytest.mark.parametrize(
    "collate",
    [
        collates_with_coins_of_its_own_behind_secret_ones,
        collates_with_a_seed_of_numpy,
        collates_with_a_seed_of_python,
        collates_with_a_new_generator,
        collates_with_a_new_generator_of_numpy,
        collates_with_torch_seeded_for_a_while,
    ],
    ids=lambda collate: collate.__name__,
)
@pytest.mark.parametrize("across", [False, True], ids=["rows first", "rows last"])
def test_a_collate_function_whose_masks_anyone_can_know_is_refused(collate: Any, across: bool) -> None:
    """A record's mask would be that of its place: one record more gives another one to all after it."""

    def transposed(items: list[Tensor]) -> Tensor:
        return collate(items).T.contiguous()

    with pytest.raises(UnsupportedModel, match="in a smaller batch" if across else "its place in the batch"):
        prepare(lambda m, x: m(x.T if across else x), Rows(), collate=transposed if across else collate)


def test_a_collate_function_may_draw_from_the_default_generators() -> None:
    def collate(items: list[Tensor]) -> Tensor:
        x = nn.functional.dropout(torch.stack(items))
        coins = torch.tensor([[random.random() for _ in range(WIDTH)] for _ in items])
        return mask(mask(x, coins), np.random.rand(*x.shape))  # noqa: NPY002

    prepare(plain, Rows(), collate=collate).step()


def test_a_collate_function_may_mask_tokens_by_the_default_generator() -> None:
    """As the one of transformers does for language models; what all records share is the same for them in any order."""

    def collate(items: list[Tensor]) -> Tensor:
        x = torch.stack(items)
        masked = torch.bernoulli(torch.full(x.shape, 0.15)).bool()
        words = torch.randint(100, x.shape).to(x.dtype)
        return (
            torch.where(masked, words, x) * torch.rand(len(x), 1)
            + torch.stack([torch.randn(()) for _ in items])[:, None]
        )

    prepare(plain, Rows(), collate=collate).step()


@pytest.mark.parametrize("outside", ["numpy", "python"])
def test_what_a_dataset_leaves_seeded_does_not_reach_the_loss(outside: str) -> None:
    """Repeated from public seeds, two runs would have the same masks."""

    def leave() -> None:
        np.random.seed(0) if outside == "numpy" else random.seed(0)  # noqa: NPY002

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        coins = np.random.rand(*x.shape) if outside == "numpy" else [[random.random() for _ in row] for row in x]  # noqa: NPY002
        masked: Tensor = model(mask(x, torch.as_tensor(coins))).flatten()
        return masked

    def run() -> Tensor:
        torch.manual_seed(0)
        recipe = recipes.dpsgd(batch_size=16, steps=1, noise_multiplier=NOISELESS, clip=1e4).for_records(16)
        model = nn.Linear(WIDTH, 1, bias=False)
        private = Private(model, torch.optim.SGD(model.parameters(), lr=1.0), Rows(leave), loss, recipe)
        private.step()
        private.close()
        return model.weight.detach().clone()

    assert (run() - run()).abs().max() > 0.1


@pytest.mark.parametrize("loop", [by_steps, by_loader])
def test_a_step_in_which_numpy_is_seeded_is_not_released(loop: Callable[[Private], None]) -> None:
    private = prepare(seeds_numpy, validate=False)
    with pytest.raises(UnsupportedModel, match="NumPy was seeded within a step"):
        loop(private)
    private.close()


def test_what_seeded_numpy_in_one_step_is_gone_in_the_next() -> None:
    chance = SecretChance()
    chance.enter(torch.device("cpu"))
    np.random.seed(0)  # noqa: NPY002
    assert not chance.is_secret
    chance.end()
    chance.enter(torch.device("cpu"))
    assert chance.is_secret
    first = np.random.rand()  # noqa: NPY002
    chance.end()
    assert first != np.random.RandomState(0).rand()


def test_every_device_of_the_models_kind_is_seeded_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be on another device than the present one; and only the device may have been seeded."""
    generators = [torch.Generator(), torch.Generator()]

    def seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    module = SimpleNamespace(
        device_count=lambda: 0,
        manual_seed=lambda seed: generators[0].manual_seed(seed),
        manual_seed_all=seed_all,
        default_generators=generators,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    chance = SecretChance()
    chance.enter(torch.device("cuda:1"))
    assert chance.is_secret
    generators[1].manual_seed(0)
    with pytest.raises(UnsupportedModel, match="torch was seeded"):
        chance.require_secret()
    chance.end()


def test_norms_that_were_measured_with_a_known_seed_are_not_released() -> None:
    """DPIS releases their sum before the first step, in which the loss would be caught."""
    recipe = recipes.dpis(batch_size=8, epochs=1).calibrate(Budget(epsilon=8, delta=1e-3), records=100)
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = Private(model, optimizer, torch.randn(100, WIDTH), seeds_torch, recipe, validate=False)
    with pytest.raises(UnsupportedModel, match="torch was seeded within a step"):
        private.step()
    assert len(private.bench.ledger) == 1, "of the number of records, which no loss was needed for"
    private.close()


def test_a_loop_leaves_the_users_generators_as_they_were() -> None:
    """What is read and drawn before the first batch, by a rehearsal of the loss or a dataset, is none of the user's."""

    def draw(_: int) -> Any:
        return torch.rand(WIDTH) * random.random() * np.random.random()  # noqa: NPY002

    private = prepare(plain, Own(draw))
    stands = [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002
    batches: Any = private.loader()
    next(batches)
    batches.close()
    now = [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002
    assert torch.equal(stands[0], now[0])
    assert stands[1] == now[1]
    assert all(np.array_equal(one, other) for one, other in zip(stands[2], now[2], strict=True))
    private.close()
