"""Networks that learn from invented pictures: any number of steps, and a file for each key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from sordino.lab.features.pretraining import descend, keep_network


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps_is_taken(steps: int) -> None:
    network, seen = nn.Linear(1, 1, bias=False), []

    def loss() -> torch.Tensor:
        seen.append(network.weight.item())
        return network.weight.sum()

    descend(network, loss, steps=steps, rate=0.5, title="learning", quiet=True)
    assert len(seen) == steps
    assert network.weight.item() < seen[-1]


def test_a_network_is_made_once_for_its_key(tmp_path: Path) -> None:
    made = []

    def build() -> nn.Linear:
        return nn.Linear(2, 2)

    def learn() -> nn.Linear:
        made.append(build())
        return made[-1]

    state = torch.random.get_rng_state()
    networks = [keep_network(key, tmp_path, build, learn, "learning") for key in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(made) == 2
    assert torch.equal(networks[0].weight, networks[1].weight)
    assert torch.equal(networks[2].weight, made[1].weight)
    assert not any(network.training for network in networks)
