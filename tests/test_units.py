"""Users as units: drawn whole, averaged, clipped once, named in every guarantee; records where each has one."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from sordino import Budget, Private, Recipe, recipes
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger
from sordino.audit.conformance import Neighbours, replay
from sordino.audit.conformance.checking import linear_loss, make_linear_model
from sordino.audit.conformance.tape import Tape
from sordino.errors import CheckpointError, InvalidInput
from sordino.gradients import Batch, Objective, find_engine
from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.engine import Groups
from sordino.mechanisms.shuffled import Shuffled, ShuffledLoader
from sordino.noise import Seeded
from sordino.parts import Draw, Foreign, Terms
from sordino.report import facts
from sordino.units import Units, mark
from tests import test_step_audit as attack
from tests.helpers import budgeted, calibrated, classification, cross_entropy, mlp, oracle_norms, oracle_sum, private

RECORDS, USERS = 64, 23
OWNERS = [f"person-{i * i % USERS}" for i in range(RECORDS)]  # squares: some own many records, some one
KNOWN = len(set(OWNERS))


def users(recipe: Recipe | None = None, **options: Any) -> Private:
    options.setdefault("unit", OWNERS)
    return private(recipe or calibrated(KNOWN, batch_size=4), **options)


def train(run: Private) -> Tensor:
    for _ in run.steps():
        pass
    return flat(run.bench.objective.parameters())


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


# -- exact gradients of users -------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.reshape(-1, 1, 4, 4))).relu().flatten(1))


class Sequences(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(10, 3)
        self.states = nn.LSTM(6, 5, batch_first=not first, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        states = self.states(words.transpose(0, 1) if self.first else words)[0]
        return self.head(states[-1] if self.first else states[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.start = (
            nn.Embedding(9, 8),
            nn.Parameter(torch.randn(6, 8)),
            nn.Parameter(torch.randn(1, 1, 8)),
        )
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.cat([self.start.expand(len(x), -1, -1), self.words(x) + self.places], 1)
        return self.head(self.layer(words)[:, 0])


class Distances(nn.Module):
    """An operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.far, self.head = nn.Embedding(9, 4), nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cdist(self.words(x), self.far).sum(1))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 8}
    inner = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=9, num_labels=3, **sizes, **off)
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input_ids=x, attention_mask=(x > 0).long()).logits

    return Logits()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    "convolution": Images,
    "lstm": lambda: Sequences(first=False),
    "lstm, time first": lambda: Sequences(first=True),
    "bags": lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 3)),
    "transformer": Attention,
    "without a rule": Distances,
    "bert": bert,
}
GROUPS = {
    "as many each": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    "some more": [0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3],
    "one user": [0] * 12,
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[request.param]().double()
        words = torch.randint(1, 9, (12, 6))
        inputs = torch.randn(12, 16).double() if request.param in ("linear", "convolution") else words
        return model, (inputs, torch.randint(0, 3, (12,)))


@pytest.mark.parametrize("name", GROUPS)
def test_norms_and_sums_of_users_are_those_of_a_loop(name: str, case: tuple[nn.Module, Any]) -> None:
    model, (x, y) = case
    parameters, groups = list(model.parameters()), Groups(torch.tensor(GROUPS[name]), max(GROUPS[name]) + 1)
    objective = Objective(model, cross_entropy)
    rows = [_mean_gradient(model, x[groups.owners == user], y[groups.owners == user]) for user in range(groups.size)]
    weights = torch.linspace(0.2, 1.0, groups.size).double()
    batch = Batch((x, y), 12, lambda i: (x[i : i + 1], y[i : i + 1]), groups=groups)
    for engine in ("auto", "loop"):
        found = find_engine(engine).differentiate(objective, parameters, batch)
        assert isinstance(found, Book) == (engine == "auto")
        torch.testing.assert_close(found.norms, oracle_norms(rows), rtol=1e-9, atol=1e-12)
        for mine, wanted in zip(found.weighted_sum(weights), oracle_sum(rows, weights), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def _mean_gradient(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(cross_entropy(model, (x, y)).mean(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def test_a_product_over_the_batch_that_vmap_gets_wrong_is_found_out() -> None:
    """Torch's rule for several backward passes of cdist at once gives other numbers than one after the other."""
    model, x = Distances(), torch.randint(1, 9, (6, 5))
    model.forward = lambda x: model.head(torch.cdist(model.words(x).transpose(0, 1), model.far).sum(0))  # type: ignore[method-assign]
    y, parameters = torch.arange(6) % 3, list(model.parameters())
    found = find_engine("auto").differentiate(
        Objective(model, cross_entropy), parameters, Batch((x, y), 6, lambda i: i)
    )
    rows = [_mean_gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(found.norms.double(), oracle_norms(rows), rtol=1e-4, atol=1e-6)


def test_one_step_is_that_of_a_loop_over_users() -> None:
    run = users(calibrated(KNOWN, batch_size=5, clip=0.3), per_unit=3, lr=1.0)
    bench, before = run.bench, flat(run.bench.parameters())
    seen: list[Draw] = []
    draw = bench.draw
    bench.draw = lambda: seen.append(draw()) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    noise: list[Tensor] = []
    add = run.run.source.gaussian
    run.run.source.gaussian = lambda *a: noise.append(add(*a)) or noise[-1]  # type: ignore[method-assign, func-returns-value]
    run.step()
    (one,) = seen
    assert len(one) > 1
    model, total = mlp(), torch.zeros_like(before)
    x, y = classification()
    for user in one.indices.tolist():
        rows, _ = bench.records.group(torch.tensor([user]), one.choice)
        assert len({OWNERS[row] for row in rows.tolist()}) == 1
        assert len(rows) == min(3, OWNERS.count(OWNERS[rows[0]]))
        gradient = flat(_mean_gradient(model, x[rows], y[rows]))
        total += gradient * min(1.0, 0.3 * (1 - 5e-5) / float(gradient.norm()))
    moved = (before - flat(bench.parameters())) * 5 - flat(noise)
    torch.testing.assert_close(moved, total.to(moved.dtype), rtol=1e-4, atol=1e-5)


# -- equal to record level ----------------------------------------------------------------------------------------


ALONE = [f"somebody {i}" for i in range(RECORDS)]
SHORT: dict[str, Any] = {"batch_size": 4, "steps": 3, "noise_multiplier": 1.0}
SAME: dict[str, Callable[[], Recipe]] = {
    "dpsgd": lambda: calibrated(**SHORT),
    "shuffled": lambda: calibrated(batch_size=4, steps=20, sampler=Shuffled()),
    "dpis": lambda: _calibrate(RECORDS),
    "dpsur": lambda: recipes.dpsur(**SHORT, validation_size=8).for_records(RECORDS),
    "dpagd": lambda: recipes.dpagd(**SHORT, choice_epsilon=1.0, validation_size=8).for_records(RECORDS),
    "jl": lambda: recipes.jl(**SHORT, projections=24).for_records(RECORDS),
}


def _calibrate(records: int) -> Recipe:
    return recipes.dpis(batch_size=8, epochs=1).calibrate(Budget(epsilon=8.0, delta=1e-3), records=records)


@pytest.mark.parametrize("name", SAME)
def test_users_of_one_record_are_records_bit_for_bit(name: str) -> None:
    recipe = SAME[name]()
    by_record, by_user = private(recipe, validate=False), private(recipe, unit=ALONE, validate=False)
    assert torch.equal(train(by_record), train(by_user))
    assert by_record.guarantee(1e-3).epsilon == by_user.guarantee(1e-3).epsilon


@pytest.mark.parametrize("name", SAME)
def test_every_recipe_trains_users_and_microbatches_change_nothing(name: str) -> None:
    recipe = _calibrate(KNOWN) if name == "dpis" else SAME[name]().for_records(KNOWN)
    whole, parts = (train(users(recipe, validate=False, microbatch=m, per_unit=3)) for m in (None, 3))
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", [Foreign(), ShuffledLoader()])
def test_loaders_of_records_are_refused(sampler: Any) -> None:
    with pytest.raises(InvalidInput, match="deals records, not households"):
        users(calibrated(KNOWN, batch_size=4, sampler=sampler), unit_name="household")


# -- draws --------------------------------------------------------------------------------------------------------


def test_draws_are_of_users_and_every_record_of_a_user_is_as_likely() -> None:
    owners = [i // 10 for i in range(40)]
    run = private(calibrated(4, batch_size=2, steps=2000), unit=owners, dataset=torch.zeros(40, 6), validate=False)
    run.bench.records = records = Units(torch.zeros(40, 6), owners, 3)
    drawn, used, pairs = Counter[int](), Counter[int](), Counter[tuple[int, ...]]()
    for _ in range(2000):
        draw = run.bench.draw()
        rows, groups = records.group(draw.indices, draw.choice)
        drawn.update(draw.indices.tolist())
        used.update(rows.tolist())
        if len(draw):
            assert groups is not None
            assert groups.counts.tolist() == [3] * len(draw)
            pairs[tuple((rows[:3] % 10).tolist())] += 1
    assert all(stats.binomtest(drawn[user], 2000, 0.5).pvalue > 1e-5 for user in range(4))
    for user in range(4):
        assert stats.chisquare([used[row] for row in range(10 * user, 10 * user + 10)]).pvalue > 1e-5
    every = [pairs[a, b, c] for a in range(10) for b in range(a + 1, 10) for c in range(b + 1, 10)]
    assert stats.chisquare(every).pvalue > 1e-5, "triples of records are not equally likely"


def test_what_a_user_brings_along_does_not_depend_on_others() -> None:
    """Otherwise one user more would change what others contribute."""
    owners = ["a", "b", "b", "c", "b", "c", "b", "b"]
    whole, without = Units(torch.arange(8), owners, 2), Units(torch.arange(7), owners[1:], 2)
    for choice in range(50):
        for user in (1, 2):
            mine, _ = whole.group(torch.tensor([0, user]), choice)
            alone, _ = without.group(torch.tensor([user - 1]), choice)
            assert (mine[1:] - 1).tolist() == alone.tolist()


def test_marks_are_not_shared_by_users_or_draws() -> None:
    names, ranks = np.arange(5, dtype=np.uint64).repeat(20), np.tile(np.arange(20), 5)
    found = {int(m) for choice in range(20) for m in mark(names, ranks, choice)}
    assert len(found) == 5 * 20 * 20


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_no_piece_of_a_draw_splits_a_user(size: int) -> None:
    records = Units(classification(), OWNERS, 4)
    draw = Draw(torch.arange(KNOWN))
    pieces = list(draw.split(size, records.weigh(draw.indices)))
    assert torch.equal(torch.cat([piece.indices for piece in pieces]), draw.indices)
    assert all(int(records.weigh(piece.indices).sum()) < size + 4 for piece in pieces)
    plain = [piece.indices.tolist() for piece in draw.split(size)]
    assert plain == [piece.indices.tolist() for piece in draw.split(size, torch.ones(KNOWN, dtype=torch.int64))]


def test_an_empty_draw_is_noise_alone() -> None:
    run = users(calibrated(KNOWN, batch_size=4))
    run.bench.draw = lambda: Draw(torch.arange(0))  # type: ignore[method-assign]
    before = flat(run.bench.parameters())
    run.step()
    assert not torch.equal(before, flat(run.bench.parameters()))


def test_a_bad_record_changes_its_user_alone() -> None:
    x, y = classification()
    bad = x.clone()
    bad[3] = float("nan")
    user = OWNERS[3]
    kept = [i for i in range(RECORDS) if OWNERS[i] != user]
    recipe, names = calibrated(KNOWN, batch_size=KNOWN, noise_multiplier=1e-6), [OWNERS[i] for i in kept]
    spoiled = users(recipe, dataset=(bad, y), validate=False)
    without = private(recipe, dataset=(x[kept], y[kept]), unit=names, validate=False)
    torch.testing.assert_close(_after_one(spoiled), _after_one(without), rtol=1e-4, atol=1e-5)


def _after_one(run: Private) -> Tensor:
    run.step()
    return flat(run.bench.parameters())


# -- a loop of one's own ------------------------------------------------------------------------------------------


def own_loop(run: Private, **options: Any) -> Tensor:
    model, optimizer = run.bench.objective.model, run.bench.optimizer
    for batch in run.loader(**options):
        optimizer.zero_grad()
        run.backward(cross_entropy(model, batch))
        optimizer.step()
    return flat(model.parameters())


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_loop_of_ones_own_is_the_same_training(engine: str) -> None:
    recipe = calibrated(KNOWN, batch_size=5, steps=4)
    wanted = train(users(recipe, per_unit=3))
    for options in ({}, {"microbatch": 4}):
        found = own_loop(users(recipe, per_unit=3, engine=engine), **options)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_workers_load_whole_users() -> None:
    recipe = calibrated(KNOWN, batch_size=5, steps=3)
    run = users(recipe, per_unit=3, validate=False)
    sizes = []
    for batch in run.loader(num_workers=1, microbatch=4):
        losses = cross_entropy(run.bench.objective.model, batch)
        assert run._loop._open is not None
        assert run._loop._open.part is not None
        sizes.append((len(losses), int(run.bench.records.weigh(run._loop._open.part.indices).sum())))
        run.backward(losses)
        run.bench.optimizer.step()
    assert sizes
    assert all(given == wanted for given, wanted in sizes)
    assert run.position == 3


def test_losses_averaged_by_the_user_are_refused() -> None:
    run = users(calibrated(KNOWN, batch_size=KNOWN))
    for batch in run.loader():
        losses = cross_entropy(run.bench.objective.model, batch)
        assert len(losses) > KNOWN
        with pytest.raises(InvalidInput, match="one loss per example"):
            run.backward(losses[:KNOWN])
        break


# -- what is promised, and to whom --------------------------------------------------------------------------------


def test_the_guarantee_and_the_ledger_name_the_unit(tmp_path: Path) -> None:
    run = users(budgeted(KNOWN, batch_size=4, steps=3), run=tmp_path / "run", unit_name="patient", per_unit=2)
    train(run)
    promise = run.guarantee()
    assert "privacy for every patient." in str(promise)
    assert "adding or removing one patient" in str(promise)
    assert "record" not in str(promise).replace("not tuned on these records", "")
    assert promise.to_dict()["unit"] == "patient"
    assert Guarantee.from_dict(promise.to_dict()) == promise
    run.save()
    run.close()
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.header["unit"] == "patient"
        assert "at most 2 records of a patient" in ledger.declared("setting")[0]
    told = facts.gather(tmp_path / "run")
    assert (told.guarantee.unit, told.guarantee.epsilon) == ("patient", promise.epsilon)
    assert told.setting.records == KNOWN


def test_records_and_users_do_not_meet_on_one_ledger(tmp_path: Path) -> None:
    by_record = private(run=tmp_path / "run", validate=False)
    with pytest.raises(InvalidInput, match="protects every record, not every user"):
        users(ledger=by_record.run.ledger)
    with pytest.raises(InvalidInput, match="protects every user, not every record"):
        private(ledger=Ledger.in_memory(header={"unit": "user"}))
    with pytest.raises(InvalidInput, match="protects every user, not every device"):
        users(ledger=Ledger.in_memory(header={"unit": "user"}), unit_name="device")
    by_record.save()
    by_record.close()
    with pytest.raises(CheckpointError, match="protects every record, not every user"):
        users(calibrated(64), unit=ALONE, validate=False).load(tmp_path / "run")


def test_two_runs_about_the_same_users_share_a_ledger() -> None:
    ledger = Ledger.in_memory(header={"unit": "user"})
    first, second = (users(calibrated(KNOWN, batch_size=4, steps=2), ledger=ledger, validate=False) for _ in range(2))
    train(first)
    alone = first.guarantee(1e-3, stopped="in advance").epsilon
    train(second)
    assert second.guarantee(1e-3).epsilon > alone


def test_a_killed_run_of_users_goes_on(tmp_path: Path) -> None:
    recipe = budgeted(KNOWN, batch_size=4, steps=4)
    run = users(recipe, run=tmp_path / "run", validate=False)
    run.step()
    run.save()
    run.step()
    run.close()
    again = users(recipe, validate=False)
    again.load(tmp_path / "run")
    assert again.position == 1
    train(again)
    assert again.guarantee().epsilon <= 2.0
    assert len(again.run.ledger) <= 5


def test_the_declared_number_counts_users() -> None:
    with pytest.raises(InvalidInput, match=f"dataset has {KNOWN} users, but the recipe was calibrated for 64"):
        users(calibrated(64))


# -- who owns what ------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """A dataset of dictionaries, with the owner among the values."""

    def __init__(self) -> None:
        self.x, self.y = classification()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "owner": OWNERS[i]}


class Columns(Rows):
    """A dataset that knows its columns."""

    column_names = ("x", "y", "owner")

    def __getitem__(self, i: Any) -> Any:
        return list(OWNERS) if i == "owner" else super().__getitem__(i)


def by_name(model: nn.Module, batch: Any) -> Tensor:
    assert set(batch) == {"x", "y"}, "the model must not see whose a record is"
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize(
    "dataset", [Rows(), Columns(), Subset(Rows(), range(RECORDS))], ids=lambda held: type(held).__name__
)
def test_a_column_names_the_owners_and_no_model_sees_it(dataset: Any) -> None:
    recipe = calibrated(KNOWN, batch_size=4, steps=2)
    found = train(users(recipe, dataset=dataset, loss=by_name, unit="owner"))
    assert torch.equal(found, train(users(recipe)))


def test_a_hugging_face_dataset_has_columns() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = classification()
    held = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), "owner": OWNERS}).with_format("torch")
    recipe = calibrated(KNOWN, batch_size=4, steps=2)
    found = train(users(recipe, dataset=held, loss=by_name, unit="owner"))
    torch.testing.assert_close(found, train(users(recipe)), rtol=1e-6, atol=1e-7)


def test_a_hugging_face_dataset_may_name_owners_by_number() -> None:
    datasets = pytest.importorskip("datasets")
    numbers = [int(owner.split("-")[1]) for owner in OWNERS]
    held = datasets.Dataset.from_dict({"x": list(range(RECORDS)), "owner": numbers}).with_format("torch")
    assert torch.equal(Units(held, "owner")._counts, Units(classification(), OWNERS)._counts)


def pad(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences of different lengths, time first: the first dimension counts no records."""
    return nn.utils.rnn.pad_sequence([x for x, _ in items]), torch.stack([y for _, y in items])


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.words(x) * (x > 0).unsqueeze(-1)).sum(0))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_records_that_a_collate_function_pads_belong_to_users_too(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    held = [(torch.randint(1, 9, (2 + i % 5,)), torch.tensor(i % 3)) for i in range(RECORDS)]
    first = Padded()
    recipe = calibrated(KNOWN, batch_size=KNOWN, steps=2, noise_multiplier=1e-6)
    jl = replace(recipe, norms=recipes.jl(projections=24).norms)
    loop, whole, projected = (
        users(
            chosen, model=copy.deepcopy(first), dataset=held, collate=pad, per_unit=3, validate=False, microbatch=size
        )
        for chosen, size in ((recipe, None), (recipe, 7), (jl, None))
    )
    torch.testing.assert_close(own_loop(loop, microbatch=9, **options), train(whole), rtol=1e-4, atol=1e-5)
    assert bool(train(projected).isfinite().all())


def test_owners_may_be_arrays_tensors_or_series() -> None:
    numbers = [int(owner.split("-")[1]) for owner in OWNERS]
    wanted = Units(classification(), OWNERS)._counts
    pandas = pytest.importorskip("pandas")
    for given in (numbers, np.array(numbers), torch.tensor(numbers), pandas.Series(OWNERS), np.array(OWNERS)):
        assert torch.equal(Units(classification(), given)._counts, wanted)


SECRET = "jane.doe@example.org"
REFUSED: dict[str, tuple[Any, str]] = {
    "a list of owners": ([[SECRET, "b"]] * RECORDS, "a record a list of owners"),
    "a tuple of owners": ([(SECRET, "b")] * RECORDS, "a record a tuple of owners"),
    "two columns": (torch.zeros(RECORDS, 2), "2 dimensions, must have 1"),
    "nobody": ([SECRET, None] * (RECORDS // 2), "some records no owner"),
    "not a number": ([1.0, float("nan")] * (RECORDS // 2), "some records no owner"),
    "no text": ([SECRET, " "] * (RECORDS // 2), "some records no owner"),
    "too few": ([SECRET] * 3, "unit has 3 owners, must have 64"),
    "a bytearray": ([bytearray(b"x")] * RECORDS, "of type bytearray, which cannot be compared"),
    "a dictionary": ({SECRET: 1}, "unit is a dict, must hold one owner"),
    "a number": (3, "unit is a int, must hold one owner"),
    "no such column": ("nobody", "unit='nobody' names a column, but the dataset has no such one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_say_who_owns_a_record_is_refused_without_naming_anybody(name: str) -> None:
    given, said = REFUSED[name]
    with pytest.raises(InvalidInput) as refusal:
        users(unit=given)
    assert said in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_value_of_pandas_is_nobody() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidInput, match="no owner"):
        users(unit=pandas.Series([SECRET, None] * (RECORDS // 2), dtype="string"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_unit": 0}, "per_unit=0 must be a whole number >= 1"),
        ({"per_unit": 1.5}, "per_unit=1.5 must be a whole number"),
        ({"unit_name": "record"}, "would be taken for a guarantee by record"),
        ({"unit_name": " "}, "unit_name must be a word"),
        ({"unit_name": "a\nb"}, "unit_name must be a word"),
        ({"unit": None, "per_unit": 3}, "per_unit=3 needs unit="),
        ({"unit": None, "unit_name": "user"}, "unit_name='user' needs unit="),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        users(**options)
    assert said in str(refusal.value)


def test_names_are_in_no_log_and_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run = users(calibrated(KNOWN, batch_size=4, steps=2), run=tmp_path / "run")
    train(run)
    run.save()
    run.close()
    assert "person-" not in caplog.text
    assert all(b"person-" not in path.read_bytes() for path in (tmp_path / "run").iterdir())


def test_a_model_that_mixes_records_is_refused_before_anything_is_spent() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(Exception, match="BatchNorm1d"):
        users(model=model)


# -- attacks ------------------------------------------------------------------------------------------------------

COPIES = 4


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "TRIALS", 200)


def _by_user(present: bool, recipe: Recipe, source: Any, break_it: Callable[[Private], None] | None = None) -> Any:
    """What every step moves a one-parameter model by, with a user of four loud records or with four silent ones."""
    data = torch.zeros(COPIES + 1, 1)
    data[:COPIES] = 100.0 if present else 0.0
    model = nn.Linear(1, 1, bias=False)
    options: dict[str, Any] = {"source": source, "lr": 1.0, "validate": False, "loss": attack.losses}
    run = private(recipe, model=model, dataset=data, unit=[0] * COPIES + [1], per_unit=COPIES, **options)
    if break_it is not None:
        break_it(run)
    out = []
    for _ in range(attack.TRIALS):
        before = model.weight.item()
        run.step()
        out.append(before - model.weight.item())
    return np.array(out)


def _clip_records(run: Private) -> None:
    """The wrong way: users are drawn, and each of their records is clipped by itself."""
    fetch = run.bench.fetch
    run.bench.fetch = lambda draw: replace(fetch(draw), groups=None)  # type: ignore[method-assign]


def _draw_records(run: Private) -> None:
    """The wrong way: records are drawn and clipped, as if each were its own user."""
    whole = Units(run.bench.records.dataset, list(range(COPIES + 1)))
    run.bench.records = whole


@pytest.mark.usefixtures("few_trials")
def test_a_user_of_many_records_is_protected_as_claimed() -> None:
    recipe = attack.HONEST
    found = attack.lower_bound(_by_user(False, recipe, Seeded(1)), _by_user(True, recipe, Seeded(2)))
    assert 0 < found <= attack.claim()


@pytest.mark.usefixtures("few_trials")
@pytest.mark.parametrize("broken", [_clip_records, _draw_records])
def test_what_protects_records_alone_is_caught(broken: Callable[[Private], None]) -> None:
    recipe = attack.HONEST
    absent, present = (_by_user(there, recipe, Seeded(1 + there), broken) for there in (False, True))
    assert attack.lower_bound(absent, present) > attack.claim()


# -- conformance: nothing depends on one user but what is paid for --------------------------------------------------


def _neighbours() -> list[Neighbours]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(30, 3, generator=generator), torch.arange(30) % 3
    names = [i % 9 for i in range(26)] + [99] * 4

    def data(rows: slice, loud: float = 1.0) -> tuple[Tensor, Tensor, list[int]]:
        last = torch.ones(30, 1)
        last[26:] = loud
        return (x * last)[rows], y[rows], names[rows]

    def count(held: Any) -> int:
        return len(set(held[2]))

    pairs = [("a user", 1.0, "joins"), ("a loud user", 1e3, "joins"), ("a user not drawn", 1e3, "stays out")]
    return [
        Neighbours(name, data(slice(26)), data(slice(30), loud), extra, count=count)  # type: ignore[arg-type]
        for name, loud, extra in [*pairs, ("a user that is not a number", float("nan"), "joins")]
    ]


def _program(break_it: Callable[[Private], None] | None = None, **options: Any) -> Callable[[Any, Tape], Any]:
    recipe = options.pop("recipe", None) or calibrated(9, batch_size=4, steps=3)

    def run(held: Any, tape: Tape) -> list[Tensor]:
        x, y, names = held
        trained = private(
            recipe, model=make_linear_model(), dataset=(x, y), loss=linear_loss, unit=names, per_unit=2,
            source=tape, seed=None, validate=False, **options,
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
def test_nothing_depends_on_one_user_but_what_is_paid_for(pair: Neighbours) -> None:
    replay(_program(), pair).require_passed()


def test_replays_find_records_that_are_clipped_one_by_one() -> None:
    found = replay(_program(_clip_records), _neighbours()[1])
    assert any("a sum moved by" in finding for finding in found.findings)


def test_replays_find_a_divisor_that_counts_users_and_too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_count(run: Private) -> None:
        run.bench.recipe = replace(run.bench.recipe, batch_size=max(1, run.bench.records.count // 2))

    assert replay(_program(by_count), _neighbours()[0]).findings
    monkeypatch.setattr(Terms, "noise_std", property(lambda terms: terms.noise_multiplier * terms.clip / 2))
    assert replay(_program(), _neighbours()[1]).findings


def test_replays_find_a_choice_that_others_have_a_part_in() -> None:
    """If the number of users had a part in it, one more would change what the others bring along."""

    def by_place(run: Private) -> None:
        records = run.bench.records
        assert isinstance(records, Units)
        records._names = records._names + np.uint64(records.count)

    found = replay(_program(by_place), _neighbours()[0])
    assert any("a sum moved by" in finding for finding in found.findings)
