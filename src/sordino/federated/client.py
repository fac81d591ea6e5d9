"""Clients: the ClientApp for `PrivateStrategy`, what it sends, and a grid that runs all clients in this process.

A client does its work, clips the update and votes on the bound; no count of examples leaves it. A reply may come from
anyone: reading it never fails and runs no foreign code. The bytes of an array are never parsed: name, type and shape
must be the expected ones, and its last bytes are the numbers. Anything else counts as a zero update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from sordino.chance import shield_chance
from sordino.errors import InvalidInput
from sordino.federated import work
from sordino.gradients.engine import Loss
from sordino.parts import Draw, Flat
from sordino.records import Collate, Records

ARRAYS, CONFIG, UPDATE, REPORT, WITHIN = "arrays", "config", "update", "report", "within"
"""The names of what travels: model and settings to a client, its update and its report back."""
RUN = 1
"""The number of the one run on a grid in this process."""
_TYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4"), "float64": np.dtype("<f8")}
_FORTRAN = b"'fortran_order': True"


def client_app(
    model: nn.Module | Callable[[], nn.Module],
    loss: Loss,
    data: Callable[[Context], Any],
    *,
    collate: Collate | None = None,
) -> ClientApp:
    """Return a ClientApp that trains `model` by `loss` on its own records, as the strategy's rounds say.

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
        norm = work.measure(update)
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
    """Return a fresh model for this round: nothing is left in it from another round or another client."""
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    own.load_state_dict(message.content.array_records[ARRAYS].to_torch_state_dict())
    return own.train()


def _update(
    model: nn.Module, loss: Loss, dataset: Any, collate: Collate | None, config: ConfigRecord
) -> dict[str, Tensor]:
    if _is_empty(dataset):
        return {name: torch.zeros_like(p) for name, p in work.find_trainable(model).items()}
    order = torch.Generator().manual_seed(int(config["round"]))  # type: ignore[arg-type]  # as above
    with shield_chance(None):  # otherwise dropout masks of clients in one process would depend on one another
        return work.from_config(config).update(model, loss, Records(dataset, collate), order)


def _is_empty(dataset: Any) -> bool:
    """Whether a client has no records this round; this is no error, and its update is zero."""
    rows = dataset[0] if isinstance(dataset, tuple) and dataset else dataset
    return isinstance(rows, Sized) and len(rows) == 0


# -- messages ---------------------------------------------------------------------------------------------------------


def reply(message: Message, update: Mapping[str, Tensor], within: bool) -> Message:
    """Return a client's answer: its clipped update and its vote, and nothing else, such as how many records it has."""
    arrays = ArrayRecord({name: Array(u.detach().float().cpu().contiguous().numpy()) for name, u in update.items()})
    return Message(RecordDict({UPDATE: arrays, REPORT: MetricRecord({WITHIN: int(within)})}), reply_to=message)


def read_update(message: Message, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor] | None:
    """Read the update in a reply; None if there is none with these names and shapes."""
    if message.has_error() or not message.has_content():
        return None
    record = message.content.get(UPDATE)
    if not isinstance(record, ArrayRecord) or set(record) != set(shapes):
        return None
    tensors = {name: _read_tensor(record[name], shape) for name, shape in shapes.items()}
    read = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return read if len(read) == len(shapes) else None


def read_vote(message: Message) -> bool:
    """Whether a client says that its update was within the bound; anything unclear is a no."""
    record = message.content.get(REPORT)
    value = record.get(WITHIN) if isinstance(record, MetricRecord) else None
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0.5


def _read_tensor(array: Array, shape: torch.Size) -> Tensor | None:
    kind = _TYPES.get(array.dtype)
    if kind is None or tuple(array.shape) != tuple(shape):
        return None
    wanted = shape.numel() * kind.itemsize
    if len(array.data) < wanted:
        return None
    head, body = array.data[: len(array.data) - wanted], array.data[len(array.data) - wanted :]
    order = "F" if _FORTRAN in head[:256] else "C"
    numbers = np.frombuffer(body, dtype=kind).reshape(tuple(shape), order=order)  # type: ignore[call-overload]
    return torch.from_numpy(numbers.astype(np.float64))


# -- all clients in this process --------------------------------------------------------------------------------------


class InProcessGrid(Grid):
    """A grid of `clients` nodes that all run `app`, one after the other; node i + 1 has partition-id i.

    For experiments: real messages go through the real ClientApp without being sent. What a client raises is raised
    here.
    """

    def __init__(self, app: ClientApp, clients: int, run_config: dict[str, Any] | None = None) -> None:
        if clients < 1:
            raise InvalidInput(f"clients={clients} must be >= 1")
        self.app, self.clients, self.run_config = app, clients, run_config or {}
        self._run = Run.create_empty(RUN)
        self._replies: dict[str, Message] = {}
        # Flower stamps every message with the task of its process; here there is none, as in its own run_simulation.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN, RUN, RUN

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            pushed.append(f"{len(self._replies)}-{message.metadata.dst_node_id}")
            self._replies[pushed[-1]] = self.answer(message)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return (self.answer(message) for message in messages)

    def answer(self, message: Message) -> Message:
        """Return the reply of the client that `message` is for."""
        node = message.metadata.dst_node_id
        place: dict[str, Any] = {"partition-id": node - 1, "num-partitions": self.clients}
        return self.app(message, Context(RUN, node, place, RecordDict(), self.run_config))
