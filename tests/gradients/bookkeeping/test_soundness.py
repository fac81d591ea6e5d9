"""What a hostile review broke: no example may contribute more than the clipping norm, whatever the model does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from sordino.gradients.looped import Looped
from sordino.gradients.rules.base import squares
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.oracle import assert_matches, batch_of, check, singles, squared

Loss = Callable[[nn.Module, Any], Tensor]


def classified(model: nn.Module, data: Any) -> Tensor:
    return F.cross_entropy(model(*data[:-1]), data[-1], reduction="none")


def agree(model: nn.Module, batches: list[Any], loss: Loss = classified) -> BookKeeping:
    """One engine sees all the batches, as in training, and is right about each."""
    engine = BookKeeping()
    objective, parameters = Objective(model, loss), list(model.parameters())
    for data in batches:
        batch = batch_of(data, len(data[0]))
        mine, wanted = (each.differentiate(objective, parameters, batch) for each in (engine, Looped()))
        torch.testing.assert_close(mine.norms, wanted.norms)
        weights = torch.linspace(0.3, 1.7, batch.size, dtype=mine.norms.dtype)
        torch.testing.assert_close(list(mine.weighted_sum(weights)), list(wanted.weighted_sum(weights)))
    return engine


def largest_contribution(model: nn.Module, loss: Loss, data: Any) -> float:
    """The longest ``weight_i * gradient_i`` as it enters the sum, with weights that clip to 1."""
    size = len(data[0])
    found = BookKeeping().differentiate(Objective(model, loss), list(model.parameters()), batch_of(data, size))
    weights = 1 / found.norms.clamp_min(1)
    rows = [found.weighted_sum(weights * one) for one in torch.eye(size)]
    return max(float(torch.cat([g.double().flatten() for g in row]).norm()) for row in rows)


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def labels(size: int) -> Tensor:
    return torch.randint(3, (size,))


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps: Tensor = self.layer(x.transpose(0, 1))
        return self.head(steps[-1])  # type: ignore[no-any-return]  # modules return Any


@pytest.mark.parametrize("sizes", [(2, 6, 3, 2), (6, 2, 5), (3, 6)])
def test_sequence_first_with_few_examples(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    agree(LastStep().double(), [(doubles(size, 6, 8), labels(size)) for size in sizes])


def test_order_by_data() -> None:
    """The first batch happens to be sorted already."""

    def forward(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.b(torch.tanh(m.a(x[order]))[order.argsort()])

    torch.manual_seed(0)
    already = doubles(6, 4)
    already[:, 0] = torch.arange(6)
    model = Apply(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
    agree(model, [(already, labels(6)), (doubles(6, 4), labels(6)), (doubles(7, 4), labels(7))])


def test_order_by_a_product() -> None:
    """A permutation of activations by a matrix that the data chose, and back; the first batch happens to be sorted."""

    def forward(m: Any, x: Tensor) -> Tensor:
        order = (x[:, 0].unsqueeze(0) < x[:, 0].unsqueeze(1)).sum(1)
        matrix = (order.unsqueeze(0) == torch.arange(len(x)).unsqueeze(1)).to(x.dtype)
        return m.c(matrix.T @ torch.tanh(m.b(matrix @ m.a(x))))

    torch.manual_seed(0)
    already = doubles(6, 4)
    already[:, 0] = torch.arange(6)
    model = Apply(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3)).double()
    agree(model, [(already, labels(6)), (already, labels(6)), (doubles(6, 4), labels(6)), (doubles(7, 4), labels(7))])


def test_order_by_python() -> None:
    """An order that only numbers carry: every operation has the same name in both batches."""

    def forward(m: Any, x: Tensor) -> Tensor:
        order = sorted(range(len(x)), key=lambda i: float(x[i, 0]))
        back = sorted(range(len(x)), key=order.__getitem__)
        hidden = m.a(torch.stack([x[i] for i in order]))
        return torch.stack([hidden[i] for i in back])

    torch.manual_seed(0)
    already = doubles(4, 4)
    already[:, 0] = torch.arange(4)
    agree(Apply(forward, a=nn.Linear(4, 3)).double(), [(already, labels(4)), (doubles(4, 4), labels(4))])


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
        last: Tensor = self.rnn(packed)[1][0][-1]
        return self.head(last[order.argsort()])  # type: ignore[no-any-return]  # modules return Any


def test_sequences_sorted_by_the_user() -> None:
    torch.manual_seed(0)
    lengths = ([6, 5, 3, 2], [2, 3, 6, 4], [2, 3, 6, 4, 1])
    agree(Sorting().double(), [(doubles(len(n), 6, 3), torch.tensor(n), labels(len(n))) for n in lengths])


def test_ragged_tokens() -> None:
    """Equal lengths first; afterwards the number of tokens is a multiple of the batch by accident."""

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            kept = torch.tanh(self.a(x[mask]))
            owners = mask.nonzero()[:, 0]
            pooled = torch.zeros(len(x), 6, dtype=x.dtype).index_add(0, owners, kept)
            return self.b(pooled)  # type: ignore[no-any-return]  # modules return Any

    torch.manual_seed(0)
    masks = [torch.arange(6) < torch.tensor(n).unsqueeze(1) for n in ([3, 3, 3, 3], [1, 5, 2, 4], [6, 1, 2])]
    agree(Ragged().double(), [(doubles(len(mask), 6, 4), mask, labels(len(mask))) for mask in masks])


def test_experts_with_one_token_or_none(caplog: pytest.LogCaptureFixture) -> None:
    """Which tokens an expert sees is for the data to say; a batch that leaves one nearly idle refuses no model."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.first(x))
        shares, chosen = hidden[:, :3].softmax(1).topk(1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate((m.a, m.b, m.c)):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, rows, torch.tanh(expert(hidden[rows])) * shares[rows, place, None])
        return result  # type: ignore[no-any-return]  # the loss of anything is a tensor

    torch.manual_seed(0)
    model = Apply(forward, first=nn.Linear(3, 5), a=nn.Linear(5, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 5)).double()
    model.first.weight.data[:3] = 9 * torch.eye(3)
    batches = [
        (torch.eye(3, dtype=torch.float64)[torch.tensor(numbers)], labels(len(numbers)))
        for numbers in ([0, 1, 1, 0, 2], [1, 1, 1, 0], [2, 2])
    ]
    agree(model, batches)
    assert "cannot run this model" not in caplog.text


