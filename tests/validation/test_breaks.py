"""Ways around the probe that were once accepted with a guarantee called proven: each of them is refused now."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sordino
from sordino import recipes
from sordino.errors import UnsupportedModel
from sordino.validation.examination import CROWD, FEW_SEEDS, PROBED
from sordino.validation.randomness import FIRST_SEED, Randomness
from sordino.validation.trial import SEEDS
from tests.validation.probes import Augmented, around, cross_entropy, findings, vectors

RECORDS = 128


class MixesUp(nn.Module):
    """Batch mix-up, switched on by a coin."""

    def __init__(self, coin: Callable[[], float], order: Callable[[int], Tensor], heads: bool) -> None:
        super().__init__()
        self.coin, self.order, self.heads = coin, order, heads

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[self.order(len(x))] if (self.coin() < 0.5) == self.heads else x


class Experts(nn.Module):
    """A mixture of two experts; an expert takes `capacity` examples, the first ones, and drops the others."""

    def __init__(self, capacity: int | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(2))
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        chosen = functional.one_hot(self.gate(x).argmax(1), 2)
        if self.capacity is not None:
            chosen = chosen * (chosen.cumsum(0) <= self.capacity)
        return x + sum(expert(x) * chosen[:, [number]] for number, expert in enumerate(self.experts))


class SparseExperts(Experts):
    """The same, but each expert sees its own examples alone, so that their random numbers depend on the others."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(1), x.clone()
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()[: self.capacity]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return out


def divided(model: nn.Module, batch: Any) -> Tensor:
    """Random noise on the losses, which are then divided by the realised size of the batch."""
    losses = cross_entropy(model, batch)
    return (losses + 0.01 * torch.randn(len(losses))) / len(losses)


def train(model: nn.Module, data: Any = None, loss: Any = cross_entropy, **options: Any) -> sordino.Private:
    data = vectors(RECORDS) if data is None else data
    recipe = recipes.dpsgd(batch_size=64, steps=4, noise_multiplier=1.0).for_records(len(data))
    private = sordino.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, recipe, seed=1, **options)
    for _ in private.steps():
        pass
    return private


