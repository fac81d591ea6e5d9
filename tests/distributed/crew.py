"""Runs scenarios in crews of several processes and stores what each rank found.

A process of its own imports torch once and forks all ranks: starting every rank afresh would take most of the time.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[Path], Any]


def join(directory: Path, rank: int, size: int) -> None:
    """Form a process group over a file."""
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))


def fork(directory: Path, rank: int, size: int, works: list[Work]) -> int:
    """Start one rank that does all `works` in turn and stores each result, or the traceback of its error."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if size > 1:
            join(directory, rank, size)
        for work in works:
            result = work(directory / work.__name__)
            (directory / f"{work.__name__}-{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:  # noqa: BLE001 - whatever ended this rank, the test must say so
        (directory / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def run(directory: Path, size: int, works: list[Work]) -> None:
    """Let a crew of `size` do `works` and wait for all of them."""
    for work in works:
        (directory / work.__name__).mkdir(parents=True)
    for child in [fork(directory, rank, size, works) for rank in range(size)]:
        os.waitpid(child, 0)


def found(directory: Path, name: str) -> list[Any]:
    """What each rank that lived returned; fails with the tracebacks if one did not."""
    errors = "\n".join(path.read_text() for path in sorted(directory.glob("error-*")))
    assert not errors, errors
    return [pickle.loads(path.read_bytes()) for path in sorted(directory.glob(f"{name}-*"))]


def main(root: Path, module: str) -> None:
    scenarios = import_module(module)
    scenarios.warm()
    for name, (size, works) in scenarios.CREWS.items():
        run(root / name, size, works)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
