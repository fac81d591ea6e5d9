"""The benchmark's fast engine takes the same rounds as Flower's messages: the same model from the same seed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.federated import _grid, losses, network, take_round
from sordino import recipes
from sordino.federated import FedSGD, PrivateStrategy

USERS = 100


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_both_engines_give_the_same_model(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (USERS, 5, 1, 28, 28), dtype=torch.uint8, generator=generator)
    classes = torch.randint(0, 10, (USERS, 5), generator=generator)
    ratio = 1.0 if method == "static" else 2.0
    plan = recipes.dynamic(mu_ratio=ratio, clip_ratio=ratio, batch_size=10, steps=6, noise_multiplier=1.0, lr=0.3)
    recipe = plan.for_records(USERS)
    models = []
    for fast in (True, False):
        run = PrivateStrategy(network(0), recipe, FedSGD(), seed=7)
        if fast:
            for _ in range(6):
                take_round(run, (images, classes))
        else:
            run.start(_grid((images, classes)))
        models.append(torch.cat([p.detach().flatten() for p in run.rounds.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in network(0).parameters()])
    assert (models[0] - start).norm() > 0.1
    assert torch.allclose(models[0], models[1], atol=1e-4)
    assert losses(network(0), (images[0].float(), classes[0])).shape == (5,)
