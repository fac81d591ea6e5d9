"""All clients in this process, one after the other: Flower's messages without its network, for experiments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from sordino.errors import InvalidInput

RUN = 1


class InProcessGrid(Grid):
    """A grid of `clients` nodes that all run `app`; node i + 1 has partition-id i.

    Real messages go through the real ClientApp, without being sent. What a client raises is raised here.
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
        """What the client that `message` is for replies."""
        node = message.metadata.dst_node_id
        place: dict[str, Any] = {"partition-id": node - 1, "num-partitions": self.clients}
        return self.app(message, Context(RUN, node, place, RecordDict(), self.run_config))
