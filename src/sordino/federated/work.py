"""What a client computes in a round: parts that use torch and do not depend on Flower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.gradients.engine import Loss, describe_kind
from sordino.records import Records

Parameters = dict[str, nn.Parameter]
Update = dict[str, Tensor]
"""An update: by the parameter's name, what the server's optimizer uses as a gradient."""


class Work(Protocol):
    """Turns the global model and a client's own records into an update.

    An update points *against* the direction of learning, as gradients do: the server's optimizer subtracts it.
    """

    def update(self, model: nn.Module, loss: Loss, records: Records, order: torch.Generator) -> Update:
        """The update; may leave the model changed. Neither clipped nor noised: its user is the unit."""
        ...

    def to_config(self) -> dict[str, str | int | float]:
        """Plain values that travel to the clients with every round."""
        ...


def find_trainable(model: nn.Module) -> Parameters:
    """Find the trained parameters, by name; a tied one only once. Buffers do not count: they never leave a client."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def measure(update: Mapping[str, Tensor]) -> Tensor:
    """Measure the length of a whole update, in double precision."""
    norms = [torch.linalg.vector_norm(u, dtype=torch.float64) for u in update.values()]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


@dataclass(frozen=True)
class FedSGD:
    """DP-FedSGD: the gradient of the mean loss over all of the client's records (McMahan et al. 2018, FedSGD).

    `microbatch` records are processed at once; it changes no numbers.
    """

    microbatch: int = 256

    def __post_init__(self) -> None:
        _require_count("microbatch", self.microbatch, "it is how many records are processed at once")

    def update(self, model: nn.Module, loss: Loss, records: Records, order: torch.Generator) -> Update:
        model.zero_grad(set_to_none=True)
        for part in torch.arange(records.count).split(self.microbatch):
            (_losses(model, loss, records, part).sum() / records.count).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach()
            for name, p in find_trainable(model).items()
        }

    def to_config(self) -> dict[str, str | int | float]:
        return {"work": "fedsgd", **asdict(self)}


@dataclass(frozen=True)
class FedAvg:
    """DP-FedAvg: local SGD from the global model; the update is start − end (McMahan et al. 2018, Alg. 1).

    `epochs` passes over the client's records in batches of `batch_size` at learning rate `lr`, at most `max_steps`
    steps, so that a client with many records does not keep the others waiting.
    """

    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    max_steps: int = 100

    def __post_init__(self) -> None:
        _require_count("epochs", self.epochs, "it is how often a client goes over its records")
        _require_count("batch_size", self.batch_size, "it is the size of a local batch")
        _require_count("max_steps", self.max_steps, "it is how many local steps there are at most")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InvalidInput(f"lr={self.lr} must be > 0 and finite: it is the clients' learning rate")
        if not 0 <= self.momentum < 1:
            raise InvalidInput(f"momentum={self.momentum} must lie in [0, 1)")

    def update(self, model: nn.Module, loss: Loss, records: Records, order: torch.Generator) -> Update:
        start = {name: p.detach().clone() for name, p in find_trainable(model).items()}
        optimizer = torch.optim.SGD(find_trainable(model).values(), self.lr, self.momentum)
        passes = [torch.randperm(records.count, generator=order).split(self.batch_size) for _ in range(self.epochs)]
        for batch in [batch for batches in passes for batch in batches][: self.max_steps]:
            optimizer.zero_grad(set_to_none=True)
            _losses(model, loss, records, batch).mean().backward()
            optimizer.step()
        return {name: start[name] - p.detach() for name, p in find_trainable(model).items()}

    def to_config(self) -> dict[str, str | int | float]:
        return {"work": "fedavg", **asdict(self)}


KINDS: dict[str, type[FedAvg] | type[FedSGD]] = {"fedavg": FedAvg, "fedsgd": FedSGD}


def from_config(config: Mapping[str, Any]) -> Work:
    """Read what `to_config` wrote into the configuration of a round, beside other things.

    >>> from_config({"work": "fedavg", "lr": 0.5, "round": 3})
    FedAvg(epochs=1, batch_size=32, lr=0.5, momentum=0.0, max_steps=100)
    """
    kind = KINDS.get(str(config.get("work")))
    if kind is None:
        raise InvalidInput(f"work={config.get('work')!r} must be one of {', '.join(KINDS)}: use PrivateStrategy")
    return kind(**{name: config[name] for name in kind.__dataclass_fields__ if name in config})


def _losses(model: nn.Module, loss: Loss, records: Records, indices: Tensor) -> Tensor:
    device = next(model.parameters()).device
    losses = loss(model, records.fetch(indices, device).data)
    if losses.shape != indices.shape:
        raise InvalidInput(
            f"the loss is {describe_kind(losses)}, must be a vector with one loss per record: use reduction='none'"
        )
    return losses


def _require_count(name: str, value: int, meaning: str) -> None:
    if value < 1:
        raise InvalidInput(f"{name}={value} must be >= 1: {meaning}")
