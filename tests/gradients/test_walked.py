"""What people write that nobody here wrote: each trains through `Private`, as a plain loop over records would.

Every step takes all records with next to no noise, so that what moves the parameters is the clipped sum.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from sordino import Private, UnsupportedModel, recipes

N, T, D, CLASSES, WORDS, LR = 5, 4, 6, 3, 9, 0.1

Data = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Any], Tensor]


class Model(nn.Module):
    """Layers and parameters by name, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(D, CLASSES)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(part) / 2) if isinstance(part, tuple) else part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def classify(model: nn.Module, data: Any) -> Tensor:
    *inputs, labels = data
    return F.cross_entropy(model(*inputs), labels, reduction="none")


def labelled(*inputs: Tensor) -> Data:
    return *inputs, torch.arange(N) % CLASSES


def rows() -> Data:
    return labelled(torch.randn(N, D, dtype=torch.float64))


def sequences() -> Data:
    return labelled(torch.randn(N, T, D, dtype=torch.float64))


def images() -> Data:
    return labelled(torch.randn(N, 3, 6, 6, dtype=torch.float64))


def texts() -> Data:
    lengths = 1 + torch.arange(N) % T
    return labelled(torch.randint(1, WORDS, (N, T)) * (torch.arange(T) < lengths.unsqueeze(1)))


def graphs() -> Data:
    return labelled(torch.randn(N, T, D, dtype=torch.float64), torch.randint(T, (N, 2, 8)))


def hidden(change: Callable[[Any, Tensor], Tensor], **parts: Any) -> Callable[[], nn.Module]:
    """A change between two linear layers."""
    return lambda: Model(lambda m, x: m.head(change(m, m.body(x))), body=nn.Linear(D, D), **parts)


