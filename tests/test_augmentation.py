"""Views of a record: drawn for it alone, averaged before clipping; one clipped vector for each record, at no price."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from sordino import Private, Recipe, recipes
from sordino.accounting.ledger import Ledger
from sordino.audit.conformance import Neighbours, replay
from sordino.audit.conformance.checking import linear_loss, make_linear_model
from sordino.audit.conformance.tape import Tape
from sordino.augmentation import GIVEN_ALONE, UNTRIED, ShiftAndMirror, Views
from sordino.errors import InvalidInput
from sordino.gradients.bookkeeping.book import Book
from sordino.mechanisms.shuffled import ShuffledLoader
from sordino.noise import Seeded
from sordino.parts import Draw, Foreign
from sordino.records import Records
from tests import test_step_audit as attack
from tests.helpers import calibrated, classification, mlp, private
from tests.test_units import KNOWN, OWNERS, SAME, _mean_gradient, flat, own_loop, train

VIEWS = 3


def jitter(record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A view that draws from all three generators, and changes what it is given in place."""
    x, y = record
    x += 0.3 * torch.randn(x.shape)
    return x * random.uniform(0.8, 1.2) + float(np.random.normal(0, 0.1)), y  # noqa: NPY002


def viewed(recipe: Recipe | None = None, **options: Any) -> Private:
    return private(recipe, **{"augment": VIEWS, "augmentation": jitter, **options})


