"""Small federations that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from sordino import Recipe, recipes
from sordino.federated import FedSGD, InProcessGrid, PrivateStrategy, client_app
from sordino.federated.client import reply
from sordino.federated.rounds import ASSUMPTIONS, Quantile, Round, Rounds
from sordino.noise import Source
from sordino.run import Run
from tests.helpers import classification, cross_entropy, mlp

QUIET_NOISE = 1e-9
"""A noise multiplier at which a release is the sum itself, to the tests' tolerance."""


def rounds(users: int = 8, expected: int = 4, steps: int = 5, noise: float = 1.0, **changes: Any) -> Recipe:
    options = {"batch_size": expected, "steps": steps, "noise_multiplier": noise, "lr": 1.0, **changes}
    return recipes.dpsgd(**options).for_records(users)


def line(size: int = 1) -> nn.Module:
    """A model that is a vector, at zero."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def mechanism(
    recipe: Recipe,
    *,
    size: int = 1,
    source: Source | None = None,
    adaptive: Quantile | None = None,
    kind: type[Rounds] = Rounds,
) -> Rounds:
    model = line(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = Run(recipe, unit="user", assumptions=ASSUMPTIONS, seed=None if source else 1, source=source)
    made = kind(model, recipe, optimizer, run, adaptive)
    run.begin()
    return made


def released(run: Rounds, current: Round) -> Tensor:
    """What a round moves the vector by, in sums: the divisor undone."""
    before = next(run.model.parameters()).detach().double().clone()
    run.release(current)
    return (before - next(run.model.parameters()).detach().double()).flatten() * current.terms.divisor


def vector(*values: float) -> dict[str, Tensor]:
    return {"weight": torch.tensor([values])}


def honest_app(users: int = 8) -> ClientApp:
    """Each user has ten records of a small classification task."""
    x, y = classification(10 * users)

    def records(context: Context) -> tuple[Tensor, Tensor]:
        place = int(context.node_config["partition-id"])
        return x[10 * place : 10 * place + 10], y[10 * place : 10 * place + 10]

    return client_app(mlp(seed=1), cross_entropy, records)


def sending(update: Callable[[int], dict[str, Tensor]], within: bool = True) -> ClientApp:
    """Clients that send what they like, by their partition, and clip nothing."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(message, update(int(context.node_config["partition-id"])), within)

    return app


class Altered(InProcessGrid):
    """A grid on which some answers are changed, lost or doubled on the way."""

    def __init__(self, app: ClientApp, clients: int, change: Callable[[Message], list[Message]]) -> None:
        super().__init__(app, clients)
        self.change = change

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return [changed for message in messages for changed in self.change(self.answer(message))]


def strategy(recipe: Recipe, model: nn.Module | None = None, **options: Any) -> PrivateStrategy:
    options.setdefault("work", FedSGD())
    options.setdefault("seed", 1 if options.get("vault") is None else None)  # a vault refuses repeatable noise
    return PrivateStrategy(model or line(), recipe, **options)
