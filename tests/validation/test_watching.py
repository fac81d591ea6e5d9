"""Real draws are looked at on a public schedule, in every kind of loop, without a trace and without false alarms."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import sordino
from sordino import recipes
from sordino.accounting import Ledger
from sordino.distributed import Team
from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.parts import Foreign
from sordino.validation.trial import Finding
from sordino.validation.watching import IN_ANY_COMPANY, ONE_COIN, UNSLICEABLE, Watch
from tests.validation.probes import (
    CLASSES,
    Centred,
    GradientMixer,
    around,
    cross_entropy,
    findings,
    kinds,
    tokens,
    vectors,
)
from tests.validation.test_breaks import RECORDS, Experts, MixesUp, Pairs, train


class Late(nn.Module):
    """Mixes examples only in batches larger than any probe before the first draw."""

    def __init__(self, inner: nn.Module, beyond: int = 40) -> None:
        super().__init__()
        self.inner, self.beyond = inner, beyond

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if len(x) > self.beyond else x


def bound(model: nn.Module, loss: Any = cross_entropy, steps: int = 4, **options: Any) -> sordino.Private:
    data = options.pop("data", None) or vectors(RECORDS)
    made = recipes.dpsgd(batch_size=64, steps=steps, noise_multiplier=1.0, **options.pop("recipe", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sordino.Private(model, optimizer, data, loss, made.for_records(RECORDS), seed=1, **options)


def loop(private: sordino.Private, model: nn.Module, loss: Any = cross_entropy, **options: Any) -> None:
    for batch in private.loader(**options):
        private.bench.optimizer.zero_grad()
        private.backward(loss(model, batch))
        private.bench.optimizer.step()


def test_what_mixes_in_a_large_draw_alone_is_refused_before_its_release() -> None:
    model = around(Late(Centred()))
    private = bound(model, microbatch=RECORDS)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModel, match=r"Centred '1\.inner' mixes examples.*paid for and was not released"):
        private.step()
    assert len(private.bench.ledger) == 1, "the attempt is charged"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert private.position == 0


@pytest.mark.parametrize("inner", [Centred, GradientMixer])
@pytest.mark.parametrize("width", [8, 64], ids=["few coins", "masks"])
def test_mixing_beside_dropout_in_a_large_draw_alone_is_refused(inner: type[nn.Module], width: int) -> None:
    """By losses, or by the gradients alone; also where the masks are so wide that they are known to choose nothing."""
    with pytest.raises(UnsupportedModel, match=r"mix.*paid for and was not released"):
        bound(around(nn.Sequential(nn.Dropout(0.1), Late(inner())), width), microbatch=RECORDS).step()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["plain", "workers"])
def test_a_loop_of_ones_own_is_watched(options: dict[str, Any]) -> None:
    model = around(Late(Centred()))
    with pytest.raises(UnsupportedModel, match="mixes examples"):
        loop(bound(model), model, **options)
    healthy = around(nn.Dropout(0.5))
    loop(bound(healthy), healthy, **options)
    loop(bound(healthy), healthy, **options, microbatch=20)


def test_a_foreign_loader_is_watched_and_what_cannot_be_taken_apart_is_stated() -> None:
    def run(model: nn.Module, loss: Any, collate: Any = None) -> sordino.Private:
        private = bound(model, loss, steps=2, recipe={"sampler": Foreign()}, collate=collate)
        foreign = DataLoader(vectors(RECORDS), batch_size=64, shuffle=True, collate_fn=collate)
        loop(private, model, loss, foreign=foreign)
        return private

    with pytest.raises(UnsupportedModel, match="mixes examples"):
        run(around(Late(Centred())), cross_entropy)
    assert UNSLICEABLE not in run(around(nn.LayerNorm(8)), cross_entropy).guarantee(1e-5).conditions

    def named(records: list[Any]) -> Any:
        return *torch.utils.data.default_collate(records), ["a name"] * len(records)

    def without_names(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch[:2])

    stated = run(around(nn.LayerNorm(8)), without_names, named).guarantee(1e-5)
    assert UNSLICEABLE in stated.conditions
    assert f"proven provided that {UNSLICEABLE}, which nobody checked" in str(stated)


def test_batches_that_cannot_be_sliced_are_taken_apart_by_their_collate_function() -> None:
    with pytest.raises(UnsupportedModel, match="mixes examples"):
        train(around(Late(Centred())), loss=Pairs.plain, collate=Pairs.collate, microbatch=RECORDS)
    train(around(nn.Dropout()), loss=Pairs.plain, collate=Pairs.collate, microbatch=RECORDS)


def test_a_generator_inside_the_model_is_seen_at_work() -> None:
    """Copies of the model toss the same coin again; the draws go on with it."""
    torch.manual_seed(0)
    own = np.random.default_rng(3)
    with pytest.raises(UnsupportedModel, match=r"MixesUp '1' mixes examples.*seen in a draw"):
        train(around(MixesUp(own.random, torch.randperm, heads=own.random() >= 0.5)), microbatch=RECORDS)


class Outliers(nn.Module):
    """Adds up, in a buffer, what is out of the ordinary; the few records of the probe are ordinary."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach()[x.detach() > 10].sum()
        return x