def test_a_constant_that_was_spread_over_the_examples() -> None:
    """Positions [time, examples, n] times a weight are a use of it, and not one large tensor made from it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        positions = torch.arange(12.0).reshape(4, 1, 3).expand(-1, len(x), -1)
        return m.head(torch.tanh(m.other(positions) + m.first(x).transpose(0, 1)).sum(0))

    torch.manual_seed(0)
    model = Apply(forward, first=nn.Linear(3, 5), other=nn.Linear(3, 5), head=nn.Linear(5, 3))
    batches = [(torch.randn(size, 4, 3), labels(size)) for size in (5, 4, 5)]  # 4: as many as there are steps
    engine = agree(model, batches)
    batch = batch_of(batches[0], 5)
    rows = engine.describe(Objective(model, classified), list(model.parameters()), batch)
    assert [row.parameter for row in rows if row.operation == "linear"].count("other.weight") == 1


def test_a_prompt_that_a_network_makes(caplog: pytest.LogCaptureFixture) -> None:
    """P-tuning: the network's input belongs to nobody, and is no buffer of the model."""

    def forward(m: Any, x: Tensor) -> Tensor:
        prompt = m.second(torch.tanh(m.first(given)))
        hidden = torch.cat([prompt.repeat(len(x), 1, 1), m.body(x)], 1)
        return m.head(torch.tanh(hidden).mean(1))

    torch.manual_seed(0)
    given = torch.randn(2, 5)
    layers = {"first": nn.Linear(5, 6), "second": nn.Linear(6, 7), "body": nn.Linear(3, 7), "head": nn.Linear(7, 3)}
    model = Apply(forward, **layers)
    agree(model, [(torch.randn(size, 4, 3), labels(size)) for size in (5, 3, 2)])
    assert "cannot run this model" not in caplog.text


