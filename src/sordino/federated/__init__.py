"""Federated training on Flower in which a whole user is protected, not one record (the extra `federated`).

`PrivateStrategy` is a Flower strategy, and `client_app` makes the matching ClientApp. Clients compute `FedAvg` or
`FedSGD`, and `Quantile` adapts the clipping bound. `InProcessGrid` runs all clients in this process, for tests and
experiments. `QUIET` is the environment in which Flower sends no telemetry.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sordino.federated.client import InProcessGrid, client_app
    from sordino.federated.rounds import Quantile
    from sordino.federated.strategy import PrivateStrategy
    from sordino.federated.work import FedAvg, FedSGD, Work

__all__ = ["QUIET", "FedAvg", "FedSGD", "InProcessGrid", "PrivateStrategy", "Quantile", "Work", "client_app"]

QUIET: Mapping[str, str] = MappingProxyType(
    {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
)
"""The environment of every Flower process: no telemetry, no check for updates, no usage statistics of Ray.

They are read when Flower's programs start, so they belong in the environment of ``flwr``, ``flower-superlink`` and
``flower-supernode``; setting them in an app is too late.
"""

_HOMES = {
    "FedAvg": "work",
    "FedSGD": "work",
    "InProcessGrid": "client",
    "PrivateStrategy": "strategy",
    "Quantile": "rounds",
    "Work": "work",
    "client_app": "client",
}


def __getattr__(name: str) -> object:
    """Load what needs torch and Flower when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.federated' has no attribute {name!r}")
    try:
        home = import_module(f"sordino.federated.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "flwr":
            raise
        raise ModuleNotFoundError(f"{error}: pip install 'sordino[federated]'", name="flwr") from error
    return getattr(home, name)
