"""The ClientApp that goes with `PrivateStrategy`: local work, clipping, a vote; no count of examples leaves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sized
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from sordino.errors import InvalidInput
from sordino.federated import work
from sordino.federated.mechanism import norm_of
from sordino.federated.messages import ARRAYS, CONFIG, reply
from sordino.gradients.engine import Loss
from sordino.parts import Draw, Flat
from sordino.records import Collate, Records


def client_app(
    model: nn.Module | Callable[[], nn.Module],
    loss: Loss,
    data: Callable[[Context], Any],
    *,
    collate: Collate | None = None,
) -> ClientApp:
    """A ClientApp that trains `model` by `loss` on its own records, as the strategy's rounds say.

    `model` is a module, or a function that makes one; its weights come from the server. ``loss(model, batch)`` returns
    one loss per record. ``data(context)`` returns the records of this client, usually by
    ``context.node_config["partition-id"]``. The update is clipped before it leaves; the server clips it again.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = _config(message)
        local = _local(model, message)
        update = _update(local, loss, data(context), collate, config)
        norm = norm_of(update)
        clip = float(config["clip"])  # type: ignore[arg-type]  # Flower's records hold a union; the server sends a number
        if not torch.isfinite(norm):
            return reply(message, {name: torch.zeros_like(u) for name, u in update.items()}, within=False)
        weight = Flat().weights(norm.reshape(1), clip, Draw(torch.zeros(1, dtype=torch.int64)))
        return reply(message, {name: u * float(weight) for name, u in update.items()}, within=bool(norm <= clip))

    return app


def _config(message: Message) -> ConfigRecord:
    config = message.content.get(CONFIG)
    if not isinstance(config, ConfigRecord) or "clip" not in config:
        raise InvalidInput("the round has no clipping bound: this client works with sordino.federated.PrivateStrategy")
    return config


def _local(model: nn.Module | Callable[[], nn.Module], message: Message) -> nn.Module:
    """A model of this round's own: nothing that another round, or another client in this process, left in it."""
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    own.load_state_dict(message.content.array_records[ARRAYS].to_torch_state_dict())
    return own.train()


def _update(
    model: nn.Module, loss: Loss, dataset: Any, collate: Collate | None, config: ConfigRecord
) -> dict[str, torch.Tensor]:
    if _is_empty(dataset):
        return {name: torch.zeros_like(p) for name, p in work.trainable(model).items()}
    order = torch.Generator().manual_seed(int(config["round"]))  # type: ignore[arg-type]  # as above
    return work.from_config(config).update(model, loss, Records(dataset, collate), order)


def _is_empty(dataset: Any) -> bool:
    """Whether a client has no records this round, which is nothing to complain about: its update is zero."""
    rows = dataset[0] if isinstance(dataset, tuple) and dataset else dataset
    return isinstance(rows, Sized) and len(rows) == 0
