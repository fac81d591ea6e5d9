"""Adapters beside frozen weights of few bits: the step is that of a loop over single examples."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino import Private, recipes

pytest.importorskip("transformers")
pytest.importorskip("peft")
from sordino.finetuning.choice import BYTES, CAUSAL, HALF, TextChoice
from sordino.finetuning.losses import TaskLoss
from sordino.finetuning.low_precision import ByteLinear, autocast, store_in_bytes
from sordino.finetuning.models import adapt
from tests.finetuning.models import RECORDS, Texts, build, collate

CLIP, RATE = 0.5, 0.8
CHOICE = TextChoice(CAUSAL, lora="r=2,alpha=4")


def make(kind: str, dtype: str) -> nn.Module:
    base = build(kind) if dtype == BYTES else build(kind).to(torch.bfloat16)
    model = adapt(base, replace(CHOICE, dtype=dtype), seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def loop(model: nn.Module, kind: str, dtype: str) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for item in Texts(kind):
        with autocast(dtype, model):
            loss = model(**collate([item])).loss
        grads = torch.autograd.grad(loss, list(trained.values()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, grad in zip(trained, grads, strict=True):
            sums[name] += grad * (CLIP / norm).clamp(max=1.0)
    return {name: p.detach() - RATE * sums[name] / RECORDS for name, p in trained.items()}


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "near"), [(BYTES, 1e-5), (HALF, 2e-3)])
def test_a_step_beside_a_frozen_base_of_few_bits(kind: str, dtype: str, near: float) -> None:
    model = make(kind, dtype)
    twin = copy.deepcopy(model)
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    recipe = recipes.dpsgd(batch_size=RECORDS, steps=1, clip=CLIP, noise_multiplier=1e-9).for_records(RECORDS)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    loss = TaskLoss(dtype=torch.bfloat16 if dtype == HALF else None)
    records: Any = Texts(kind)
    Private(model, optimizer, records, loss, recipe, collate=collate).step()
    for name, expected in loop(twin, kind, dtype).items():
        assert expected.dtype == torch.float32
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=near, atol=near)
        assert not torch.equal(twin.get_parameter(name), expected)
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items() if name in frozen)


def test_weights_are_rounded_by_their_own_output_alone() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 6), torch.randn(5, 40)
    with torch.no_grad():
        layer.weight[2] *= 100
        layer.weight[3] = 0
        stored = ByteLinear(layer.weight, layer.bias)
        assert stored.weight.dtype == torch.int8
        error = (stored.weight * stored.scale - layer.weight).abs().amax(1)
        assert bool((error <= layer.weight.abs().amax(1) / 254 * 1.0001).all()), "half a step of its own scale"
        torch.testing.assert_close(stored(x)[:, 3], layer(x)[:, 3])
        torch.testing.assert_close(stored(x[:1]), stored(x)[:1])


def test_what_is_tied_or_trained_stays_as_it_is() -> None:
    tied = build("gpt2").requires_grad_(False)
    store_in_bytes(tied)
    assert tied.lm_head.weight is tied.transformer.wte.weight  # type: ignore[union-attr]
    assert isinstance(tied.transformer.h[0].attn.c_attn, ByteLinear)  # type: ignore[union-attr,index]
    trained = build("llama")
    assert store_in_bytes(trained) == 0
