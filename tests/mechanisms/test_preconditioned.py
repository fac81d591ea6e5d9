"""Preconditioning: stretched norms and sums are those of a plain loop, maps know no record, the price is DP-SGD's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from sordino import InvalidInput, Recipe, UnsupportedModel, recipes
from sordino.audit import AuditFailed, Instance, audit_recipe, conformance
from sordino.gradients import BookKeeping, Looped, Objective, Vmapped
from sordino.gradients.engine import Groups
from sordino.gradients.moments import Side
from sordino.gradients.rules import conv, linear, stretched
from sordino.gradients.stretch import Stretch, Stretches
from sordino.mechanisms import preconditioned
from sordino.mechanisms.preconditioned import Probed, make_pink, make_tokens
from sordino.parts import Flat
from tests.helpers import (
    batch_of,
    calibrated,
    classification,
    cross_entropy,
    loop_oracle,
    mlp,
    oracle_norms,
    private,
    train_in_both_loops,
)

COMMON: dict[str, Any] = {"batch_size": 16, "steps": 6, "noise_multiplier": 1.0}
ENGINES = (BookKeeping, Vmapped, Looped)


class Tied(nn.Module):
    """An embedding that is also the head, a weight that is used twice, a slice, a norm, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.square, self.wide = nn.Linear(4, 4), nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.square(self.table(x)))
        hidden = F.linear(hidden, self.wide.weight[:4]) + F.linear(hidden, self.wide.weight[2:])
        return self.norm(hidden @ self.square.weight).mean(1) @ self.table.weight.T


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, mode="mean"), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.states, self.head = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(self.table(x))[0][:, -1])


def convolve(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)),
    "convolutions": lambda: convolve(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2)),
    "groups, depths and adjoints": lambda: convolve(
        nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 2, groups=4), nn.ConvTranspose2d(4, 3, 2), nn.GroupNorm(1, 3)
    ),
    "tied": Tied,
    "bags": Bags,
    "recurrent": Recurrent,
}


def make(kind: str, size: int = 7) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = KINDS[kind]().double()  # what differs is then no rounding
    if kind in ("tied", "bags", "recurrent"):
        return model, (torch.randint(0, 7, (size, 5)), torch.arange(size) % 7)
    x = (torch.randn(size, 5) if kind == "layers" else torch.randn(size, 2, 6, 6)).double()
    model(x[:2])
    return model, (x, torch.arange(size) % 3)


def draw_maps(parameters: list[nn.Parameter]) -> Stretches:
    """Symmetric matrices and diagonals by chance; tables of tokens have diagonals on the side of the tokens."""

    def square(n: int) -> Tensor:
        half = torch.randn(n, n, dtype=torch.float64) / math.sqrt(n)
        return half @ half.T + 0.1 * torch.eye(n, dtype=torch.float64)

    maps: list[Stretch | None] = []
    for p in parameters:
        rest = p.numel() // len(p)
        left = torch.rand(len(p), dtype=torch.float64) + 0.5 if p.dim() == 1 or len(p) == 7 else square(len(p))
        maps.append(Stretch(p.shape, left, None if p.dim() == 1 else square(rest)))
    return Stretches(parameters, maps)


def stretch_plainly(gradient: Tensor, by: Stretch | None) -> Tensor:
    """L M R by definition, in double precision."""
    if by is None:
        return gradient.double()
    matrix = gradient.double().reshape(len(gradient), -1)
    left, right = (None if f is None else (f.diag() if f.dim() == 1 else f).double() for f in (by.left, by.right))
    matrix = matrix if left is None else left @ matrix
    return (matrix if right is None else matrix @ right).reshape(gradient.shape)