COINS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
}
ORDERS: dict[str, Callable[[int], Tensor]] = {
    "permutation": torch.randperm,
    "sorted noise": lambda n: torch.rand(n).argsort(),
    "any partner": lambda n: torch.randint(n, (n,)),
}


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize(
    ("coin", "order"),
    [("torch", "permutation"), ("python", "sorted noise"), ("numpy", "any partner"), ("torch", "sorted noise")],
)
def test_a_mixture_behind_a_coin_is_refused_before_anything_is_spent(
    coin: str, order: str, heads: bool, costly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a costly model most seeds see the few records alone, which is enough."""
    if costly:
        monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    torch.manual_seed(2)
    with pytest.raises(UnsupportedModel, match="MixesUp '1' mixes examples"):
        train(around(MixesUp(COINS[coin], ORDERS[order], heads)))


class MixesCrowds(MixesUp):
    """The same, but in large batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 8 else x


@pytest.mark.parametrize("heads", [True, False])
def test_a_costly_model_that_mixes_large_batches_by_a_coin_is_refused_at_a_draw_at_the_latest(
    heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe sees one crowd of it, the draws 1, 2 and 4 are looked at with other coins."""
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    torch.manual_seed(2)
    with pytest.raises(UnsupportedModel, match=r"mixes examples|in a smaller batch"):
        train(around(MixesCrowds(COINS["torch"], ORDERS["permutation"], heads)))


class Skipped(nn.Module):
    """Leaves out an example's layer by a coin, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.5)


def list_sizes(layer: nn.Module, width: int) -> list[int]:
    """The sizes of the batches that a healthy model was probed with."""
    sizes: list[int] = []
    model = around(layer, width)
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    assert findings(model, vectors()) == []
    return sizes


def test_a_model_is_costly_by_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight crowds of a costly model would take a minute: one of half the size is run, and the few for other seeds."""
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 1000)
    cheap, costly = list_sizes(Skipped(), 8), list_sizes(Skipped(), 512)
    assert max(cheap) == CROWD
    assert cheap.count(CROWD) >= 3 * SEEDS
    assert max(costly) == CROWD // 2
    assert costly.count(CROWD // 2) == 1
    assert costly.count(PROBED) >= 3 * (SEEDS - 1)
    monkeypatch.setattr("sordino.validation.examination.LARGE", 10)
    assert max(list_sizes(Skipped(), 8)) == CROWD // 2, "by its parameters"


def test_a_costly_model_that_only_drops_entries_is_tried_with_two_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks choose nothing, so it does the same with all seeds."""
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    assert list_sizes(nn.Dropout(), 64).count(PROBED) <= 3 * FEW_SEEDS + 2
    assert list_sizes(nn.Dropout(), 8).count(PROBED) >= 3 * (SEEDS - 1), "so few coins may be about a whole example"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_costly_model_that_mixes_crowds_alone_is_refused_before_anything_is_spent(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    torch.manual_seed(2)
    with pytest.raises(UnsupportedModel, match=r"mixes examples|in a smaller batch") as raised:
        train(around(nn.Sequential(nn.Dropout(dropout), Experts(capacity=4))))
    assert "paid for" not in str(raised.value)


def mask(x: Tensor) -> Tensor:
    return functional.dropout(torch.ones(len(x), 64))


CHOOSING: dict[str, Callable[[Tensor], Any]] = {
    "handed to Python": lambda x: float(mask(x)[0, 0]) and x,
    "by a comparison": lambda x: torch.where(mask(x)[:, :1] > 0, x, 0),
    "by an order": lambda x: x[mask(x)[:, 0].argsort()],
    "by a shape": lambda x: x * len(mask(x).nonzero()),
    "by a chance that was computed": lambda x: x * torch.empty(len(x), 64).bernoulli_(x.sigmoid().expand(-1, 64)),
    "one coin": lambda x: x * functional.dropout(torch.ones(())),
    "one coin for each example": lambda x: x * functional.dropout(torch.ones(len(x), 1)),
    "uniform numbers": lambda x: x + torch.rand(len(x), 64),
    "python": lambda x: functional.dropout(x.expand(-1, 64)) * random.random(),
}
PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: functional.dropout(x.expand(-1, 64)),
    "before layers": lambda x: functional.gelu(mask(x) @ torch.ones(64, 8)).softmax(1).sum(1),
    "beside a comparison of data": lambda x: (mask(x), torch.where(x > 0, x, 0), bool(x.any())),
}


@pytest.mark.parametrize("name", [*CHOOSING, *PLAIN])
def test_masks_are_told_from_coins_that_choose(name: str) -> None:
    torch.manual_seed(FIRST_SEED)
    with Randomness(FIRST_SEED, shared=False) as randomness:
        {**CHOOSING, **PLAIN}[name](torch.ones(4, 1))
    assert randomness.masks is (name in PLAIN)


def test_a_random_loss_that_divides_by_the_size_of_the_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="do not divide by the batch size"):
        train(around(nn.Identity()), loss=divided)


@pytest.mark.parametrize("kind", [Experts, SparseExperts])
def test_experts_that_overflow_only_in_a_real_draw_are_refused_there(kind: type[Experts]) -> None:
    torch.manual_seed(2)
    with pytest.raises(UnsupportedModel, match="seen in a draw") as raised:
        train(around(kind(capacity=34)), microbatch=RECORDS)
    assert not any(character.isdigit() for character in str(raised.value).replace("'1'", ""))


@pytest.mark.parametrize("kind", [Experts, SparseExperts])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_experts_that_take_everybody_pass(kind: type[Experts], dropout: float) -> None:
    torch.manual_seed(2)
    train(around(kind(capacity=None, dropout=dropout)))


class Pairs:
    """A batch that nobody can slice: a list of pairs."""

    @staticmethod
    def collate(records: list[Any]) -> list[Any]:
        return list(records)

    @staticmethod
    def stack(batch: Any) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])

    @staticmethod
    def plain(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, Pairs.stack(batch))

    @staticmethod
    def standardised(model: nn.Module, batch: Any) -> Tensor:
        x, y = Pairs.stack(batch)
        x = (x - x.mean(0)) / (1 + x.var(0, correction=0))
        return functional.cross_entropy(model(x), y, reduction="none")


def test_a_batch_that_cannot_be_sliced_from_a_dataset_with_its_own_generator_is_probed() -> None:
    own = np.random.default_rng(0)
    data = Augmented(own.random)
    data.inner = vectors(RECORDS)
    train(around(nn.LayerNorm(8)), data, Pairs.plain, collate=Pairs.collate)
    with pytest.raises(UnsupportedModel, match="loss mixes examples"):
        train(around(nn.LayerNorm(8)), data, Pairs.standardised, collate=Pairs.collate)