def number(change: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return hidden(change, s=nn.Parameter(torch.tensor(0.4)))


def layers(wrap: Callable[[nn.Linear], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(D, D)), nn.Tanh(), wrap(nn.Linear(D, CLASSES)))


def prune_some(layer: nn.Linear) -> nn.Module:
    pruned: nn.Module = prune.l1_unstructured(layer, "weight", 0.4)  # type: ignore[no-untyped-call]
    return pruned


def weight_norm_of_old(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normed: nn.Module = nn.utils.weight_norm(layer)
    return normed


class Standardised(nn.Conv2d):
    """As in networks without normalisation of activations: batch_norm, of the weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, self.gain * 0.3, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


def graph(m: Any, x: Tensor, edges: Tensor, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Messages along edges between the nodes of all graphs, which lie one after the other."""
    first = T * torch.arange(len(x)).unsqueeze(1)
    sources, targets = ((edges[:, end] + first).flatten() for end in (0, 1))
    nodes = x.flatten(0, 1)
    sums = add(torch.zeros_like(nodes), targets, m.body(nodes)[sources] * m.p)
    return m.head(sums.tanh().unflatten(0, (len(x), T)).mean(1))


def attend(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    first = T * torch.arange(len(x)).unsqueeze(1)
    sources, targets = ((edges[:, end] + first).flatten() for end in (0, 1))
    nodes = m.body(x.flatten(0, 1))
    scores = F.leaky_relu(nodes[sources] @ m.p + nodes[targets] @ m.q).exp()
    totals = torch.zeros(len(nodes), dtype=x.dtype).scatter_add(0, targets, scores)
    messages = nodes[sources] * (scores / totals[targets]).unsqueeze(1)
    sums = torch.zeros_like(nodes).index_add(0, targets, messages)
    return m.head(sums.unflatten(0, (len(x), T)).mean(1))


def route(m: Any, x: Tensor) -> Tensor:
    """Each token to the two best of its experts."""
    tokens = x.flatten(0, 1)
    shares, chosen = m.gate(tokens).softmax(-1).topk(2, -1)
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        token, place = torch.where(chosen == number)
        out.index_add_(0, token, expert(tokens[token]) * shares[token, place, None])
    return m.head(out.unflatten(0, (len(x), T)).mean(1))


def pick_experts(m: Any, x: Tensor) -> Tensor:
    shares = m.gate(x).softmax(1)
    return m.head(sum((x @ m.w[e]) * shares[:, e : e + 1] for e in torch.arange(3)))


def without_padding(m: Any, x: Tensor) -> Tensor:
    known = x != 0
    out = torch.zeros(*x.shape, D, dtype=m.head.weight.dtype)
    out[known] = m.body(m.table(x)[known]).tanh()
    return m.head(out.sum(1))


def write_slices(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    h[:, 0] += m.p
    h[:, 1:] *= m.q
    return m.head(h.mean(1))


def halve_made(m: Any, x: Tensor) -> Tensor:
    """As DeBERTa does to what it makes of its table of positions."""
    made = m.body(m.w)
    made.t().div_(2.0)
    made[0] *= 3.0
    return m.head(x @ made)


def halve_used(m: Any, x: Tensor) -> Tensor:
    made = m.body(m.w)
    before = x @ made
    made.t().div_(2.0)
    return m.head(before + x @ made)


def read_packed(m: Any, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.table(x), (x != 0).sum(1), batch_first=True, enforce_sorted=False)
    last = m.rnn(packed)[1]
    return m.head(torch.cat([*(last[0] if isinstance(last, tuple) else last)], 1))


def factorise(m: Any, x: Tensor) -> Tensor:
    factors = m.table(x)
    pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2
    return m.head(factors.mean(1)) + pairs + m.slope(x).sum(1) + m.p[0]


def arc_face(model: Any, data: Any) -> Tensor:
    x, labels = data
    cosine = F.linear(F.normalize(model(x)), F.normalize(model.w)).clamp(-0.99, 0.99)
    moved = torch.cos(torch.acos(cosine) + 0.3)
    return F.cross_entropy(8 * torch.where(F.one_hot(labels, CLASSES) > 0, moved, cosine), labels, reduction="none")


def penalised(penalty: Callable[[nn.Module], Tensor]) -> Loss:
    return lambda model, data: classify(model, data) + 0.01 * penalty(model)


def two_tasks(model: Any, data: Any) -> Tensor:
    second = model(data[0]).square().mean(1)
    return (-model.p[0]).exp() * classify(model, data) + (-model.p[1]).exp() * second + model.p.sum()


def penalise_slope(model: nn.Module, data: Any) -> Tensor:
    x = data[0].detach().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.cross_entropy(scores, data[1], reduction="none") + slope.flatten(1).square().sum(1)


class Sign(torch.autograd.Function):
    """A weight of one bit, with the gradient of the weight itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Product(torch.autograd.Function):
    """A linear layer by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


def table(**parts: Any) -> dict[str, Any]:
    return {"table": nn.Embedding(WORDS, D), **parts}


def class_token(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.places)[:, 0])


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)


Build = Callable[[], nn.Module]

KEPT: dict[str, tuple[Build, Callable[[], Data], Loss]] = {
    "class token by expand": (
        lambda: Model(class_token, token=(1, 1, D), places=(T + 1, D), body=encoder()),
        sequences,
        classify,
    ),
    "standardised convolution": (
        lambda: nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)),
        images,
        classify,
    ),
    "masked_fill by a number": (number(lambda m, x: x.masked_fill(x > 0.3, m.s)), rows, classify),
    "where with a number": (number(lambda m, x: torch.where(x > 0.3, m.s, x)), rows, classify),
    "power of a number": (number(lambda m, x: (x.abs() + 1).pow(m.s)), rows, classify),
    "clamp by a number": (number(lambda m, x: torch.clamp(x, min=m.s)), rows, classify),
    "lerp by a number": (number(lambda m, x: torch.lerp(x, x.square(), m.s)), rows, classify),
    "scale on folded rows": (
        hidden(lambda m, x: (x.reshape(-1, D) * m.p).reshape(x.shape).mean(1), p=(D,)),
        sequences,
        classify,
    ),
    "graph, index_add": (
        lambda: Model(
            lambda m, x, e: graph(m, x, e, lambda to, at, h: to.index_add(0, at, h)), body=nn.Linear(D, D), p=(D,)
        ),
        graphs,
        classify,
    ),
    "graph, scatter_add_": (
        lambda: Model(
            lambda m, x, e: graph(m, x, e, lambda to, at, h: to.scatter_add_(0, at[:, None].expand_as(h), h)),
            body=nn.Linear(D, D),
            p=(D,),
        ),
        graphs,
        classify,
    ),
    "graph attention": (lambda: Model(attend, body=nn.Linear(D, D), p=(D,), q=(D,)), graphs, classify),
    "experts by a number of a tensor": (lambda: Model(pick_experts, w=(3, D, D), gate=nn.Linear(D, 3)), rows, classify),
    "experts by routing": (
        lambda: Model(route, gate=nn.Linear(D, 3), experts=nn.ModuleList(nn.Linear(D, D) for _ in range(3))),
        sequences,
        classify,
    ),
    "in place by a parameter": (hidden(lambda m, x: x.mul_(m.p).add_(m.q).tanh_(), p=(D,), q=(D,)), rows, classify),
    "slices in place": (lambda: Model(write_slices, body=nn.Linear(D, D), p=(D,), q=(D,)), sequences, classify),
    "in place on what was made": (lambda: Model(halve_made, body=nn.Linear(D, D), w=(D, D)), rows, classify),
    "pruned": (layers(prune_some), rows, classify),
    "weight_norm": (layers(parametrizations.weight_norm), rows, classify),
    "weight_norm of the whole": (layers(lambda layer: parametrizations.weight_norm(layer, dim=None)), rows, classify),
    "weight_norm by columns": (layers(lambda layer: parametrizations.weight_norm(layer, dim=1)), rows, classify),
    "weight_norm as of old": (layers(weight_norm_of_old), rows, classify),
    "spectral_norm": (layers(parametrizations.spectral_norm), rows, classify),
    "orthogonal": (layers(parametrizations.orthogonal), rows, classify),
    "penalty of squares": (
        layers(lambda layer: layer),
        rows,
        penalised(lambda m: sum(p.square().sum() for p in m.parameters())),
    ),
    "penalty of lengths": (
        layers(lambda layer: layer),
        rows,
        penalised(lambda m: sum(p.norm() for p in m.parameters())),
    ),
    "penalty of all at once": (
        layers(lambda layer: layer),
        rows,
        penalised(lambda m: torch.cat([p.flatten() for p in m.parameters()]).abs().sum()),
    ),
    "learned weights of tasks": (hidden(lambda m, x: x.tanh(), p=(2,)), rows, two_tasks),
    "bilinear": (hidden(lambda m, x: m.pair(x, x.tanh()), pair=nn.Bilinear(D, D, D)), rows, classify),
    "cosine head": (
        lambda: Model(
            lambda m, x: F.linear(F.normalize(m.body(x)), F.normalize(m.w)), body=nn.Linear(D, D), w=(CLASSES, D)
        ),
        rows,
        classify,
    ),
    "cosine_similarity head": (
        lambda: Model(
            lambda m, x: F.cosine_similarity(m.body(x)[:, None], m.w[None], -1), body=nn.Linear(D, D), w=(CLASSES, D)
        ),
        rows,
        classify,
    ),
    "ArcFace": (lambda: Model(lambda m, x: m.body(x), body=nn.Linear(D, D), w=(CLASSES, D)), rows, arc_face),
    "hypernetwork that all share": (
        hidden(lambda m, x: F.linear(x, m.made(m.z).unflatten(0, (D, D))), z=(2,), made=nn.Linear(2, D * D)),
        rows,
        classify,
    ),
    "tokens without padding": (lambda: Model(without_padding, **table(body=nn.Linear(D, D))), texts, classify),
    "a function of a weight": (
        lambda: Model(lambda m, x: m.head(F.linear(x, Sign.apply(m.w)).tanh()), w=(D, D)),
        rows,
        classify,
    ),
    "a function of weight and data": (
        lambda: Model(lambda m, x: m.head(Product.apply(x, m.w).tanh()), w=(D, D)),
        rows,
        classify,
    ),
    "bmm, heads first": (
        lambda: Model(
            lambda m, x: m.head(
                torch.bmm(x.reshape(-1, 2, D // 2).transpose(0, 1), m.w).transpose(0, 1).reshape(x.shape).mean(1)
            ),
            w=(2, D // 2, D // 2),
        ),
        sequences,
        classify,
    ),
    "einsum, examples second": (
        lambda: Model(
            lambda m, x: m.head(torch.einsum("ibh,hnd->ibnd", x.transpose(0, 1), m.w).flatten(2).mean(0)),
            w=(D, 2, D // 2),
        ),
        sequences,
        classify,
    ),
    "einsum of experts": (
        lambda: Model(
            lambda m, x: m.head(torch.einsum("bte,btd,edk->btk", x[..., :2].softmax(-1), x, m.w).mean(1)), w=(2, D, D)
        ),
        sequences,
        classify,
    ),
    "checkpoint": (
        lambda: Model(lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False).mean(1)), body=encoder()),
        sequences,
        classify,
    ),
    "packed LSTM of two directions": (
        lambda: Model(read_packed, **table(rnn=nn.LSTM(D, D // 2, bidirectional=True, batch_first=True))),
        texts,
        classify,
    ),
    "packed GRU of two directions": (
        lambda: Model(read_packed, **table(rnn=nn.GRU(D, D // 2, bidirectional=True, batch_first=True))),
        texts,
        classify,
    ),
    "bags of words": (
        lambda: Model(lambda m, x: m.head(m.table(x)), table=nn.EmbeddingBag(WORDS, D, padding_idx=0)),
        texts,
        classify,
    ),
    "largest of bags": (
        lambda: Model(lambda m, x: m.head(m.table(x)), table=nn.EmbeddingBag(WORDS, D, mode="max")),
        texts,
        classify,
    ),
    "factorisation machine": (lambda: Model(factorise, **table(slope=nn.Embedding(WORDS, 1), p=(1,))), texts, classify),
}

GIVEN_UP: dict[str, tuple[Build, Callable[[], Data], Loss]] = {
    "in place on what was used": (lambda: Model(halve_used, body=nn.Linear(D, D), w=(D, D)), rows, classify),
    "gradients by inputs of a recurrent layer": (
        lambda: Model(lambda m, x: m.head(m.rnn(x)[0].mean(1)), rnn=nn.LSTM(D, D, batch_first=True)),
        sequences,
        penalise_slope,
    ),
    "compiled by torch.jit": (
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh())), nn.Linear(D, CLASSES)),
        rows,
        classify,
    ),
}
"""These are differentiated by vmap or a loop."""


def sum_clipped(model: nn.Module, loss: Loss, data: Data, clip: float) -> tuple[list[Tensor], Tensor]:
    """The sum of the records' gradients, each clipped, by a plain loop; and their lengths."""
    parameters, each = list(model.parameters()), []
    for i in range(N):
        losses = loss(model, tuple(x[i : i + 1] for x in data))
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        each.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    lengths = torch.stack([torch.cat([g.flatten() for g in gradients]).norm() for gradients in each])
    shares = (clip / lengths).clamp(max=1)
    return [sum(s * g for s, g in zip(shares, column, strict=True)) for column in zip(*each, strict=True)], lengths


def bind(case: tuple[Build, Callable[[], Data], Loss]) -> tuple[nn.Module, Data, Loss, Private]:
    """A run that takes all records in each of its two steps and clips most of them."""
    torch.manual_seed(0)
    build, draw, loss = case
    model, data = build().double().eval(), draw()
    clip = 0.9 * float(sum_clipped(model, loss, data, 1.0)[1].median())
    recipe = recipes.dpsgd(clip=clip, batch_size=N, steps=2, noise_multiplier=1e-9).for_records(N)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return model, data, loss, Private(model, optimizer, TensorDataset(*data), loss, recipe)


def assert_trains(case: tuple[Build, Callable[[], Data], Loss], way: str) -> None:
    model, data, loss, private = bind(case)
    optimizer, clip = private.bench.optimizer, float(private.bench.recipe.clip)
    batches = iter(private.loader()) if way == "loader" else None
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        wanted, _ = sum_clipped(model, loss, data, clip)
        if batches is None:
            private.step()
        else:
            batch = next(batches)
            private.backward(loss(model, batch))
            optimizer.step()
        for parameter, old, total in zip(model.parameters(), before, wanted, strict=True):
            torch.testing.assert_close((old - parameter.detach()) * N / LR, total, rtol=1e-4, atol=1e-4 * clip)


@pytest.mark.parametrize("way", ["steps", "loader"])
@pytest.mark.parametrize("name", KEPT)
def test_sums_what_a_loop_over_records_sums(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sordino")
    assert_trains(KEPT[name], way)
    if way == "steps":
        assert "cannot run this model" not in caplog.text


SLOPES: tuple[Build, Callable[[], Data], Loss] = (layers(lambda layer: layer), rows, penalise_slope)


def test_gradients_inside_of_the_loss_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    assert_trains(SLOPES, "steps")
    assert "cannot run this model" not in caplog.text


@pytest.mark.parametrize("name", GIVEN_UP)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_that_is_given_up_is_right_all_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_trains(GIVEN_UP[name], "steps")
    assert "cannot run this model" in caplog.text


def write_into_made(m: Any, x: Tensor) -> Tensor:
    made = m.w.clone()
    made.mul_(m.p)
    return m.head(x @ made)


REFUSED: dict[str, tuple[tuple[Build, Callable[[], Data], Loss], str]] = {
    "gradients inside of the loss": (SLOPES, "engine='loop'"),
    "parameters written into what others made": (
        (lambda: Model(write_into_made, w=(D, D), p=(D,)), rows, classify),
        "without in-place changes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loop_cannot_record_is_refused_before_anything_is_spent(name: str) -> None:
    case, way_out = REFUSED[name]
    model, _, _, private = bind(case)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=way_out):
        next(iter(private.loader()))
    assert len(private.run.ledger) == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_complex_parameters_are_refused_before_anything_is_spent() -> None:
    filtered = Model(lambda m, x: m.head(torch.fft.irfft(torch.fft.rfft(x) * m.w, n=D)))
    filtered.w = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex64))
    optimizer = torch.optim.SGD(filtered.parameters(), lr=LR)
    recipe = recipes.dpsgd(batch_size=N, steps=2, noise_multiplier=1.0).for_records(N)
    data = TensorDataset(*(x.float() if x.is_floating_point() else x for x in rows()))
    with pytest.raises(UnsupportedModel, match="view_as_complex"):
        Private(filtered, optimizer, data, classify, recipe)
