"""Half precision from end to end: whole models, autocast, frozen bases, checkpoints, and attacks on the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.utils.checkpoint import checkpoint

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Differentiated, Objective
from sordino.gradients.rules.linear import Outer
from sordino.parts import Flat
from sordino.validation.watching import IN_ANY_COMPANY
from tests.gradients.oracle import batch_of, check, singles
from tests.helpers import calibrated, classification, cross_entropy, mlp, private

CLIP = 1.0
HALF = torch.bfloat16


def contributions(found: Differentiated, size: int) -> Tensor:
    """The length of what each example adds to the sum, clipped by its measured norm."""
    weights = Flat().weights(found.norms, CLIP, None)  # type: ignore[arg-type]  # it does not look at the draw
    each = []
    for i in range(size):
        sums = found.weighted_sum(weights.where(torch.arange(size) == i, 0))
        each.append(torch.cat([one.double().flatten() for one in sums]).norm())
    return torch.stack(each)


def differentiate(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Any], Tensor]) -> Differentiated:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return BookKeeping().differentiate(Objective(model, loss), parameters, batch_of(x, len(x)))


# -- attacks on the norm ----------------------------------------------------------------------------------------------


class Many(nn.Module):
    """600 small parameters, each with a gradient of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.zeros(1) for _ in range(600))

    def forward(self, x: Tensor) -> Tensor:
        return sum(x[:, i : i + 1] * scale for i, scale in enumerate(self.scales))  # type: ignore[return-value]


def test_squares_that_bfloat16_cannot_add_up() -> None:
    """256 + 1 is 256 in bfloat16: a norm that is added up there is short by a third, and the bound is exceeded."""
    model, x = Many().to(HALF), torch.ones(3, 600, dtype=HALF)
    found = differentiate(model, x, lambda m, x: m(x)[:, 0])
    (row, *_) = singles(model, lambda m, x: m(x)[:, 0], batch_of(x, 3))
    naive = torch.zeros((), dtype=HALF)
    for gradient in row:
        naive += gradient.square().sum()
    exact = torch.cat([g.double() for g in row]).norm()
    assert float(exact / naive.double().sqrt()) > 1.5  # what a naive clip would let through
    torch.testing.assert_close(found.norms.double(), exact.expand(3), rtol=1e-6, atol=0)
    assert float(contributions(found, 3).max()) <= CLIP


@pytest.mark.parametrize("rows", [2, 64])
def test_rows_that_cancel(rows: int) -> None:
    """Row after row of one sign and the other: what is left is a hundredth of the terms, and is measured, not lost."""
    torch.manual_seed(0)
    base = torch.randn(4, 1, 48).expand(-1, rows, -1)
    x = (base + torch.randn(4, rows, 48) / 64).to(HALF)
    signs = torch.tensor([1.0, -1.0]).repeat(rows // 2)
    model = nn.Linear(48, 24, bias=False).to(HALF)
    found = differentiate(model, x, lambda m, x: (m(x).float() * signs[:, None]).sum((1, 2)))
    g = signs.to(HALF).reshape(1, rows, 1).expand(4, rows, 24)
    exact = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    naive = ((x @ x.mT) * (g @ g.mT)).sum((1, 2)).double().clamp_min(0).sqrt()
    assert float((naive / exact - 1).abs().max()) > 0.01
    assert bool((found.norms.double() >= exact * (1 - 1e-5)).all())
    torch.testing.assert_close(found.norms.double(), exact, rtol=1e-2, atol=0)
    assert float(contributions(found, 4).max()) <= CLIP


def test_a_norm_of_rounded_factors_is_caught() -> None:
    """The tests above can fail: an engine that measures a rounded gradient and sums the other one exceeds the bound."""
    torch.manual_seed(0)
    x, g = torch.randn(4, 64, 48).to(HALF), torch.randn(4, 64, 24).to(HALF)
    kept = Outer(x, g)
    weights = CLIP / Outer(x, (0.9 * g).to(HALF)).squared_norms().sqrt()
    sums = torch.stack([kept.weighted_sum(weights.where(torch.arange(4) == i, 0)).norm() for i in range(4)])
    assert float(sums.max()) > 1.05 * CLIP


# -- factors are held as the model made them --------------------------------------------------------------------------


def test_factors_stay_in_half_precision_until_they_are_needed() -> None:
    """The kept rows of a bfloat16 layer take half of what float32 would, and give the same norms and sums."""
    torch.manual_seed(0)
    x, g = torch.randn(3, 5, 40).to(HALF), torch.randn(3, 5, 400).to(HALF)
    half, full = Outer(x, g), Outer(x.float(), g.float())
    assert half.held_x.dtype == half.held_g.dtype == HALF
    torch.testing.assert_close(half.squared_norms(), full.squared_norms(), rtol=1e-6, atol=0)  # by another kernel
    weights = torch.rand(3)
    assert torch.equal(half.weighted_sum(weights), full.weighted_sum(weights))
    assert half.weighted_sum(weights).dtype == torch.float32


# -- models -----------------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers", reason="models of others come from transformers (bench extra)")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=1, use_cache=False, pad_token_id=0, **SMALL)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def tied_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def tokens(model: nn.Module, x: Tensor) -> Tensor:
    given = {"decoder_input_ids": x} if model.config.is_encoder_decoder else {}
    scores = model(x, **given).logits.float()
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), x[:, 1:], reduction="none").mean(1)


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        return tokens(model, x)


