"""What every rank of a crew does with a model that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino import Private
from sordino.distributed import sharding
from sordino.errors import SordinoError
from tests.distributed.scenarios import flat, prepared, refused, train
from tests.helpers import calibrated, mlp, private


def sharded_mlp(seed: int = 0) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = mlp(seed=seed)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def whole(model: nn.Module) -> Tensor:
    return flat(sharding.gather_state(model.state_dict()).values())


def shards(directory: Path) -> dict[str, Any]:
    """Sharded models trained by one recipe of each kind of engine and sampler, tiny draws, and a run in two halves."""
    found: dict[str, Any] = {}
    for name in ("dpadam", "dpis", "jl"):
        run = train(prepared(name), model=sharded_mlp(), validate=False)
        found[name] = whole(run.bench.objective.model)
    run = train(calibrated(batch_size=1, steps=12), model=sharded_mlp(), validate=False)
    found["tiny"] = whole(run.bench.objective.model)
    found["local"] = sum(p.to_local().numel() for p in run.bench.objective.parameters())
    found["halves"] = in_halves(directory / "run", sharded_mlp(), sharded_mlp(seed=5), whole)
    found["refusals"] = {
        "probe": refused(model=sharded_mlp(), validate=True),
        "selection": refused(recipe=prepared("dpsur"), model=sharded_mlp()),
        "loop": looped(private(model=sharded_mlp(), validate=False)),
    }
    return found


def in_halves(directory: Path, first: nn.Module, second: nn.Module, look: Callable[[nn.Module], Tensor]) -> Tensor:
    """Three steps of Adam by one object and three by another that loads them; where the model is in the end."""
    for model in (first, second):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run = private(calibrated(steps=6), model=model, optimizer=optimizer, validate=False)
        run.resume(directory)
        for _ in range(3):
            run.step()
        run.save()
        run.close()
    return look(second)


def plain_halves(directory: Path) -> Tensor:
    return in_halves(directory / "run", mlp(), mlp(seed=5), lambda model: flat(model.parameters()))


def looped(run: Private) -> str:
    try:
        next(run.loader())
    except SordinoError as error:
        return str(error)
    return ""
