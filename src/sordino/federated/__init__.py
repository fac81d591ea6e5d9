"""Federated training on Flower in which a whole user is protected, not one record (the extra `federated`).

`PrivateStrategy` is a Flower strategy, `client_app` makes the ClientApp that goes with it; what the clients compute is
`FedAvg` or `FedSGD`, and `Quantile` lets the clipping bound find itself. `InProcessGrid` runs all clients in this
process, for tests and experiments. `QUIET` is the environment in which Flower calls nobody.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sordino.federated.quiet import QUIET

if TYPE_CHECKING:
    from sordino.federated.client import client_app
    from sordino.federated.grid import InProcessGrid
    from sordino.federated.quantile import Quantile
    from sordino.federated.strategy import PrivateStrategy
    from sordino.federated.work import FedAvg, FedSGD, Work

__all__ = ["QUIET", "FedAvg", "FedSGD", "InProcessGrid", "PrivateStrategy", "Quantile", "Work", "client_app"]

_HOMES = {
    "FedAvg": "work",
    "FedSGD": "work",
    "InProcessGrid": "grid",
    "PrivateStrategy": "strategy",
    "Quantile": "quantile",
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
