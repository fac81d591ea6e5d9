"""The benchmark's fast engine takes the same rounds as Flower's messages: the same model from the same seed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.federated import Case, _grid, losses, network, take_round
from sordino.federated import FedSGD, PrivateStrategy

USERS = 200


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_both_engines_give_the_same_model(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (USERS, 5, 1, 28, 28), dtype=torch.uint8, generator=generator)
    classes = torch.randint(0, 10, (USERS, 5), generator=generator)
    recipe = Case(method, 4.0, 0, rounds=6).recipe(USERS)
    models = []
    for fast in (True, False):
        run = PrivateStrategy(network(0), recipe, FedSGD(), seed=7)
        if fast:
            for _ in range(6):
                take_round(run, (images, classes))
        else:
            run.start(_grid((images, classes)))
        models.append(torch.cat([p.detach().flatten() for p in run.mechanism.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in network(0).parameters()])
    assert (models[0] - start).norm() > 0.1
    assert torch.allclose(models[0], models[1], atol=1e-4)
    assert losses(network(0), (images[0].float(), classes[0])).shape == (5,)