class Spy:
    """Remembers the views that it made, in the order of the records."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []

    def __call__(self, record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        view = jitter(record)
        self.made.append((view[0].clone(), view[1]))
        return view


# -- the oracle ------------------------------------------------------------------------------------------------------


def _step_apart(run: Private) -> tuple[Tensor, Draw]:
    """What one step moved the model by before its noise, times the divisor; and its draw."""
    bench, before = run.bench, flat(run.bench.parameters())
    seen: list[Draw] = []
    draw = bench.draw
    bench.draw = lambda: seen.append(draw()) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    noise: list[Tensor] = []
    add = run.run.source.gaussian
    run.run.source.gaussian = lambda *a: noise.append(add(*a)) or noise[-1]  # type: ignore[method-assign, func-returns-value]
    run.step()
    return (before - flat(bench.parameters())) * bench.recipe.batch_size - flat(noise), seen[0]


@pytest.mark.parametrize(("engine", "microbatch"), [("auto", None), ("auto", 1), ("vmap", 7), ("loop", 7)])
def test_one_step_is_that_of_a_loop_over_records_and_their_views(engine: str, microbatch: int | None) -> None:
    spy = Spy()
    run = viewed(
        calibrated(batch_size=8, clip=0.3), augmentation=spy, engine=engine, microbatch=microbatch, lr=1.0,
        validate=False,
    )  # fmt: skip
    moved, draw = _step_apart(run)
    assert len(draw) > 1
    assert len(spy.made) == VIEWS * len(draw), "each record has its views, once"
    model, total = mlp(), torch.zeros_like(moved)
    for place in range(len(draw)):
        views = spy.made[VIEWS * place : VIEWS * (place + 1)]
        assert {int(y) for _, y in views} == {int(classification()[1][draw.indices[place]])}
        gradient = flat(_mean_gradient(model, *(torch.stack(column) for column in zip(*views, strict=True))))
        total += gradient * min(1.0, 0.3 * (1 - 5e-5) / float(gradient.norm()))
    torch.testing.assert_close(moved, total.to(moved.dtype), rtol=1e-4, atol=1e-5)


def test_views_of_a_users_records_are_averaged_with_them() -> None:
    spy = Spy()
    recipe = calibrated(KNOWN, batch_size=5, clip=0.3)
    run = viewed(recipe, augmentation=spy, unit=OWNERS, per_unit=2, lr=1.0, validate=False)
    moved, draw = _step_apart(run)
    model, total, left = mlp(), torch.zeros_like(moved), iter(spy.made)
    for user in draw.indices:
        rows, _ = run.bench.records.list_owned(user[None], draw.choice)
        views = [next(left) for _ in range(VIEWS * len(rows))]
        gradient = flat(_mean_gradient(model, *(torch.stack(column) for column in zip(*views, strict=True))))
        total += gradient * min(1.0, 0.3 * (1 - 5e-5) / float(gradient.norm()))
    assert next(left, None) is None
    torch.testing.assert_close(moved, total.to(moved.dtype), rtol=1e-4, atol=1e-5)


def test_book_keeping_keeps_the_book_of_views() -> None:
    run = viewed(validate=False)
    batch = run.bench.fetch(Draw(torch.arange(5)))
    found = run.bench.engine.differentiate(run.bench.objective, run.bench.parameters(), batch)
    assert isinstance(found, Book)
    assert (batch.size, found.norms.shape) == (5 * VIEWS, (5,))


@pytest.mark.parametrize("name", ["dpis", "dpsur", "dpagd", "jl"])
def test_every_recipe_trains_on_views_and_microbatches_change_nothing(name: str) -> None:
    recipe = SAME[name]()
    whole, parts = (train(viewed(recipe, validate=False, microbatch=m)) for m in (None, 4))
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)
    assert not torch.equal(whole, train(private(recipe, validate=False)))


def test_the_price_is_that_of_plain_records() -> None:
    recipe = calibrated(steps=3)
    assert viewed(recipe).guarantee(1e-3).epsilon == private(recipe).guarantee(1e-3).epsilon


def test_views_that_are_the_record_itself_change_nothing() -> None:
    recipe = calibrated(steps=3, noise_multiplier=1e-6, batch_size=64)
    same, plain = viewed(recipe, augmentation=lambda record: record, validate=False), private(recipe, validate=False)
    torch.testing.assert_close(train(same), train(plain), rtol=1e-4, atol=1e-5)


# -- whose coins they are --------------------------------------------------------------------------------------------


def _views(count: int = VIEWS, seed: int = 1, dataset: Any = None) -> Records:
    views = Views(count, jitter)
    views.prepare(Seeded(seed))
    return Records(classification() if dataset is None else dataset, None, views)


def _see(records: Records, indices: list[int], choice: int = 1) -> Tensor:
    data: Tensor = records.fetch(indices, torch.device("cpu"), choice).data[0]
    return data


def test_a_records_views_do_not_depend_on_its_company() -> None:
    records = _views()
    alone = _see(records, [7])
    assert torch.equal(_see(records, [3, 7, 60])[VIEWS : 2 * VIEWS], alone)
    assert torch.equal(_see(records, [7]), alone)


def test_every_view_draw_and_run_has_other_coins() -> None:
    first, second = _views(), _views(seed=2)
    found = [*_see(first, [7]), *_see(first, [7], choice=2), *_see(second, [7])]
    assert len({tuple(view.tolist()) for view in found}) == 3 * VIEWS
    same = torch.ones(64, 6), torch.zeros(64, dtype=torch.int64)
    assert len({tuple(view.tolist()) for view in _see(_views(dataset=same), list(range(64)))}) == 64 * VIEWS


def test_a_seed_makes_views_repeatable_and_without_one_they_are_not() -> None:
    recipe = calibrated(steps=2, noise_multiplier=1e-9)
    assert torch.equal(*(train(viewed(recipe, seed=5, validate=False)) for _ in range(2)))
    keys = set()
    for _ in range(3):
        run = viewed(seed=None, validate=False)
        run.step()
        assert run.bench.records.views is not None
        keys.add(run.bench.records.views._key)
    assert len(keys) == 3
    assert None not in keys


def test_the_generators_and_the_records_of_the_user_are_left_as_they_were() -> None:
    x, y = classification()
    records, held = _views(dataset=(x, y)), x.clone()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    wanted = torch.rand(()), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    _see(records, [0, 1])
    assert (torch.rand(()), np.random.rand(), random.random()) == wanted  # noqa: NPY002
    assert torch.equal(x, held), "a view that is made in place changes its own copy"


def test_a_view_is_a_copy_of_its_record_alone() -> None:
    """A row knows the tensor that it is a row of, which must not be copied with it."""

    def measure(record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        assert record[0].untyped_storage().nbytes() == 6 * 4
        return record

    views = Views(VIEWS, measure)
    _see(Records(classification(), None, views), [3])
    rows = classification()[0]
    _see(Records([(row, torch.tensor(0)) for row in rows], None, views), [3])


class Random(Dataset[Any]):
    """A dataset with a transform of its own, as torchvision's."""

    def __init__(self, private_coins: bool = False) -> None:
        self.x, self.y = classification()
        self.coins = torch.Generator().manual_seed(0) if private_coins else None

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + torch.randn(6, generator=self.coins), self.y[i]


def test_a_dataset_with_a_transform_is_asked_for_every_view() -> None:
    run = private(dataset=Random(), augment=VIEWS)
    seen = run.bench.fetch(Draw(torch.tensor([4]))).data[0]
    assert len({tuple(view.tolist()) for view in seen}) == VIEWS
    assert UNTRIED not in str(run.guarantee(1e-3))


