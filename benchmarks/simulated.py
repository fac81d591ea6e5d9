"""The rounds of `benchmarks.federated` in Flower's own simulation: Ray actors, one virtual SuperNode for each user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from benchmarks import federated
from sordino.federated import FedSGD, PrivateStrategy, client_app

Split = tuple[Tensor, Tensor]


@cache
def shared_pages(path: Path) -> Split:
    """The users' digits, mapped into the memory of this actor; all actors share the pages."""
    kept = torch.load(path, weights_only=True, mmap=True)
    return kept["x"], kept["y"]


def digits_of_user(path: Path, users: int) -> Callable[[Context], Split]:
    """What an actor does to find the records of the user whom it plays."""

    def of_user(context: Context) -> Split:
        x, y = shared_pages(path)
        size = len(y) // users
        mine = slice(
            size * int(context.node_config["partition-id"]), size * (int(context.node_config["partition-id"]) + 1)
        )
        return x[mine].reshape(-1, 1, 28, 28).float() / 255, y[mine]

    return of_user


def run(case: federated.Case, path: Path, users: int, test: Split) -> dict[str, Any]:
    """All rounds of one case; the seconds are those of the clock, as the work is done by other processes."""
    from flwr.simulation import run_simulation

    model, started, curve = federated.network(case.seed), time.monotonic(), list[float]()
    found: dict[str, Any] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        # made here: Flower runs this in another thread, and a ledger belongs to the thread that opened it
        strategy = PrivateStrategy(model, case.recipe(users), FedSGD(), seed=case.seed)
        strategy.start(grid, evaluate_fn=lambda _, __: curve.append(federated.accuracy(model, test)))
        found["noise_multiplier"] = strategy.mechanism.recipe.noise_multiplier
        found["guarantee"] = strategy.guarantee().to_dict()

    actors: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count() or 1}}
    client = client_app(federated.network(0), federated.losses, digits_of_user(path, users))
    run_simulation(server, client, users, backend_config=actors)
    return {
        **asdict(case),
        "accuracy": federated.accuracy(model, test),
        "curve": [round(value, 4) for value in curve[:: max(1, case.rounds // 10)]],
        "seconds": round(time.monotonic() - started, 1),
        **found,
    }
