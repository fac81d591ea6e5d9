"""Joining the other processes that ``torchrun`` started, also after a restart."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


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