# -- loops, workers, batches that are not rows -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"microbatch": 10}, {"num_workers": 1, "microbatch": 10}], ids=str)
def test_a_loop_of_ones_own_is_the_same_training(options: dict[str, Any]) -> None:
    recipe = calibrated(steps=3, noise_multiplier=1e-6, batch_size=64)  # everybody, however workers prefetch
    found = own_loop(viewed(recipe), **options)
    torch.testing.assert_close(found, train(viewed(recipe)), rtol=1e-4, atol=1e-5)


def test_views_of_different_lengths_are_padded_by_the_users_collate_function() -> None:
    def cut(record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return record[0][: int(torch.randint(3, 7, ()))], record[1]

    def pad(items: list[Any]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in items]), torch.stack([y for _, y in items])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].sum(0)[:, None]), batch[1], reduction="none")

    held: Any = list(zip(*classification(), strict=True))
    options: dict[str, Any] = {"dataset": held, "collate": pad, "loss": loss, "augmentation": cut}
    recipe = calibrated(steps=2, batch_size=16)
    whole, parts = (train(viewed(recipe, model=mlp(1), microbatch=m, **options)) for m in (None, 5))
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)


def test_a_view_may_have_another_shape_than_the_record() -> None:
    def crop(record: Any) -> Any:
        return record[0][:, 1:3, 1:3].flatten(), record[1]

    images = torch.randn(64, 1, 4, 4), torch.zeros(64, dtype=torch.int64)
    train(viewed(calibrated(steps=2), model=mlp(4), dataset=TensorDataset(*images), augmentation=crop))


# -- what is said and what is refused --------------------------------------------------------------------------------


