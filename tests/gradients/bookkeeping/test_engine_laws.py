"""Law 6 and the promises of the engine: bad examples, frozen parts, refusals, fall-backs, and a model left as found."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Batch, Objective
from tests.gradients.bookkeeping.test_bookkeeping import MODELS, Apply
from tests.gradients.oracle import assert_matches, assert_same_state, batch_of, check, singles, squared, state_of

CONTINUOUS = [
    "linear",
    "linear rows",
    "folded",
    "conv2d",
    "conv2d wide",
    "cnn",
    "layer norm",
    "scale",
    "matmul",
    "twice",
    "weight norm",
    "einsum",
]


def differentiate(model: nn.Module, data: Any, size: int) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return BookKeeping().differentiate(Objective(model, squared), parameters, batch_of(data, size))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_bad_example_changes_only_its_own_contribution(name: str, bad: float) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, data = build(), draw(5)
    clean = differentiate(model, data, 5)
    spoiled = data.clone()
    spoiled[2] = bad
    result = differentiate(model, spoiled, 5)
    others = torch.tensor([0, 1, 3, 4])
    assert not torch.isfinite(result.norms[2])
    torch.testing.assert_close(result.norms[others], clean.norms[others])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    for mine, wanted in zip(result.weighted_sum(weights), clean.weighted_sum(weights), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_cost_nothing_and_change_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    check(BookKeeping(), model, torch.randn(6, 5), 6)


def test_frozen_embedding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    check(BookKeeping(), model, torch.randint(0, 7, (6, 4)), 6)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embedding_options_that_mix_records_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(options))):
        differentiate(nn.Embedding(7, 3, **options), torch.randint(0, 7, (4, 5)), 4)


def test_error_in_the_loss_leaves_the_model_as_found() -> None:
    model = nn.Linear(3, 2)
    before = state_of(model)

    def loss(model: nn.Module, data: Tensor) -> Tensor:
        model(data)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch_of(torch.randn(4, 3), 4))
    assert_same_state(before, state_of(model))


def test_wrong_loss_shape_is_refused() -> None:
    model = nn.Linear(3, 2)
    objective = Objective(model, lambda model, data: model(data).mean())
    with pytest.raises(UnsupportedModel, match="vector"):
        BookKeeping().differentiate(objective, list(model.parameters()), batch_of(torch.randn(4, 3), 4))


def test_existing_grads_are_untouched() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.full_like(model.weight, 7.0)
    differentiate(model, torch.randn(4, 3), 4)
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 7.0))
    assert model.bias.grad is None


def test_only_the_asked_parameters_are_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    asked = [model[2].weight]
    batch = batch_of(torch.randn(6, 5), 6)
    result = BookKeeping().differentiate(Objective(model, squared), asked, batch)
    wanted = torch.stack([row[2].norm() for row in singles(model, squared, batch)])
    torch.testing.assert_close(result.norms, wanted)
    assert all(p.grad is None for p in model.parameters())


def test_operation_that_cannot_be_isolated_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    engine, batch = BookKeeping(), batch_of(torch.randn(4, 5), 4)
    model = Apply(lambda m, x: torch.stack([m.w * row for row in x]), w=(5,))
    check(engine, model, batch.data, 4)
    assert len(caplog.records) == 1
    objective = Objective(model, squared)
    for _ in range(3):
        engine.differentiate(objective, list(model.parameters()), batch)
    assert len(caplog.records) == 2


def test_a_loss_without_parameters_has_zero_gradients() -> None:
    """As that of records that are masked out; a model in which every loss is like that is refused by the probe."""
    model = nn.Linear(3, 2)
    objective = Objective(model, lambda model, data: data.sum(1))
    found = BookKeeping().differentiate(objective, list(model.parameters()), batch_of(torch.randn(4, 3), 4))
    assert torch.equal(found.norms, torch.zeros(4))
    assert all(not total.any() for total in found.weighted_sum(torch.ones(4)))


def test_input_modified_in_place_afterwards_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        y = m.l(x)
        x.mul_(3)
        return y + x

    with pytest.raises(RuntimeError, match="inplace"):
        differentiate(Apply(forward, l=nn.Linear(3, 3)), torch.randn(4, 3), 4)
    assert "in place" in caplog.text


def test_zero_initialised_layers_are_proven_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    engine = BookKeeping()
    check(engine, model, torch.randn(4, 4, 4), 4)
    nn.init.normal_(model[1].weight)
    check(engine, model, torch.randn(4, 4, 4), 4)


def test_layouts_proven_for_one_size_serve_others() -> None:
    torch.manual_seed(0)
    build, draw = MODELS["sequence first"]
    engine, model = BookKeeping(), build()
    for size in (3, 4, 1, 5, 4):
        check(engine, model, draw(size), size)


def test_dropout_draws_differ_between_examples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    result = differentiate(model, torch.ones(8, 5), 8)
    assert len(result.norms.unique()) == 8


def test_half_precision_has_float32_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    exact = differentiate(model, torch.ones(4, 5), 4).norms
    half = differentiate(model.bfloat16(), torch.ones(4, 5, dtype=torch.bfloat16), 4)
    assert half.norms.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in half.weighted_sum(torch.ones(4)))
    torch.testing.assert_close(half.norms, exact, rtol=0.05, atol=0)


def test_cross_entropy_of_sequences() -> None:
    torch.manual_seed(0)

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(data[0])
        per_token = F.cross_entropy(logits.reshape(-1, 7), data[1].reshape(-1), reduction="none")
        return per_token.reshape(len(logits), -1).mean(1)

    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    data = (torch.randint(0, 7, (5, 6)), torch.randint(0, 7, (5, 6)))
    check(BookKeeping(), model, data, 5, loss)


def test_bags_of_different_lengths() -> None:
    """Offsets make bags that no slice of the data can; the loop collates each bag alone."""
    torch.manual_seed(0)
    model = nn.EmbeddingBag(7, 3, mode="mean")
    rows = [torch.randint(0, 7, (length,)) for length in (3, 1, 4, 2)]

    def collate(chosen: list[Tensor]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([0, *(len(row) for row in chosen[:-1])])
        return torch.cat(chosen), lengths.cumsum(0)

    batch = Batch(collate(rows), 4, lambda i: collate([rows[i]]))
    result = BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch)
    assert_matches(result, singles(model, squared, batch), 1e-4)


def test_empty_batch() -> None:
    model = nn.Linear(3, 2)
    result = differentiate(model, torch.randn(0, 3), 0)
    assert result.norms.shape == (0,)
    assert all(not total.any() for total in result.weighted_sum(torch.ones(0)))


def test_replayed_operation_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sordino")
    model, engine = Apply(lambda m, x: torch.cdist(x, m.q), q=(3, 5)), BookKeeping()
    objective = Objective(model, squared)
    for _ in range(3):
        engine.differentiate(objective, list(model.parameters()), batch_of(torch.randn(4, 5), 4))
    assert [record.message for record in caplog.records if "cdist" in record.message] == [caplog.records[0].message]


def test_nothing_is_held_after_the_result_is_dropped() -> None:
    """What was kept must not wait for the garbage collector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = torch.randn(5, 7, 3)
    held = weakref.ref(data)
    gc.collect()
    gc.disable()
    try:
        result = differentiate(model, data, 5)
        list(result.weighted_sum(result.norms))
        del result, data
        assert held() is None
    finally:
        gc.enable()


def test_unknown_arguments_and_outputs_given_are_left_to_other_engines(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    data = torch.randn(4, 5)
    check(BookKeeping(), Apply(lambda m, x: torch.sub(x, m.w, alpha=2), w=(5,)), data, 4)
    check(BookKeeping(), Apply(lambda m, x: torch.div(x, other=m.w), w=(5,)), data, 4)
    assert not caplog.records
    model = Apply(lambda m, x: torch.mul(x, m.w, out=torch.empty(0)), w=(5,))
    with pytest.raises(RuntimeError, match="out="):
        differentiate(model, data, 4)
    assert "out=" in caplog.text
