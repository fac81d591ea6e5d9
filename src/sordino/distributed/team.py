"""The processes that take a step together: who leads, which part is whose, and the few words that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sordino.distributed.source import Shared
from sordino.errors import InvalidInput, SordinoError
from sordino.noise import Source

T = TypeVar("T")


class Team:
    """A team of one: a single process leads, owns every record and has nobody to talk to."""

    size = 1
    rank = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes the ledger and draws the noise; true for exactly one of the team."""
        return self.rank == 0

    def own(self, count: int) -> slice:
        """Which of `count` things are this process's: consecutive ones, disjoint, as many for everybody as can be."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """The sums over all processes, the same bits on each of them."""
        return tensors

    def lead(self, action: Callable[[], T]) -> T:
        """Let the leader do it; its result, or its refusal, reaches everybody."""
        return action()

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank."""
        return [value]

    def shared(self, make: Callable[[], Source]) -> Source:
        """One source of randomness for all, made by the leader."""
        return make()

    def secret(self, source: Source) -> Source:
        """The leader's own source behind a shared one: what is drawn from it nobody else hears of."""
        return source


class Ranks(Team):
    """The ranks of a `torch.distributed` process group; all of them run the same program.

    Guarantees: every method is one collective operation that all ranks join, so that they stay in step; a rank that
    ends, or cannot be reached, ends the step for all of them with an error.
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
        return Shared(self, make() if self.leads else None)

    def secret(self, source: Source) -> Source:
        return source.own if isinstance(source, Shared) else source


def team_of(group: dist.ProcessGroup | None = None) -> Team:
    """The team of `group`, or of all processes that ``torch.distributed`` was initialised with; else a team of one."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Team()
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise InvalidInput("this process is not in the group that it was given: give each process a group it is in")
    return Ranks(group) if dist.get_world_size(group) > 1 else Team()


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
            "`torchrun --max-restarts` does; private.resume goes on from the last save"
        ) from error