def test_a_buffer_that_remembers_some_records_alone_is_seen_in_a_draw() -> None:
    """It would be saved with the model, without noise."""
    x, y = vectors(RECORDS).tensors
    probed = [i * (RECORDS - 1) // 3 for i in range(4)]
    strange = torch.ones(RECORDS, dtype=torch.bool).index_fill(0, torch.tensor(probed), False)
    data = torch.utils.data.TensorDataset(torch.where(strange[:, None], x + 20, x), y)
    with pytest.raises(UnsupportedModel, match=r"keeps unnoised data of the batch in seen.*was not released"):
        bound(nn.Sequential(Outliers(), nn.Linear(x.shape[1], CLASSES)), data=data).step()


def test_a_switched_off_probe_is_stated_and_looks_at_nothing() -> None:
    private = bound(around(Late(Centred())), microbatch=RECORDS, validate=False)
    list(private.steps())
    assert "the model was NOT probed for mixing examples (validate=False)" in private.guarantee(1e-5).assumptions
    assert "proven provided that model and loss treat every example by itself" in str(private.guarantee(1e-5))


def test_attempts_are_looked_at_on_a_public_schedule() -> None:
    watch, seen = Watch(), []
    for _ in range(70):
        watch.begin()
        seen.append(watch.due)
    assert [i + 1 for i, due in enumerate(seen) if due] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("model", [around(nn.Dropout()), around(Experts(capacity=3))], ids=["healthy", "mixing"])
def test_looking_leaves_no_trace(model: nn.Module) -> None:
    x, y = vectors(RECORDS).tensors
    batch = Batch((x, y), RECORDS, lambda i: (x[[i]], y[[i]]))
    watch, before = Watch(), copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    watch.begin()
    watch.look(Objective(model, cross_entropy), list(model.parameters()), batch)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


class TwoRanks(Team):
    """Another process that found something or nothing, and could not check something."""

    def __init__(self, finding: Finding | None, unchecked: tuple[str, ...] = ()) -> None:
        self.theirs = finding, unchecked, ("assumed there",)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.theirs]


def test_what_one_process_finds_all_refuse() -> None:
    watch = Watch()
    watch.begin()
    ledger = Ledger.in_memory()
    with pytest.raises(UnsupportedModel, match="so that no guarantee says so"):
        watch.settle(TwoRanks(None), ledger)
    ledger.declare("assumption", "assumed there")
    watch.settle(TwoRanks(None, ("something",)), ledger)
    assert ledger.declared("condition") == ["something"], "the leader's ledger knows what another rank could not check"
    assert ledger.declared("assumption") == ["assumed there", IN_ANY_COMPANY]
    with pytest.raises(UnsupportedModel, match="theirs"):
        watch.settle(TwoRanks(Finding("mixing", "loss", "theirs")), Ledger.in_memory())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_a_bad_record_in_a_draw_is_no_objection(bad: float) -> None:
    data = vectors(RECORDS)
    data.tensors[0][::7] = bad
    train(around(nn.LayerNorm(8)), data)
    train(around(nn.Dropout()), data)


# What is random and yet private passes; what hides behind randomness does not.