def assert_as_in_a_loop(engine: Any, model: nn.Module, batch: Any, loss: Any = cross_entropy) -> None:
    objective, parameters = Objective(model, loss), [p for p in model.parameters() if p.requires_grad]
    maps = engine.stretches
    rows = loop_oracle(objective, parameters, batch)
    rows = [[stretch_plainly(g, by) for g, by in zip(row, maps.maps, strict=True)] for row in rows]
    found = engine.differentiate(objective, parameters, batch)
    norms = oracle_norms(rows)
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-6, atol=1e-9)
    weights = torch.linspace(0.2, 1.4, len(rows))
    for k, total in enumerate(found.weighted_sum(weights)):
        plain = sum(float(w) * row[k] for w, row in zip(weights, rows, strict=True))
        torch.testing.assert_close(total.double(), plain, rtol=1e-6, atol=1e-7 * float(norms.max()))


# -- the engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kind_of_engine", ENGINES)
def test_stretched_norms_and_sums_are_those_of_a_loop(kind_of_engine: Any, kind: str) -> None:
    if (kind_of_engine, kind) == (Vmapped, "recurrent"):
        pytest.skip("torch cannot vmap an LSTM in double precision")
    model, data = make(kind)
    engine = kind_of_engine()
    engine.stretches = draw_maps(list(model.parameters()))
    assert_as_in_a_loop(engine, model, batch_of(*data))
    wrong = [None if by is None else Stretch(by.shape, by.left) for by in engine.stretches.maps]
    honest, engine.stretches = engine.stretches, Stretches(engine.stretches.parameters, wrong)
    lengths = engine.differentiate(Objective(model, cross_entropy), list(model.parameters()), batch_of(*data)).norms
    engine.stretches = honest
    again = engine.differentiate(Objective(model, cross_entropy), list(model.parameters()), batch_of(*data)).norms
    assert not torch.allclose(lengths, again, rtol=1e-3)


@pytest.mark.parametrize("way", list(linear.Way))
def test_every_way_of_measuring_a_convolution_and_rows(way: linear.Way, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, conv):
        monkeypatch.setattr(module, "choose_way", lambda *shape: way)
    monkeypatch.setattr(conv, "CACHED", 200)  # several ranges of examples
    for kind in ("convolutions", "tied"):
        model, data = make(kind)
        engine = BookKeeping()
        engine.stretches = draw_maps(list(model.parameters()))
        assert_as_in_a_loop(engine, model, batch_of(*data))


def test_what_does_not_fit_is_formed_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretched, "FORM_BYTES", 1)
    model, data = make("groups, depths and adjoints")
    engine = BookKeeping()
    engine.stretches = draw_maps(list(model.parameters()))
    assert_as_in_a_loop(engine, model, batch_of(*data))


@pytest.mark.parametrize("kind", ["layers", "convolutions", "tied"])
def test_a_bad_example_counts_nothing_and_units_have_the_mean_of_their_records(kind: str) -> None:
    model, (x, y) = make(kind)
    parameters, objective = list(model.parameters()), Objective(model, cross_entropy)
    engine = BookKeeping()
    engine.stretches = draw_maps(parameters)
    owners = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    found = engine.differentiate(objective, parameters, replace(batch_of(x, y), groups=Groups(owners, 4)))
    rows = loop_oracle(objective, parameters, batch_of(x, y))
    for unit in range(4):
        mine = [row for row, owner in zip(rows, owners.tolist(), strict=True) if owner == unit]
        means = [sum(parts) / len(mine) for parts in zip(*mine, strict=True)]
        lengths = [stretch_plainly(m, by).norm() for m, by in zip(means, engine.stretches.maps, strict=True)]
        assert float(found.norms[unit]) == pytest.approx(math.hypot(*map(float, lengths)), rel=1e-4)
    if x.is_floating_point():
        x[2] = math.nan
        found = engine.differentiate(objective, parameters, batch_of(x, y))
        weights = Flat().weights(found.norms, 1.0, None)  # type: ignore[arg-type]
        assert weights[2] == 0
        assert all(bool(torch.isfinite(total).all()) for total in found.weighted_sum(weights))


