"""Federated training on Flower in which a whole user is protected, not one record (the extra `federated`).

`PrivateStrategy` is a Flower strategy, `client_app` makes the ClientApp that goes with it; what the clients compute is
`FedAvg` or `FedSGD`, and `Quantile` lets the clipping bound find itself. `InProcessGrid` runs all clients in this
process, for tests and experiments.
"""

from sordino.features import MissingExtra

try:
    import flwr  # noqa: F401 - asked for here so that its absence has one clear message
except ImportError as error:
    raise MissingExtra(f"flwr cannot be imported ({error}): pip install 'sordino[federated]'") from error

from sordino.federated.client import client_app
from sordino.federated.grid import InProcessGrid
from sordino.federated.quantile import Quantile
from sordino.federated.quiet import QUIET
from sordino.federated.strategy import PrivateStrategy
from sordino.federated.work import FedAvg, FedSGD, Work

__all__ = ["QUIET", "FedAvg", "FedSGD", "InProcessGrid", "PrivateStrategy", "Quantile", "Work", "client_app"]
