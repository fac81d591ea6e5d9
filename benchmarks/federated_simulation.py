"""What `benchmarks.federated` needs for Flower's simulation: a node for every user, ClientApps in Ray's processes.

Its cost grows with the nodes as well as with the messages, since the simulation asks for every node's messages all the
time: 25,000 of them had not finished two rounds after five minutes, 2,500 take a second or two for a round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.federated import Split, by_user, cached, losses, network
from sordino.federated import client_app


def own_digits(context: Context) -> Split:
    """The digits of the user that this node is."""
    x, y = _kept(int(context.node_config["num-partitions"]))
    place = int(context.node_config["partition-id"])
    return x[place].float() / 255, y[place]


@cache
def _kept(users: int) -> Split:
    torch.set_num_threads(1)
    return by_user(cached(), users)


def simulated(work: Callable[[Grid], None], users: int, hidden: int) -> None:
    """Do `work` on the server of one simulation with so many users."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        work(grid)

    client = client_app(network(0, hidden), losses, own_digits)
    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, users, backend_config=resources)
