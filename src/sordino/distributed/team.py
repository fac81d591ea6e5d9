"""The processes that take a step together: who leads, who gets which part, one stream of noise, one ledger.

`join` adds a process to the group, and `form_team` returns the team. The leader draws, and writes the ledger; the
others receive what it drew and answer queries from a copy of the ledger in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from sordino.accounting.ledger import Ledger, Receipt
from sordino.bits import Tossed
from sordino.errors import InvalidInput, SordinoError
from sordino.noise import Source

T = TypeVar("T")


class Team:
    """A team of one: a single process leads, owns every record and talks to no one."""

    size = 1
    rank = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes the ledger and draws the noise; true for exactly one of the team."""
        return self.rank == 0

    def own(self, count: int) -> slice:
        """Return which of `count` things are this process's: consecutive, disjoint, as equal in number as possible."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the sums over all processes, the same bits on each of them."""
        return tensors

    def lead(self, action: Callable[[], T]) -> T:
        """Let the leader do something; its result, or its refusal, reaches all processes."""
        return action()

    def gather(self, value: T) -> list[T]:
        """Return every process's value, by rank."""
        return [value]

    def shared(self, make: Callable[[], Source]) -> Source:
        """One source of randomness for all, made by the leader."""
        return make()

    def secret(self, source: Source) -> Source:
        """Return the leader's own source behind a shared one: no other process learns what is drawn from it."""
        return source


class Ranks(Team):
    """The ranks of a `torch.distributed` process group; all of them run the same program.

    Guarantees: every method is one collective operation that all ranks join, so they stay in step. If a rank ends or
    cannot be reached, the step ends for all of them with an error.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(self._device)
        if not len(flat):
            return tensors
        with _one_line_errors():
            dist.all_reduce(flat, group=self._group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view(t.shape).to(t) for piece, t in zip(pieces, tensors, strict=True)]

    def lead(self, action: Callable[[], T]) -> T:
        answer: list[Any] = [None]
        if self.leads:
            try:
                answer = [action()]
            except SordinoError as error:
                answer = [_Refusal(error)]
        with _one_line_errors():
            dist.broadcast_object_list(answer, group=self._group, device=self._device, group_src=0)
        if isinstance(answer[0], _Refusal):
            raise answer[0].error
        result: T = answer[0]
        return result

    def gather(self, value: T) -> list[T]:
        everybody: list[Any] = [None] * self.size
        with _one_line_errors():
            dist.all_gather_object(everybody, value, group=self._group)
        return everybody

    def shared(self, make: Callable[[], Source]) -> Source:
        return SharedSource(self, make() if self.leads else None)

    def secret(self, source: Source) -> Source:
        return source.own if isinstance(source, SharedSource) else source


class SharedSource:
    """A source that gives every process the same values: sampling coins, projections, the noise of small releases.

    Only the leader has a stream, so nothing is drawn twice, and a seeded run draws the same with any number of
    processes. The noise of gradients, as large as the model, is not sent around: the leader adds it to its own part of
    the sum from `own`.
    """

    def __init__(self, team: Team, own: Source | None) -> None:
        self._team, self._own = team, own
        self.assumption = team.lead(lambda: self.own.assumption)

    @property
    def own(self) -> Source:
        """Return the leader's stream; no other process has one."""
        if self._own is None:
            raise InvalidInput("only rank 0 draws noise: noise of a second rank would not be accounted for")
        return self._own

    def uniform(self, size: int) -> NDArray[np.float64]:
        return self._team.lead(lambda: self.own.uniform(size))

    def toss(self, records: int, rate: float) -> Tossed:
        return self._team.lead(lambda: self.own.toss(records, rate))

    def directions(self, size: int) -> NDArray[np.float32]:
        return self._team.lead(lambda: self.own.directions(size))

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return self._team.lead(lambda: self.own.gaussian(receipt, size, std))


def form_team(group: dist.ProcessGroup | None = None) -> Team:
    """The team of `group`, or of all processes that ``torch.distributed`` was initialised with; else a team of one."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Team()
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise InvalidInput("this process is not in the group that it was given: give each process a group it is in")
    return Ranks(group) if dist.get_world_size(group) > 1 else Team()


def join(backend: str | None = None) -> None:
    """Join the process group of ``torchrun``; alone, without ``torchrun``, do nothing, so that a program runs as both.

    `backend` is "nccl" where there are GPUs and "gloo" elsewhere unless given. Use this in place of
    ``dist.init_process_group()`` where processes may be restarted: torchrun keeps one store of addresses for all
    restarts, so that a new process may find the address of one that was killed and wait for it until its time-out
    (pytorch issue 135712). Here each restart has its own keys. On several machines, whose counts of restarts may
    differ, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead. Noise never depends on how often a process was restarted.
    """
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept_by_agent or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(chosen)
        return
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(chosen, store=own, rank=rank, world_size=size)


def mirror_ledger(team: Team, ledger: Ledger) -> Ledger:
    """Return the leader's own ledger; the others get one in memory with the same events, and add what they are told.

    Guarantees: `guarantee()` gives the same answer on every rank without asking the leader.
    """
    if team.size == 1:
        return ledger
    header, events, said = team.lead(
        lambda: (dict(ledger.header), [event for _, event in ledger.history()], ledger.declared("assumption"))
    )
    if team.leads:
        return ledger
    copy = Ledger.in_memory(run_id=header["run_id"], header=header)
    for event in events:  # in order: events before a plan are priced separately
        copy.charge(event)
    for line in said:
        copy.declare("assumption", line)
    return copy


@dataclass(frozen=True)
class _Refusal:
    """An error of the leader, on its way to the others."""

    error: SordinoError


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Say in one line that the team is broken: torch's own errors are about sockets."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise SordinoError(
            f"another process of this run ended or cannot be reached ({reason}): start all of them again, as "
            "`torchrun --max-restarts` does; private.resume continues from the last save"
        ) from error
