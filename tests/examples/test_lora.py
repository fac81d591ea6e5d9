"""The example of a frozen backbone: what is frozen stays, what is adapted moves; docs/integrations.md runs it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch

# By path: some installed packages bring a package of the name `examples`.
lora = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora.py")))


def test_frozen_weights_stay_and_adapters_move() -> None:
    torch.manual_seed(0)
    public, train, _ = lora.digits()
    model = lora.adapted(lora.pretrained(public, steps=5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    private = lora.fine_tune(model, train, epsilon=2.0, epochs=1)
    assert 0 < private.guarantee().epsilon <= 2.0
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".frozen." not in name}


def test_an_adapter_starts_as_the_layer_it_adapts() -> None:
    layer, x = torch.nn.Linear(6, 5), torch.randn(3, 6)
    adapted = lora.Adapted(layer, rank=2)
    torch.testing.assert_close(adapted(x), layer(x))
    torch.nn.init.ones_(adapted.up.weight)
    assert not torch.allclose(adapted(x), layer(x))