def test_examples_without_gradients_prove_nothing() -> None:
    """Time first and folded, with a loss that is flat for the examples in the middle and at the end."""

    def forward(m: Any, x: Tensor) -> Tensor:
        size, time, _ = x.shape
        return m.b(torch.tanh(m.a(x.transpose(0, 1).reshape(-1, 4)))).reshape(time, size).sum(0)

    def hinge(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return torch.relu(1 - data[1] * model(data[0]))

    torch.manual_seed(0)
    model, x = Apply(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 1)).double(), doubles(6, 3, 4)
    signs = -model(x).detach().sign()
    signs[[3, 5]] *= -1e4
    agree(model, [(x, signs), (doubles(6, 3, 4), doubles(6)), (doubles(6, 3, 4), doubles(6))], hinge)


def test_a_bad_example_that_spoils_a_number_without_a_gradient_stays_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What is finite mixes nothing, as 0 · x is 0: no probe sees it. One NaN made all contributions vanish."""
    torch.manual_seed(0)
    model = Apply(lambda m, x: m.l(x + 0 * x.sum(0)), l=nn.Linear(3, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    batch = batch_of(x, 5)
    check(BookKeeping(), model, x, 5)
    x[2] = float("nan")
    found = BookKeeping().differentiate(Objective(model, squared), list(model.parameters()), batch)
    wanted = torch.stack([torch.cat([g.flatten() for g in each]).norm() for each in singles(model, squared, batch)])
    assert torch.isfinite(found.norms).tolist() == [True, True, False, True, True]
    torch.testing.assert_close(found.norms, wanted, equal_nan=True)
    assert not caplog.records, "a line would tell that such a record was drawn"


def test_mixed_examples_are_never_taken_for_their_own() -> None:
    """Each loss also sees its neighbour; book-keeping must refuse, and not by chance of which examples it looked at."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.a(torch.tanh(m.a(x)))
        return hidden + 1e-3 * torch.cat([hidden[:1], hidden[:-1]])

    torch.manual_seed(0)
    model = Apply(forward, a=nn.Linear(4, 4))
    engine, data = BookKeeping(), (torch.randn(40, 4), labels(40))
    objective = Objective(model, classified)
    engine.differentiate(objective, list(model.parameters()), batch_of(data, 40))
    assert engine._knowledge[objective].refused


@pytest.mark.parametrize("size", [33, 64])
def test_ordinary_models_are_proven_once(size: int) -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 3)),
        Apply(
            lambda m, x: m.h(m.r(x.unflatten(1, (4, 4)))[0][:, -1]),
            r=nn.LSTM(4, 5, batch_first=True),
            h=nn.Linear(5, 3),
        ),
        Apply(
            lambda m, x: m.h(m.t(x.unflatten(1, (4, 4))).mean(1)),
            t=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            h=nn.Linear(4, 3),
        ),
    ]
    for model in models:
        engine, objective = BookKeeping(), Objective(model, classified)
        for count in (size, size, size - 2, size):
            batch = batch_of((torch.randn(count, 16), labels(count)), count)
            engine.differentiate(objective, list(model.parameters()), batch)
        knowledge = engine._knowledge[objective]
        assert not knowledge.refused
        assert len(knowledge.proven) <= 2