def interleaved(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    views = x.repeat_interleave(4, dim=0) + 0.1 * torch.randn(4 * len(x), x.shape[1])
    return cross_entropy(model, (views, y.repeat_interleave(4))).view(len(x), 4).mean(1)


def tiled(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    views = x.repeat(4, 1) + 0.1 * torch.randn(4 * len(x), x.shape[1])
    return cross_entropy(model, (views, y.repeat(4))).view(4, len(x)).mean(0)


def jittered_by_python(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return cross_entropy(model, (torch.stack([row * (1 + 0.1 * random.random()) for row in x]), y))


RANDOM_LOSSES: dict[str, Callable[[], Any]] = {
    "interleaved views": lambda: interleaved,
    "tiled views": lambda: tiled,
    "by Python, one example after another": lambda: jittered_by_python,
    "mixed with noise by a Beta coin": lambda: (
        lambda m, b: cross_entropy(m, (b[0] * torch.distributions.Beta(0.4, 0.4).sample((len(b[0]), 1)), b[1]))
    ),
}


@pytest.mark.parametrize("name", RANDOM_LOSSES)
def test_a_random_loss_passes_and_hides_no_division(name: str) -> None:
    loss = RANDOM_LOSSES[name]()
    assert findings(around(nn.LayerNorm(8)), vectors(), loss) == []
    train(around(nn.LayerNorm(8)), loss=loss)
    found = kinds(around(nn.LayerNorm(8)), vectors(), lambda m, b: loss(m, b) / len(b[1]))
    assert found <= {"batch-size", "random"}
    assert found
    assert "mixing" in kinds(around(nn.LayerNorm(8)), vectors(), lambda m, b: loss(m, (b[0] - b[0].mean(0), b[1])))


class StochasticDepth(nn.Module):
    def __init__(self, inner: nn.Module, per_example: bool) -> None:
        super().__init__()
        self.inner, self.per_example = inner, per_example

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), 1) < 0.5 if self.per_example else torch.tensor(random.random() < 0.5)
        return x + self.inner(x) * keep


@pytest.mark.parametrize("per_example", [True, False])
def test_stochastic_depth_passes_and_hides_nothing(per_example: bool) -> None:
    train(around(StochasticDepth(nn.Linear(8, 8), per_example)))
    with pytest.raises(UnsupportedModel, match=r"Centred '1.inner' mixes examples"):
        train(around(StochasticDepth(Centred(), per_example)))


class NamedOutputs(nn.Module):
    """As Hugging Face models are called: by keywords, with a dict for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=~attention_mask)
        mean = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return {"logits": self.head(mean)}


def test_a_model_in_the_style_of_hugging_face_passes() -> None:
    def collate(records: list[Any]) -> dict[str, Tensor]:
        longest = max(int(y) for _, y in records) + 3
        ids = torch.stack([x[:longest] for x, _ in records])
        mask = torch.stack([torch.arange(longest) < int(y) + 3 for _, y in records])
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([y for _, y in records])}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return functional.cross_entropy(model(**inputs)["logits"], batch["labels"], reduction="none")

    torch.manual_seed(0)
    train(NamedOutputs(), tokens(RECORDS), loss, collate=collate)


def test_what_cannot_be_compared_is_refused_with_a_way_out() -> None:
    own = np.random.default_rng(0)

    def restless(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * float(own.random())

    def twice_by_python(model: nn.Module, batch: Any) -> Tensor:
        first, second = (torch.tensor([random.random() for _ in batch[1]]) for _ in range(2))
        return cross_entropy(model, batch) * first * second

    for loss in (restless, twice_by_python):
        (finding,) = findings(around(nn.LayerNorm(8)), vectors(), loss)
        assert finding.kind == "random"
        assert "validate=False" in finding.message


def test_a_dataset_that_answers_differently_for_several_records_at_once_is_refused() -> None:
    own = np.random.default_rng(0)

    class Several:
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> Any:
            return self.__getitems__([index])[0]

        def __getitems__(self, indices: list[int]) -> list[Any]:
            inner = vectors(RECORDS)
            return [(inner[i][0] * own.random(), inner[i][1]) for i in indices]

    with pytest.raises(UnsupportedModel, match="other values for the same records"):
        train(around(nn.LayerNorm(8)), Several())
    train(around(nn.LayerNorm(8)), torch.utils.data.Subset(vectors(2 * RECORDS), range(RECORDS)))


@pytest.mark.parametrize(
    ("coin", "said"),
    [
        (lambda x: x * (torch.rand(()) < 0.9), True),
        (lambda x: x * (random.random() < 0.9), True),
        (lambda x: functional.dropout(x, 0.1), False),
        (lambda x: x, False),
    ],
    ids=["of torch", "of Python", "of each record", "none"],
)
def test_a_guarantee_says_what_a_coin_of_a_whole_pass_rests_on(coin: Callable[[Tensor], Tensor], said: bool) -> None:
    """One record more moves others across a microbatch's edge, to another coin: their gradients then change, too."""
    private = bound(around(nn.Identity()), lambda model, batch: cross_entropy(lambda x: coin(model(x)), batch), steps=1)
    private.step()
    assert (ONE_COIN in private.guarantee().assumptions) is said
