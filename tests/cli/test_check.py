"""`sordino check` finds what mixes examples, names the way out, and passes what does not mix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def batch():
    return torch.randn(6, 1, 8, 8), torch.arange(6) % 3

"""


@pytest.fixture
def check(sordino, tmp_path: Path):
    def call(body: str, *arguments: object):
        (tmp_path / "mine.py").write_text(f"{HEAD}def build():\n    {body}\n")
        return sordino("check", f"{tmp_path / 'mine.py'}:build", *arguments)

    return call


def test_batch_norm_is_found_and_the_fix_named(check):
    body = "return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)), loss, batch()"
    result = check(body)
    assert result.exit_code == 1
    assert "BatchNorm2d" in result.stdout
    assert "sordino.fix(model) would change:" in result.stdout
    assert "GroupNorm" in result.stdout
    said = json.loads(check(body, "--json").stdout)
    assert said["findings"]
    assert said["engine"] is None


def test_a_function_that_needs_arguments_is_refused_by_their_names(sordino, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def build(width, depth=1, **more):\n    raise TypeError\n")
    result = sordino("check", f"{tmp_path / 'mine.py'}:build")
    assert result.exit_code == 2
    assert "needs width: name a function that is called without arguments" in result.stderr


def test_the_fixed_model_passes(check):
    body = "import sordino; return sordino.fix(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))"
    result = check(body, "--input", "1,8,8")
    assert result.exit_code == 0, result.stdout
    assert "can be trained privately" in result.stdout


def test_loss_that_is_no_vector_is_found(check):
    result = check("return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), mean_loss, batch()")
    assert result.exit_code == 1
    assert "reduction='none'" in result.stdout


def test_sound_model_lists_layers_and_engine(check):
    said = json.loads(check("return nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), loss, batch()", "--json").stdout)
    assert said["findings"] == []
    assert (said["parameters"], said["trainable"]) == (195, 195)
    assert said["layers"] == [{"name": "1", "kind": "Linear", "parameters": 195, "trainable": 195}]
    assert said["engine"] == "book-keeping"


def test_model_alone_needs_no_batch_where_its_first_layer_is_linear(check):
    result = check("return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))")
    assert result.exit_code == 0, result.stdout
    assert "book-keeping" in result.stdout


def test_frozen_and_tied_parameters_are_counted_once(check):
    body = """model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model"""
    said = json.loads(check(body, "--json").stdout)
    assert (said["parameters"], said["trainable"]) == (24, 20)


TURNED = "return (x * torch.view_as_complex(self.weight)).abs()"
STEEP = "x = x.clone().requires_grad_(); h = nn.functional.rms_norm(x, (3,), self.weight[:, 0]); return h + "
STEEP += "torch.autograd.grad(h.sum(), x, create_graph=True)[0]"


@pytest.mark.parametrize(("forward", "engine"), [(TURNED, "vmap"), (STEEP, "loop")])
def test_model_without_a_rule_is_differentiated_by_another_engine(check, forward, engine):
    """Books are not kept of complex numbers, nor of gradients inside the loss that go through an RMS norm."""
    body = f"""class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))
        def forward(self, x): {forward}
    return Model()"""
    result = check(body, "--input", "3")
    assert result.exit_code == 0, result.stdout
    assert f"the {engine} engine" in result.stdout


def test_every_parameter_is_listed_with_its_rule_and_cost(check):
    body = "return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 3)), loss, batch()"
    said = json.loads(check(body, "--json").stdout)
    assert {use["parameter"]: use["operation"] for use in said["uses"]} == {
        **dict.fromkeys(("0.weight", "0.bias"), "conv2d"),
        **dict.fromkeys(("2.weight", "2.bias"), "linear"),
    }
    assert all(use["rule"] and use["milliseconds"] > 0 for use in said["uses"])
    assert "kept per example" in check(body).stdout