def test_opposite_uses_of_one_weight() -> None:
    """A siamese network on nearby points far from the origin: the gradients of its two uses cancel."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    far = 1e5 * torch.randn(16, 16)
    pair = (far, far + torch.randn(16, 16))
    assert largest_contribution(model, lambda m, d: 50 * (m(d[0]) - m(d[1])).sum(1), pair) <= 1.00001


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e5])
def test_tied_uses_that_cancel(scale: float) -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: x, e=(50, 32))

    def loss(m: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        tokens, x = data
        looked = (F.embedding(tokens, m.e) * x.unsqueeze(1)).sum((1, 2))
        return 3e4 * (looked - F.linear(x + 0.01, m.e).gather(1, tokens).sum(1))

    data = (torch.randint(50, (16, 1)), scale * torch.randn(16, 32))
    assert largest_contribution(model, loss, data) <= 1.00001


@pytest.mark.parametrize("offset", [3e2, 1e4, 1e5])
def test_rows_that_cancel(offset: float) -> None:
    """Softmax over time: the rows' gradients add up to zero, their inputs are nearly equal."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    x = offset * torch.randn(16, 1, 16) + torch.randn(16, 4, 16)
    target = torch.zeros(16, dtype=torch.long)
    loss = lambda m, d: F.cross_entropy(10 * m(d[0]).sum(2), d[1], reduction="none")  # noqa: E731
    assert largest_contribution(model, loss, (x, target)) <= 1.00001


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("length", [10**3, 10**6])
def test_sums_of_squares_do_not_drift(length: int, value: float) -> None:
    rows = torch.full((1, length), value)
    torch.testing.assert_close(squares(rows).double(), rows.double().square().sum(1), rtol=1e-6, atol=0)


def test_a_plain_norm_would_drift() -> None:
    rows = torch.full((1, 10**6), 0.3)
    naive = torch.linalg.vector_norm(rows, dim=1).square().double()
    assert not torch.allclose(naive, rows.double().square().sum(1), rtol=1e-6)


class Masked(nn.Linear):
    """In a batch of as many examples as it has outputs, the rows of its mask look like one for each example."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(1, self.in_features).expand_as(self.weight) * self.weight)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_batch_whose_size_hides_its_examples_is_not_logged(recorded: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The line would tell, by its place among the others, which draw had that size."""
    caplog.set_level(logging.DEBUG)
    torch.manual_seed(0)
    engine, model, x = BookKeeping(), Masked(4, 5), torch.randn(7, 4)
    objective, parameters = Objective(model, squared), list(model.parameters())
    kinds = []
    for size in (7, 5, 6):
        batch = batch_of(x[:size], size)
        if recorded and kinds:
            with engine.record(objective, parameters, batch) as recorder:
                losses = squared(model, batch.data)
            found: Any = recorder.differentiate(losses)
        else:
            found = engine.differentiate(objective, parameters, batch)
        assert_matches(found, singles(model, squared, batch), 1e-4)
        kinds.append(type(found).__name__)
    assert kinds[0] == kinds[2] == "Book"
    assert kinds[1] != "Book"
    assert caplog.text == ""


def test_messages_do_not_tell_the_size_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    caplog.set_level(logging.DEBUG)
    mixing = Apply(lambda m, x: m.a(x) + m.a(x).cumsum(0)[: len(x)].flip(0), a=nn.Linear(4, 3))
    ragged = Apply(lambda m, x: m.a(x[x[:, 0] > -9].repeat(2, 1))[: len(x)], a=nn.Linear(4, 3))
    for model in (mixing, ragged):
        data = (torch.randn(47, 4), labels(47))
        BookKeeping().differentiate(Objective(model, classified), list(model.parameters()), batch_of(data, 47))
    assert caplog.records
    assert all("47" not in record.message and "94" not in record.message for record in caplog.records)


