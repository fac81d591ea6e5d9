"""Features that are computed once and kept on disk, named by a checksum of everything that decides them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sordino.data.download import exclusive


def kept(folder: Path, what: object, inputs: tuple[Tensor, ...], make: Callable[[Path], None]) -> Tensor:
    """What ``make(path)`` wrote as .npy the first time; `what` (by its repr) and `inputs` name the file in `folder`.

    Of two processes one computes and the other waits; a file takes its name only when it is whole.
    """
    digest = hashlib.sha256(repr((what, [(tuple(x.shape), str(x.dtype)) for x in inputs])).encode())
    for tensor in inputs:
        digest.update(tensor.detach().contiguous().numpy().data)
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    with exclusive(path.with_suffix(".lock")):
        if not path.exists():
            part = path.with_suffix(".part")
            make(part)
            part.replace(path)
    # Copy on write: torch wants writable memory, and nobody's writes may reach the file.
    return torch.from_numpy(np.load(path, mmap_mode="c"))