def test_an_augmentation_that_remembers_other_records_is_told_in_the_guarantee() -> None:
    class MixUp:
        last: Tensor | None = None

        def __call__(self, record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            mixed = record[0] if self.last is None else 0.5 * (record[0] + self.last)
            self.last = record[0]
            return mixed, record[1]

    assert UNTRIED in str(viewed(augmentation=MixUp()).guarantee(1e-3))
    assert UNTRIED in str(private(dataset=Random(private_coins=True), augment=2).guarantee(1e-3))
    assert UNTRIED not in str(viewed().guarantee(1e-3))
    assert UNTRIED in str(viewed(validate=False).guarantee(1e-3)), "what was not tried is not known"


def test_no_trial_shows_that_an_augmentation_reads_no_other_record() -> None:
    """It may find another by the coins that it is given: the same view again, and two records in it."""
    others = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def mix(record: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return record[0] + others[torch.randint(len(others), ())], record[1]

    guarantee = viewed(augmentation=mix).guarantee(1e-3)
    assert UNTRIED not in str(guarantee)
    assert GIVEN_ALONE in guarantee.assumptions


def test_the_ledger_notes_the_views(tmp_path: Path) -> None:
    viewed(run=tmp_path / "run").close()
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert "3 random views of each record are averaged" in ledger.declared("setting")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"augment": 0}, "augment=0 must be a whole number >= 1"),
        ({"augment": True}, "augment=True must be a whole number"),
        ({"augment": 2.0}, "augment=2.0 must be a whole number"),
        ({"augment": None}, "augmentation= needs the number of views"),
        ({"augmentation": None}, "3 equal copies"),
        ({"augmentation": "flip"}, "augmentation is a str, must be a function"),
        ({"augmentation": lambda record: record[7]}, "augmentation failed on a record (IndexError in"),
        ({"augmentation": ShiftAndMirror()}, "must begin with an image"),
    ],
)
def test_what_makes_no_views_is_refused_before_anything_is_spent(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        viewed(**options)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("sampler", [Foreign(), ShuffledLoader()])
def test_loaders_of_ones_own_are_refused(sampler: Any) -> None:
    with pytest.raises(InvalidInput, match="which of its rows are views of one record cannot be seen"):
        viewed(calibrated(sampler=sampler))


def test_a_model_that_mixes_views_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(Exception, match="BatchNorm1d"):
        viewed(model=model)


# -- attacks ---------------------------------------------------------------------------------------------------------


def _clip_views(run: Private) -> None:
    """The wrong way: each view is clipped by itself, and a record counts as often as it is seen."""
    fetch = run.bench.fetch
    run.bench.fetch = lambda draw: replace(fetch(draw), groups=None)  # type: ignore[method-assign]


def _share_coins(run: Private) -> None:
    """The wrong way: views come from one stream, which one record more shifts for all that follow."""
    views = run.bench.records.views
    assert views is not None
    stream = iter(range(10**9))
    views._hash = lambda row, choice: next(stream)  # type: ignore[method-assign]


def _count(held: Any) -> int:
    return len(held[1])


def _neighbours() -> list[Neighbours]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(30, 3, generator=generator), torch.arange(30) % 3
    pairs = [("a record", 1.0, "joins"), ("a loud record", 1e3, "joins"), ("not a number", float("nan"), "joins")]
    return [
        Neighbours(name, (x[:29], y[:29]), (torch.cat([x[:29], x[29:] * loud]), y), extra, count=_count)
        for name, loud, extra in [*pairs, ("one that is not drawn", 1e3, "stays out")]
    ]


def _program(break_it: Callable[[Private], None] | None = None) -> Callable[[Any, Tape], Any]:
    def run(held: Any, tape: Tape) -> list[Tensor]:
        trained = viewed(
            calibrated(29, batch_size=12, steps=3), model=make_linear_model(), dataset=held, loss=linear_loss,
            source=tape, seed=None, validate=False,
        )  # fmt: skip
        if break_it is not None:
            break_it(trained)
        tape.watch(trained.bench.ledger)
        found = [train(trained).clone()]
        tape.close()
        trained.close()
        return found

    return run


@pytest.mark.parametrize("pair", _neighbours(), ids=lambda pair: pair.name)
def test_nothing_depends_on_one_record_but_what_is_paid_for(pair: Neighbours) -> None:
    replay(_program(), pair).require_passed()


def test_replays_find_views_that_are_clipped_one_by_one() -> None:
    found = replay(_program(_clip_views), _neighbours()[1])
    assert any("a sum moved by" in finding for finding in found.findings)


def test_replays_find_coins_that_records_share() -> None:
    found = replay(_program(_share_coins), _neighbours()[0])
    assert any("a sum moved by" in finding for finding in found.findings)


@pytest.mark.parametrize("broken", [False, True])
def test_a_seen_record_is_protected_as_claimed(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "TRIALS", 120)

    def moves(present: bool) -> Any:
        data = torch.tensor([[100.0 if present else 0.0], [0.0]])
        model = nn.Linear(1, 1, bias=False)
        run = private(
            attack.HONEST, model=model, dataset=data, source=Seeded(1 + present), lr=1.0, validate=False,
            loss=attack.losses, augment=4, augmentation=lambda record: record * float(torch.rand(()) + 0.5),
        )  # fmt: skip
        if broken:
            _clip_views(run)
        out = []
        for _ in range(attack.TRIALS):
            before = model.weight.item()
            run.step()
            out.append(before - model.weight.item())
        return np.array(out)

    found = attack.lower_bound(moves(False), moves(True))
    assert (found > attack.claim()) == broken


# -- the usual augmentation of images --------------------------------------------------------------------------------


class Named(NamedTuple):
    image: Tensor
    kind: int


def test_images_are_shifted_and_mirrored() -> None:
    image = torch.arange(75.0).reshape(3, 5, 5)
    wide = [nn.functional.pad(each[None], (1,) * 4, mode="reflect")[0] for each in (image, image.flip(2))]
    shifts = [each[:, down : down + 5, right : right + 5] for each in wide for down in range(3) for right in range(3)]
    torch.manual_seed(0)
    seen = set()
    for _ in range(200):
        moved, label = ShiftAndMirror(1)((image, 7))
        (place,) = {i for i, shift in enumerate(shifts) if torch.equal(shift, moved)}
        seen.add(place)
        assert label == 7
    assert len(seen) == 18
    assert torch.equal(ShiftAndMirror(0, mirror=False)(image), image)
    assert all(not torch.equal(ShiftAndMirror(0, mirror=False)(image), image.flip(2)) for _ in range(20))
    moved = ShiftAndMirror(1)(Named(image, 7))
    assert (type(moved), moved.kind, moved.image.shape) == (Named, 7, image.shape)
    with pytest.raises(InvalidInput, match="pixels=-1 must be"):
        ShiftAndMirror(-1)


def test_recipes_of_estimated_norms_measure_the_mean_of_views() -> None:
    """With very many projections the estimate is the length of the mean, not the mean of the lengths."""
    recipe = recipes.jl(batch_size=8, steps=2, noise_multiplier=1.0, projections=2000).for_records(64)
    estimated, exact = viewed(recipe, validate=False), viewed(validate=False)
    for run in (estimated, exact):
        run.bench.records.prepare(Seeded(1))
    recipe.norms.prepare(estimated.bench.engine)
    lengths = []
    for run in (estimated, exact):
        batch = run.bench.fetch(Draw(torch.arange(6)))
        lengths.append(run.bench.engine.differentiate(run.bench.objective, run.bench.parameters(), batch).norms)
    torch.testing.assert_close(*lengths, rtol=0.15, atol=0)