def test_gradient_penalty_keeps_its_second_derivatives() -> None:
    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().sum(1) + y.sum(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    check(BookKeeping(), model, torch.randn(5, 4), 5, penalised)
    x = torch.randn(5, 4)
    recorder = BookKeeping().record(Objective(model, penalised), list(model.parameters()), batch_of(x, 5))
    with recorder, pytest.raises(UnsupportedModel, match="differentiates"):
        penalised(model, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.t(), x.t() @ gradients[0]


def test_custom_function_of_a_derived_tensor() -> None:
    torch.manual_seed(0)
    model = Apply(lambda m, x: Product.apply(torch.tanh(m.a(x)), m.w.t()), a=nn.Linear(4, 6), w=(3, 6))
    check(BookKeeping(), model, torch.randn(5, 4), 5)
    data = (torch.randn(5, 4), labels(5))
    recorder = BookKeeping().record(Objective(model, classified), list(model.parameters()), batch_of(data, 5))
    with recorder:
        losses = classified(model, data)
    with pytest.raises(UnsupportedModel, match="custom function"):
        recorder.differentiate(losses)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_batch_statistics_are_refused_in_one_line(affine: bool, trained: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, 3))
    model[1].requires_grad_(trained)
    before = model[1].running_mean.clone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    data = (torch.randn(5, 4), labels(5))
    with pytest.raises(UnsupportedModel, match="batch_norm"):
        BookKeeping().differentiate(Objective(model, classified), parameters, batch_of(data, 5))
    recorder = BookKeeping().record(Objective(model, classified), parameters, batch_of(data, 5))
    with recorder, pytest.raises(UnsupportedModel):
        classified(model, data)
    assert torch.equal(before, model[1].running_mean)


def test_frozen_layers_that_remember_records_are_refused() -> None:
    table = nn.Embedding(7, 4, max_norm=1.0).requires_grad_(False)
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    looked = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 3))
    normalised = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 3))
    for model, data, word in (
        (looked, torch.randint(7, (5, 3)), "max_norm"),
        (normalised, torch.randn(5, 3, 4), "running"),
    ):
        before = [tensor.clone() for tensor in (table.weight, norm.running_mean)]
        parameters = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(UnsupportedModel, match=word):
            BookKeeping().differentiate(Objective(model, classified), parameters, batch_of((data, labels(5)), 5))
        assert torch.equal(before[0], table.weight)
        assert torch.equal(before[1], norm.running_mean)


def centre(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0)


class Centred(torch.autograd.Function):
    """Nothing forwards, but backwards every example gets something from all others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dirty: bool) -> Tensor:
        if dirty:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return centre(gradients[0]), None


def by_hook(h: Tensor) -> Tensor:
    h.register_hook(centre)
    return h


def by_node(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (centre(gradients[0]),))
    return h


def by_module(h: Tensor) -> Tensor:
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda module, gradients, _: (centre(gradients[0]),))
    found: Tensor = layer(h)
    return found


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "hook": by_hook,
    "node": by_node,
    "module": by_module,
    "function": lambda h: Centred.apply(h, False),
    "function in place": lambda h: Centred.apply(h, True),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_gradients_mixed_on_their_way_back_are_not_followed(mix: Callable[[Tensor], Tensor]) -> None:
    """Following the examples forwards must not hide what happens backwards: gradients have to prove the places."""
    torch.manual_seed(0)
    forward = lambda m, x: m.c(torch.tanh(mix(m.b(torch.tanh(m.a(x))) * 1)))  # noqa: E731
    model = Apply(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))
    objective, parameters = Objective(model, classified), list(model.parameters())
    engine, data = BookKeeping(), (20 * torch.randn(5, 4), labels(5))
    engine.differentiate(objective, parameters, batch_of(data, 5))
    (knowledge,) = engine._knowledge.values()
    assert knowledge.refused
    assert largest_contribution(model, classified, data) <= 1 + 1e-5


def halve_slice(h: Tensor) -> Tensor:
    h[..., :2].mul_(0.5)
    return h


def halve_shape(h: Tensor) -> Tensor:
    return h.view(len(h), -1, 2).mul_(0.5).view(h.shape)


def zero_column(h: Tensor) -> Tensor:
    h[..., 0] = 0.0
    return h


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda h: F.relu(h, inplace=True),
    "div": lambda h: h.div_(2),
    "mask": lambda h: h.masked_fill_(h.detach() > 0.3, 0.0),
    "slice": halve_slice,
    "view": halve_shape,
    "setitem": zero_column,
}


class ChangedInPlace(nn.Module):
    """A layer of three dimensions, whose output is a view in torch, changed in place afterwards."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(12, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.change(self.second(self.first(x).tanh()))
        return self.head(hidden.flatten(1))  # type: ignore[no-any-return]  # modules return Any


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_layer_whose_output_is_a_view_changed_in_place_keeps_its_gradient(change: str) -> None:
    """Hooks of such a view are never called: the layer was trained by noise alone, and nobody said so."""
    torch.manual_seed(3)
    agree(ChangedInPlace(IN_PLACE[change]).double(), [(doubles(size, 3, 4), labels(size)) for size in (5, 3, 1)])