@pytest.mark.parametrize("name", ["GPT-2, tied", "BERT", "ViT, a class token"])
def test_models_of_others_are_probed_and_measured_as_in_a_loop(name: str) -> None:
    others = pytest.importorskip("tests.gradients.test_models_of_others")
    torch.manual_seed(0)
    build, loss, draw = others.MODELS[name]
    model, data = build(), draw(5)
    names = list(data)

    def by_names(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return loss(model, dict(zip(names, batch, strict=True)))

    columns = tuple(data.values())
    recipe = recipes.preconditioned(probes=32, **{**COMMON, "batch_size": 4}).for_records(5)
    with private(recipe, model=model, dataset=columns, loss=by_names, validate=False) as run:
        recipe.norms.survey(run.bench, 0)
        maps = run.bench.engine.stretches
        stretched_share = sum(by is not None for by in maps.maps) / len(maps.maps)
        assert stretched_share > 0.6
        assert_as_in_a_loop(run.bench.engine, model, batch_of(*columns), by_names)


# -- the maps ----------------------------------------------------------------------------------------------------------


def find_maps(recipe: Recipe, **options: Any) -> Stretches:
    with private(recipe.for_records(64), **options) as run:
        recipe.norms.survey(run.bench, 0)
        found: Stretches = run.bench.engine.stretches  # type: ignore[attr-defined]
        return found


def test_maps_are_the_same_whatever_the_records_are_and_different_for_another_model() -> None:
    recipe = recipes.preconditioned(**COMMON)
    x, y = classification()
    others = [(torch.full_like(x, math.nan), torch.zeros_like(y)), (1e6 * x, 2 - y)]
    first = find_maps(recipe, dataset=(x, y))
    for data in others:
        for one, other in zip(first.maps, find_maps(recipe, dataset=data, validate=False).maps, strict=True):
            assert torch.equal(one.left, other.left)
            assert one.right is None or torch.equal(one.right, other.right)
    changed = find_maps(recipe, model=mlp(seed=5)).maps
    assert not torch.equal(first.maps[2].right, changed[2].right)


def test_what_has_the_moments_is_even_afterwards_and_as_long_as_before() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4000, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    side, flat = Side(6), Side(6, diagonal=True)
    for each in (side, flat):
        each.add(rows)
    root = side.find_root(1e-9)
    moved = rows @ root
    moments = moved.T @ moved / len(rows)
    torch.testing.assert_close(moments, moments[0, 0] * torch.eye(6, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    for damping in (1e-9, 0.01, 10.0):
        assert float((rows @ side.find_root(damping)).norm()) == pytest.approx(float(rows.norm()), rel=1e-6)
        assert float((rows * flat.find_root(damping)).norm()) == pytest.approx(float(rows.norm()), rel=1e-6)
    assert Side(6).find_root(0.1) is None
    silent = Side(3)
    silent.add(torch.zeros(5, 3))
    silent.add(torch.full((5, 3), math.nan))
    assert silent.find_root(0.1) is None


def test_much_damping_is_dp_sgd_and_no_damping_but_white_inputs_too() -> None:
    for by in find_maps(recipes.preconditioned(damping=1e9, balanced=False, **COMMON)).maps:
        assert by.gain == pytest.approx(1.0, rel=1e-3)
    plain = find_maps(recipes.preconditioned(probes=2000, **COMMON)).maps[0]
    torch.testing.assert_close(plain.right, torch.eye(6), atol=0.1, rtol=0)


def test_balanced_maps_give_every_entry_its_share_and_keep_the_length_of_all() -> None:
    model, parameters = mlp(), []
    recipe = recipes.preconditioned(probes=64, damping=1e9, **COMMON).for_records(64)
    with private(recipe, model=model) as run:
        recipe.norms.survey(run.bench, 0)
        maps, parameters = run.bench.engine.stretches.maps, run.bench.parameters()
        batch = preconditioned.Synthetic(run.bench, recipe.norms, 0).make()
    rows = loop_oracle(Objective(model, cross_entropy), parameters, batch)
    plain = [math.fsum(float(row[k].square().sum()) for row in rows) for k in range(4)]
    moved = [math.fsum(float(by.apply(row[k]).square().sum()) for row in rows) for k, by in enumerate(maps)]
    shares = [found / p.numel() for found, p in zip(moved, parameters, strict=True)]
    assert shares == pytest.approx([shares[0]] * 4, rel=0.5)
    assert max(plain) / min(plain) > 3
    assert sum(moved) == pytest.approx(sum(plain), rel=0.3)


def test_synthetic_images_are_pink_and_synthetic_tokens_follow_zipf() -> None:
    generator = torch.Generator().manual_seed(0)
    images = make_pink((64, 1, 16, 16), generator)
    power = torch.fft.fft2(images).abs().square().mean((0, 1))
    assert float(power[0, 1] / power[0, 4]) == pytest.approx(16, rel=0.4)
    assert float(images.square().mean()) == pytest.approx(1, rel=1e-3)
    tokens = make_tokens((40_000,), 50, generator)
    counts = torch.bincount(tokens, minlength=50)
    assert float(counts[0] / counts[4]) == pytest.approx(5, rel=0.15)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        vectors = self.words(words) * mask.unsqueeze(-1)
        return self.head(vectors.sum(1) / mask.sum(1, keepdim=True))


def classify_words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"], batch["mask"]), batch["label"].view(-1), reduction="none")


def pad(records: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence([torch.tensor(text) for text, _ in records], batch_first=True)
    return {"words": words, "mask": (words > 0).long(), "label": torch.tensor([label for _, label in records])}


def test_texts_of_any_length_are_probed_at_a_public_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    healthy = preconditioned.Synthetic.make

    def make(self: Any) -> Any:
        batch = healthy(self)
        seen.append(tuple(batch.data["words"].shape))
        assert int(batch.data["words"].max()) < 30
        assert bool((batch.data["mask"] == 1).all())
        assert set(batch.data["label"].tolist()) == {0, 1, 2}
        return batch

    monkeypatch.setattr(preconditioned.Synthetic, "make", make)
    recipe = recipes.preconditioned(length=9, probes=64, **{**COMMON, "batch_size": 4})
    maps = []
    for length in (3, 6):
        texts = [([1 + i % 29] * length, i % 3) for i in range(64)]
        torch.manual_seed(0)
        model = Words()
        maps.append(find_maps(recipe, model=model, dataset=texts, collate=pad, loss=classify_words).maps)
    assert set(seen) == {(32, 9)}
    for one, other in zip(*maps, strict=True):
        assert torch.equal(one.left, other.left)


def test_other_shapes_that_a_collate_function_makes_must_be_those_of_all_records() -> None:
    """They are those of the first record: a guarantee that did not say so would hang on its length."""

    def stack(records: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in records]), torch.stack([y for _, y in records])

    recipe = recipes.preconditioned(probes=64, **COMMON)
    stated = []
    for options in ({}, {"collate": stack}):
        with private(recipe.for_records(64), **options) as run:
            recipe.norms.survey(run.bench, 0)
            stated.append(preconditioned.ONE_SHAPE in run.guarantee(1e-5).conditions)
    assert stated == [False, True]


def test_the_model_is_left_as_it_was_and_torch_s_own_randomness_too() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    find_maps(recipes.preconditioned(**COMMON), model=model, validate=False)
    assert torch.equal(state, torch.get_rng_state())
    assert model[1].training
    assert all(torch.equal(old, p) and p.grad is None for old, p in zip(before, model.parameters(), strict=True))


class Bent(torch.autograd.Function):
    """Nobody has a rule for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Bending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Bent.apply(x, self.w))


def test_a_model_without_rules_is_trained_unstretched_where_nothing_is_known() -> None:
    with private(recipes.preconditioned(**COMMON).for_records(64), model=Bending()) as run:
        list(run.steps())
        assert run.position == 6


# -- the step ---------------------------------------------------------------------------------------------------------


def take_a_quiet_step(recipe: Recipe, model: nn.Module, **options: Any) -> tuple[list[Tensor], Stretches]:
    """What one step without noise to speak of moves the model by, as a sum over records, and the maps."""
    quiet = replace(recipe, noise_multiplier=1e-9, steps=1, batch_size=64).for_records(64)
    before = [p.detach().clone() for p in model.parameters()]
    with private(quiet, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), **options) as run:
        list(run.steps())
        maps: Stretches = run.bench.engine.stretches  # type: ignore[attr-defined]
    return [(old - p.detach()).double() * 64 for old, p in zip(before, model.parameters(), strict=True)], maps


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_records_are_clipped_where_they_are_stretched(engine: str, natural: bool) -> None:
    model, clip = mlp(), 0.05
    rows = loop_oracle(Objective(model, cross_entropy), list(model.parameters()), batch_of(*classification()))
    recipe = recipes.preconditioned(clip=clip, natural=natural, **COMMON)
    found, maps = take_a_quiet_step(recipe, model, engine=engine, microbatch=20)
    expected = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for row in rows:
        mine = [stretch_plainly(g, by) for g, by in zip(row, maps.maps, strict=True)]
        weight = min(1.0, clip / math.hypot(*(float(g.norm()) for g in mine)))
        for total, g in zip(expected, mine, strict=True):
            total += weight * g
    if natural:
        expected = [stretch_plainly(total, by) for total, by in zip(expected, maps.maps, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-4, atol=5e-5)


def test_blocks_are_clipped_in_the_same_geometry() -> None:
    recipe = replace(recipes.blockwise(clip=0.05, **COMMON), norms=Probed())
    model = mlp()
    rows = loop_oracle(Objective(model, cross_entropy), list(model.parameters()), batch_of(*classification()))
    found, maps = take_a_quiet_step(recipe, model)
    bound, expected = 0.05 / math.sqrt(2), [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for row in rows:
        mine = [stretch_plainly(g, by) for g, by in zip(row, maps.maps, strict=True)]
        for block in ((0, 1), (2, 3)):
            weight = min(1.0, bound / math.hypot(*(float(mine[k].norm()) for k in block)))
            for k in block:
                expected[k] += weight * mine[k]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-4, atol=5e-5)


def test_a_loop_of_the_users_own_takes_the_same_steps() -> None:
    torch.testing.assert_close(
        *train_in_both_loops(recipes.preconditioned(**COMMON).for_records(64)), rtol=1e-5, atol=1e-6
    )


def test_the_price_is_that_of_dp_sgd() -> None:
    with private(recipes.preconditioned(**COMMON).for_records(64)) as run:
        list(run.steps())
        charged = [event for _, event, *_ in run.run.ledger.history()]
        assert charged == [PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))] * 6
        assert run.guarantee(1e-5).epsilon == pytest.approx(calibrated(steps=6).price(1e-5))


def test_the_model_is_probed_again_after_so_many_steps_and_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[int] = []
    healthy = Probed.probe

    def probe(self: Probed, bench: Any, step: int) -> Stretches:
        probed.append(step)
        return healthy(self, bench, step)

    monkeypatch.setattr(Probed, "probe", probe)
    recipe = recipes.preconditioned(every=2, probes=32, **COMMON).for_records(64)
    with private(recipe, run=tmp_path / "run") as first:
        for step in first.steps():
            if step.number == 3:
                break
        first.save()
    assert probed == [0, 2]
    with private(recipe) as second:
        second.load(tmp_path / "run")
        list(second.steps())
    assert probed == [0, 2, 3, 4]
    frozen = mlp()
    with private(recipes.preconditioned(probes=32, **COMMON).for_records(64), model=frozen) as third:
        third.step()
        frozen[0].weight.requires_grad_(False)
        third.step()
        assert len(third.bench.engine.stretches.maps) == 3
    assert probed == [0, 2, 3, 4, 0, 1]


# -- privacy -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_conformance_on_a_network_and_a_map_from_the_records_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.preconditioned(probes=32, **{**COMMON, "batch_size": 4})

    def check() -> Any:
        return conformance.check(
            recipe, model=mlp(), data=classification(14), loss=cross_entropy, price=False, thorough=False, steps=2
        )

    found = check()
    assert found.passed, found.findings
    healthy = preconditioned.Synthetic.make

    def peek(self: Any) -> Any:
        batch = healthy(self)
        records = self.bench.records.gather(torch.arange(self.bench.records.count), torch.device("cpu"))
        batch.data[0][: len(records.data[0])] = torch.nan_to_num(records.data[0][:32])
        return batch

    begun = preconditioned.Synthetic.__init__

    def begin(self: Any, bench: Any, *rest: Any) -> None:
        self.bench = bench
        begun(self, bench, *rest)

    monkeypatch.setattr(preconditioned.Synthetic, "__init__", begin)
    monkeypatch.setattr(preconditioned.Synthetic, "make", peek)
    assert not check().passed


def test_attacks_find_no_more_than_is_charged_and_twice_the_bound_is_found() -> None:
    recipe = recipes.preconditioned(batch_size=4, steps=4, noise_multiplier=1.0, probes=32)
    alone = (Instance("all records", lanes=128),)
    assert audit_recipe(recipe, trials=300, instances=alone, seed=1).passed
    recipe = replace(recipe, norms=Probed(damping=1e6, probes=32))  # so that the attack knows its direction
    assert audit_recipe(recipe, trials=600, instances=alone, seed=1).passed

    class Thrice(Flat):
        def weights(self, norms: Tensor, clip: float, draw: Any) -> Tensor:
            return super().weights(norms, 3 * clip, draw)

    with pytest.raises(AuditFailed):
        audit_recipe(replace(recipe, weighing=Thrice()), trials=600, instances=alone, seed=1)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_has_no_proof_or_no_meaning_is_refused_in_one_line() -> None:
    recipe = recipes.preconditioned(**COMMON).for_records(64)
    for change, said in (
        ({"selection": recipes.dpsur().selection}, r"no proof with stretched gradients: use Always"),
        ({"sampler": recipes.dpis(batch_size=16).sampler}, "use Poisson draws"),
        ({"noise": recipes.banded(bands=1).noise}, "no proof"),
    ):
        with pytest.raises(InvalidInput, match=said):
            replace(recipe, **change)
    for wrong, said in (
        ({"inputs": "blue"}, "inputs='blue' must be one of"),
        ({"probes": 0}, "probes=0 must be >= 1"),
        ({"damping": 0.0}, "damping=0.0 must be > 0"),
        ({"every": 0}, "every=0 must be >= 1"),
        ({"length": 0}, "length=0 must be >= 1"),
    ):
        with pytest.raises(InvalidInput, match=said):
            recipes.preconditioned(**wrong)
    with pytest.raises(InvalidInput, match="the server has whole updates"):
        recipe.require("federated")
    with pytest.raises(InvalidInput, match="cannot be used on a sharded model"):
        recipe.require("sharded")


def test_records_that_cannot_be_imitated_are_refused_before_anything_is_charged() -> None:
    def with_words(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch[:2])

    x, y = classification()
    texts = [(a, b, "a text") for a, b in zip(x, y, strict=True)]
    recipe = recipes.preconditioned(**COMMON).for_records(64)
    with private(recipe, dataset=texts, loss=with_words, validate=False) as run:
        with pytest.raises(InvalidInput, match="a batch holds a str"):
            run.step()
        assert len(run.run.ledger) == 0

    def infinite(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) / batch[0].new_zeros(())

    with private(recipe, loss=infinite, validate=False) as run:
        with pytest.raises(UnsupportedModel, match="is not finite"):
            run.step()
        assert len(run.run.ledger) == 0