@pytest.mark.parametrize("build", [llama, tied_gpt2, t5])
@pytest.mark.parametrize("way", ["model", "autocast"])
def test_transformers(build: Callable[[], nn.Module], way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Norms are as near to float32 as one half-precision pass is, without a fallback; no contribution exceeds C."""
    torch.manual_seed(0)
    model, x = build(), torch.randint(1, 40, (4, 8))
    model = model.to(HALF) if way == "model" else model
    loss = tokens if way == "model" else in_autocast
    found = differentiate(model, x, loss)
    assert found.norms.dtype == torch.float32
    assert not caplog.records
    exact = differentiate(model.float(), x, tokens).norms
    torch.testing.assert_close(found.norms, exact, rtol=0.03, atol=0)
    assert float(contributions(found, 4).max()) <= CLIP


class Stored(nn.Module):
    """A frozen linear layer whose weights are stored as int8 with one scale for each output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias.to(x.dtype))


class Adapted(nn.Module):
    """A frozen layer with a float32 adapter of low rank beside it, as peft has them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        dtype = HALF if getattr(self.base, "weight", x).dtype == HALF else x.dtype
        base: Tensor = self.base(x.to(dtype))
        return self.head(torch.tanh(base.float() + self.up(self.down(x))))


BASES: dict[str, Callable[[], nn.Module]] = {
    "bfloat16": lambda: nn.Linear(6, 8).to(HALF).requires_grad_(False),
    "weights in int8": lambda: Stored(nn.Linear(6, 8)),
}


@pytest.mark.parametrize("base", BASES)
def test_adapters_on_a_frozen_base_of_low_precision(base: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is trained is float32, so that everything is exact; the base is a function like any other."""
    torch.manual_seed(0)
    check(BookKeeping(), Adapted(BASES[base]()), torch.randn(5, 6), 5)
    assert not caplog.records


def test_dynamic_quantisation_mixes_examples_and_is_refused() -> None:
    """torch.ao's dynamic int8 layers scale activations by the largest of the whole batch."""
    torch.manual_seed(0)
    base = quantize_dynamic(nn.Sequential(nn.Linear(6, 8)).requires_grad_(False), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match="mixes examples"):
        private(model=nn.Sequential(base, nn.Linear(8, 3)))


class Position(nn.Module):
    """A table of positions that is looked up inside of a checkpoint, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)

    def inner(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return torch.tanh(self.layer(x) + self.table(places[None, :] - places[:, None] + 4).sum(0))

    def forward(self, x: Tensor) -> Tensor:
        steps: Tensor = checkpoint(self.inner, torch.tanh(self.layer(x)), use_reentrant=False)
        return steps


def test_parameters_alone_inside_of_a_checkpoint() -> None:
    torch.manual_seed(0)
    check(BookKeeping(), Position(), torch.randn(4, 5, 6), 4)


def test_a_checkpointed_t5() -> None:
    torch.manual_seed(0)
    model = t5()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    check(BookKeeping(), model, torch.randint(1, 40, (4, 8)), 4, tokens)


# -- runs -------------------------------------------------------------------------------------------------------------


def half_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", HALF):
        return cross_entropy(model, batch).float()


def test_a_guarantee_says_what_half_precision_rests_on() -> None:
    """Seen in the first draw, whoever made it half: the model, autocast, or a cast in between. Float32 says nothing."""
    x, y = classification()
    runs = {
        "float32": private(calibrated(steps=1)),
        "autocast": private(calibrated(steps=1), loss=half_loss),
        "model": private(calibrated(steps=1), model=mlp().to(HALF), dataset=(x.to(HALF), y)),
        "a cast": private(
            calibrated(steps=1),
            loss=lambda m, b: F.cross_entropy(m(b[0].to(HALF).float()), b[1], reduction="none"),
        ),
        "unprobed": private(calibrated(steps=1), validate=False),
    }
    said = {}
    for name, run in runs.items():
        run.step()
        said[name] = IN_ANY_COMPANY in run.guarantee().assumptions
    assert said == {"float32": False, "autocast": True, "model": True, "a cast": True, "unprobed": True}


def test_noise_comes_before_the_rounding_to_half_precision() -> None:
    """The optimizer's gradient of a bfloat16 parameter is the noised sum, rounded once."""
    x, y = classification()
    grads: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (HALF, torch.float32):
        model = mlp().to(HALF).to(dtype)

        def loss(m: nn.Module, batch: Any, dtype: torch.dtype = dtype) -> Tensor:
            return cross_entropy(m, (batch[0].to(dtype), batch[1]))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = private(calibrated(noise_multiplier=1e4), model=model, optimizer=optimizer, dataset=(x, y), loss=loss)
        grads[dtype] = []
        optimizer.register_step_pre_hook(
            lambda opt, *_, into=grads[dtype]: into.extend(p.grad.clone() for p in opt.param_groups[0]["params"])
        )
        run.step()
    assert all(g.dtype == HALF for g in grads[HALF])
    for low, high in zip(grads[HALF], grads[torch.float32], strict=True):
        # the same seeded noise, ten thousand times any gradient: nothing but one rounding lies between the two
        torch.testing.assert_close(low.float(), high, rtol=2**-7, atol=1e-3 * float(high.abs().max()))
