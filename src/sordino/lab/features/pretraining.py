"""How networks learn from invented pictures, and where they are kept: once made, a network is a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from sordino.lab.data.cache import make_once
from sordino.lab.features.scattering import progress_bar

Network = TypeVar("Network", bound=nn.Module)
Losses = Callable[[], Tensor]
"""One step's loss on new pictures."""


def keep_network(
    key: object, folder: Path, build: Callable[[], Network], learn: Callable[[], Network], doing: str
) -> Network:
    """The network that ``learn()`` made the first time, in eval mode; `key` (by its repr) names its file in `folder`.

    ``build()`` makes one of the same shape, whose weights are overwritten. The caller's random state is left alone.
    """
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.pt"

    def make(part: Path) -> None:
        whole = BytesIO()  # torch hides that a disk is full; Path does not
        with torch.random.fork_rng(), torch.enable_grad():
            torch.save(learn().state_dict(), whole)
        part.write_bytes(whole.getvalue())

    make_once(path, make, doing)
    with torch.random.fork_rng():
        network = build()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def descend(network: nn.Module, loss: Losses, *, steps: int, rate: float, title: str, quiet: bool) -> None:
    """Train by SGD with momentum; the rate rises to `rate` in a fifth of the steps, and then falls to zero."""
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    rises = max(0.2, 2 / (steps + 1))  # of fewer steps a fifth would be none, by which torch divides
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=rises)
    with progress_bar(quiet) as progress:
        task = progress.add_task(title, total=steps)
        for _ in range(steps):
            found = loss()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            rates.step()
            progress.advance(task)


def halve_precision() -> torch.autocast:
    """Products in bfloat16 where the processor multiplies it; elsewhere it is emulated, which is slower."""
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported())
