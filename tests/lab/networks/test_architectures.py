"""Every architecture has the papers' parameter count, the right output shape and no coupling between records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.lab import networks
from sordino.lab.networks.images import SlidingMax

Build = Callable[[], nn.Module]


def images(channels: int, side: int) -> Callable[[int], Tensor]:
    return lambda size: torch.rand(size, channels, side, side)


def tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(vocabulary, (size, length))


GLOVE = torch.zeros(20_000, 100)
CASES: list[tuple[str, Build, int, Callable[[int], Tensor], int]] = [
    ("mnist", networks.mnist_cnn, 26_010, images(1, 28), 10),
    ("mnist p3", partial(networks.mnist_cnn, "relu", padding=3), 26_010, images(1, 28), 10),
    ("cifar", networks.cifar_cnn, 550_570, images(3, 32), 10),
    ("jl cifar", networks.jl_cifar, 623_146, images(3, 32), 10),
    ("vgg13", networks.vgg13, 32_394_562, images(3, 32), 10),
    ("alexnet 32", networks.alexnet, 21_622_154, images(3, 32), 10),
    ("alexnet grey", partial(networks.alexnet, channels=1), 21_598_922, images(1, 28), 10),
    ("scatter linear", networks.scatter_linear, 39_700, images(81, 7), 10),
    ("scatter linear cifar", partial(networks.scatter_linear, 243), 155_530, images(243, 8), 10),
    ("scatter cnn", networks.scatter_cnn, 33_066, images(81, 7), 10),
    ("scatter cnn cifar", partial(networks.scatter_cnn, 243), 187_210, images(243, 8), 10),
    ("imdb", networks.imdb_bilstm, 2_021_202, tokens(20_000, 80), 2),
    ("imdb glove", partial(networks.imdb_bilstm, GLOVE), 21_202, tokens(20_000, 80), 2),
    ("imdb glove tuned", partial(networks.imdb_bilstm, GLOVE, frozen=False), 2_021_202, tokens(20_000, 80), 2),
    ("jl bilstm", networks.jl_bilstm, 598_274, tokens(8185, 20), 2),
    ("jl bilstm torch", partial(networks.jl_bilstm, single_bias=False), 598_786, tokens(8185, 20), 2),
    ("names", networks.names_lstm, 118_226, tokens(259, 20), 18),
    ("imdb mlp", networks.imdb_mlp, 160_306, tokens(10_000, 256), 2),
    ("embedding mlp", networks.embedding_mlp, 2_006_594, tokens(20_000, 80), 2),
    ("transformer", networks.transformer, 2_073_602, tokens(10_000, 64), 2),
    ("linear", networks.linear, 650, images(1, 8), 10),
    ("linear without a bias", partial(networks.linear, bias=False), 640, images(1, 8), 10),
    ("digits mlp", networks.digits_mlp, 2_410, images(1, 8), 10),
    ("digits cnn", networks.digits_cnn, 6_090, images(1, 8), 10),
]


@pytest.mark.parametrize(("build", "count", "make", "classes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_count_shape_and_independence_of_records(
    build: Build, count: int, make: Callable[[int], Tensor], classes: int
) -> None:
    torch.manual_seed(0)
    model = build()
    assert networks.parameter_count(model, trained=True) == count
    batch = make(3)
    with torch.no_grad():
        together = model(batch)
        alone = model(batch[1:2])
    assert together.shape == (3, classes)
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)


def test_the_single_bias_of_keras_is_the_same_function() -> None:
    """Moving the second bias into the first changes no output, so the paper's smaller count loses nothing."""
    torch.manual_seed(0)
    two, one = networks.jl_bilstm(single_bias=False), networks.jl_bilstm()
    state = two.state_dict()
    for name in [n for n in state if "bias_hh" in n]:
        state[name.replace("bias_hh", "bias_ih")] = state[name.replace("bias_hh", "bias_ih")] + state[name]
        state[name] = torch.zeros_like(state[name])
    one.load_state_dict(state)
    batch = tokens(8185, 12)(4)
    torch.testing.assert_close(one(batch), two(batch))


def test_tempered_sigmoid_with_2_2_1_is_tanh_and_with_other_numbers_is_not() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(networks.TemperedSigmoid(2, 2, 1)(x), torch.tanh(x))
    assert (networks.TemperedSigmoid(2, 1.9, 1)(x) - torch.tanh(x)).abs().max() > 0.01
    torch.testing.assert_close(networks.TemperedSigmoid(1.58, 3, 0.71)(x), 1.58 / (1 + torch.exp(-3 * x)) - 0.71)


def test_the_activation_choice_reaches_every_hidden_layer() -> None:
    model = networks.cifar_cnn(activation=(1.58, 3.0, 0.71))
    assert sum(isinstance(m, networks.TemperedSigmoid) for m in model.modules()) == 7
    assert not any(isinstance(m, nn.Tanh | nn.ReLU) for m in model.modules())


def test_a_frozen_embedding_keeps_its_rows_and_gets_no_gradient() -> None:
    vectors = torch.randn(20_000, 100)
    model = networks.imdb_bilstm(vectors)
    model(tokens(20_000, 5)(2)).sum().backward()
    assert model.embedding.weight.grad is None
    assert torch.equal(model.embedding.weight, vectors)


def test_normalisation_comes_first() -> None:
    norm = nn.GroupNorm(27, 81, affine=False)
    model = networks.scatter_linear(norm=norm)
    x = torch.rand(2, 81, 7, 7)
    torch.testing.assert_close(model(3 * x + 7), model(x), rtol=1e-3, atol=1e-3)


def test_build_by_name_and_the_refusals() -> None:
    assert networks.parameter_count(networks.build("mnist-cnn", padding=3)) == 26_010
    assert set(networks.ARCHITECTURES) >= {"vgg13", "alexnet", "transformer", "imdb-bilstm", "scatter-cnn"}
    with pytest.raises(InvalidInput, match=r"model='resnet' is not known: choose one of alexnet, "):
        networks.build("resnet")
    with pytest.raises(InvalidInput, match="activation='gelu' must be"):
        networks.mnist_cnn("gelu")
    with pytest.raises(InvalidInput, match="channels=80 must be 81"):
        networks.scatter_cnn(80)
    with pytest.raises(InvalidInput, match="length=65 must be <= 64"):
        networks.transformer()(tokens(10, 65)(1))


@pytest.mark.parametrize("shape", [(2, 3, 14, 14), (1, 1, 2, 2), (3, 2, 5, 7)])
def test_sliding_max_is_torchs_pooling(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    pooled, wanted = SlidingMax()(images), nn.MaxPool2d(2, stride=1)(images)
    torch.testing.assert_close(pooled, wanted)
    weights = torch.linspace(1, 2, wanted.numel(), dtype=torch.float64).reshape(wanted.shape)
    gradients = [torch.autograd.grad((output * weights).sum(), images)[0] for output in (pooled, wanted)]
    torch.testing.assert_close(*gradients)
