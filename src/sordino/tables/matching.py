"""Seeded noise for comparing runs on one table: with one seed, releases that two runs have in common get equal noise.

A public schema saves some releases and some bins. If a run drew all its noise from one stream, every number after the
first difference would change, and two runs would differ by luck far more than by what is compared. Here every part of a
release, such as the sum over one bin of one column, has its own stream, named by the seed, the release and the part.
The default, `Secure` noise, does not do this.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.accounting.ledger import Receipt
from sordino.noise import Seeded, Source, add_noise

Parts = Sequence[tuple[str, int]]
"""The parts of a release, and how many of its numbers belong to each."""

_UNNAMED = re.compile(r"^x(?=\d+(/|$))")


class Matched(Seeded):
    """Repeatable noise for experiments, with a separate stream for every part of a release.

    Guarantees: nothing is drawn twice (law 10): a stream that was used before continues where it stopped.
    """

    def __init__(self, seed: int, incarnation: int = 1, begun: int = 0, stream: int = 0) -> None:
        super().__init__(seed, incarnation, begun, stream)
        self._run = f"sordino/{seed}/{incarnation}/{begun}/{stream}"
        self._streams: dict[str, np.random.Generator] = {}
        self._next: list[tuple[str, int]] = []

    def expect(self, release: str, parts: Parts) -> None:
        """Say what the next noise is for; an array's column x0 is column 0 of the same records in a frame."""
        self._next = [(f"{release}/{_UNNAMED.sub('', name)}", size) for name, size in parts]

    def _normals(self, size: int, std: float) -> NDArray[np.float64]:
        parts, self._next = self._next, []
        if not parts or sum(count for _, count in parts) != size:
            return super()._normals(size, std)
        return std * np.concatenate([self._open(name).standard_normal(count) for name, count in parts])

    def _open(self, name: str) -> np.random.Generator:
        if name not in self._streams:
            key = hashlib.sha256(f"{self._run}/{name}".encode()).digest()[:16]
            self._streams[name] = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))
        return self._streams[name]


def add_matched_noise(
    source: Source, receipt: Receipt, value: torch.Tensor, std: float, release: str, parts: Parts
) -> torch.Tensor:
    """`add_noise` that tells a `Matched` source what the noise is for; the numbers of a part stand together."""
    if isinstance(source, Matched):
        source.expect(release, parts)
    return add_noise(source, receipt, value, std)
