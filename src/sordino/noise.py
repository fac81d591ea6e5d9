"""Where randomness comes from, and which shape noise has.

Sources are secure by default, seeded for experiments, never torch's global generator; the plain noise is `Independent`.
Gaussian noise can only be drawn against a ledger receipt, so that nothing is released that was not recorded first
(law 5), and a receipt older than the last one used is refused (law 10).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from randomgen import AESCounter
from torch import Tensor

from sordino.accounting.ledger import Receipt
from sordino.errors import InvalidInput

PIECE = 2**16  # entries of noise at a time: they stay in the processor's cache, and a large model needs no second copy


class Gaussians(Protocol):
    """Where Gaussian noise comes from."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        """`size` independent normals of deviation `std` in float64, paid for by `receipt`."""
        ...


class Source(Gaussians, Protocol):
    """A stream of independent randomness."""

    @property
    def assumption(self) -> str:
        """What a guarantee must say about this source."""
        ...

    def uniform(self, size: int) -> NDArray[np.float64]:
        """Independent uniforms in [0, 1), for sampling coins."""
        ...

    def directions(self, size: int) -> NDArray[np.float32]:
        """Independent standard normals for random projections: coins like any other, not the noise of a release."""
        ...


class Settling(ABC):
    """A source that sees every value before and after its noise and says what leaves: for audits, never for training.

    It is a class and not a method that any source might have: a name by chance must not change what is released.
    """

    @abstractmethod
    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        """What leaves in place of `value`."""
        ...


class _Stream:
    """AES-128 in counter mode: as unpredictable as the cipher, and faster than ChaCha where the processor has AES."""

    def __init__(self, key: int) -> None:
        self._generator = np.random.Generator(AESCounter(key=key))
        self._process = os.getpid()
        self._last_receipt = 0

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            "a noise source cannot be copied or sent elsewhere: its noise would be drawn twice; make a new one"
        )

    def _fresh(self) -> np.random.Generator:
        """The generator, unless this process was forked from the one that made it: both would draw the same noise."""
        if os.getpid() != self._process:
            raise InvalidInput(
                "a noise source was used in a forked process: its noise would be drawn twice; make a new one"
            )
        return self._generator

    def uniform(self, size: int) -> NDArray[np.float64]:
        return self._fresh().random(size)

    def directions(self, size: int) -> NDArray[np.float32]:
        return self._fresh().standard_normal(size, dtype=np.float32)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        if receipt.sequence < self._last_receipt:
            raise InvalidInput(
                f"receipt {receipt.sequence} is older than receipt {self._last_receipt}, which was used already: "
                "charge the ledger again for another release"
            )
        self._last_receipt = receipt.sequence
        noise = self._fresh().standard_normal(size)
        noise *= std
        return torch.from_numpy(noise)


class Secure(_Stream):
    """Cryptographic randomness under a fresh key from the operating system, the default.

    Guarantees: nobody without the key can predict or replay the stream; every process and every restart has a new key.
    """

    assumption = "noise and sampling from an AES-128 counter stream keyed by the operating system"

    def __init__(self) -> None:
        super().__init__(secrets.randbits(128))


class Seeded(_Stream):
    """Repeatable randomness for experiments: whoever knows the seed can remove the noise.

    `incarnation` counts how often the run was opened, and `begun` how many events its ledger held then, so that neither
    resuming nor a second run on one ledger replays a stream (law 10). `stream` counts the runs on one opening: two that
    were built before either has charged anything differ in it alone.
    """

    def __init__(self, seed: int, incarnation: int = 1, begun: int = 0, stream: int = 0) -> None:
        text = (
            f"sordino/{seed}/{incarnation}"
            + (f"/{begun}" if begun or stream else "")
            + (f"/{stream}" if stream else "")
        )
        digest = hashlib.sha256(text.encode()).digest()
        super().__init__(int.from_bytes(digest[:16], "big"))
        self.assumption = f"noise is SEEDED (seed {seed}): an experiment, no protection against whoever knows the seed"


class Noise(Protocol):
    """The noise of a recipe: its shape over the entries of a sum and over the steps of a run, and what that costs.

    Whoever takes a step passes it the exact sums and the receipt; nothing leaves but what `add` makes of them.
    """

    def start(self) -> Any:
        """What it remembers from step to step; a resumed run gets a fresh one (law 10)."""
        return None

    def event(self, answer: DpEvent) -> DpEvent:
        """What an answer costs that would cost `answer` with independent noise of the same deviation."""
        ...

    def add(self, source: Source, receipt: Receipt, sums: list[Tensor], std: float, state: Any) -> None:
        """Add noise of deviation `std` to every entry of the sums, in place."""
        ...


@dataclass(frozen=True)
class Independent(Noise):
    """One independent normal on every entry, fresh at every step: the Gaussian mechanism."""

    def event(self, answer: DpEvent) -> DpEvent:
        return answer

    def add(self, source: Source, receipt: Receipt, sums: list[Tensor], std: float, state: Any) -> None:
        perturb(source, receipt, sums, std)


def add_noise(source: Gaussians, receipt: Receipt, value: Tensor, std: float) -> Tensor:
    """`value` with one independent normal of deviation `std` on every entry, in float64."""
    exact = value.double()
    noise = source.gaussian(receipt, value.numel(), std).to(exact.device)
    return settle(source, receipt, exact, exact + noise.view(value.shape))


def perturb(source: Source, receipt: Receipt, tensors: Iterable[Tensor], std: float) -> None:
    """Add one independent normal of deviation `std` to every entry of contiguous tensors, in place."""
    held = list(tensors)
    before = _flat(held) if isinstance(source, Settling) else None
    for pieces in _groups(held):
        sizes = [piece.numel() for piece in pieces]
        noise = source.gaussian(receipt, sum(sizes), std)
        for piece, drawn in zip(pieces, noise.split(sizes), strict=True):
            piece += drawn.to(device=piece.device, dtype=piece.dtype)
    if before is not None:
        released = settle(source, receipt, before, _flat(held))
        for tensor, piece in zip(held, released.split([tensor.numel() for tensor in held]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def settle(source: Gaussians, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
    """What leaves in place of `value`: `released`, which every place that adds noise passes through here.

    A `Settling` source sees both and decides: that of `sordino.audit.conformance`, which records the releases of a run
    and puts them in place of those of another.
    """
    return source.settle(receipt, value, released) if isinstance(source, Settling) else released


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors]) if tensors else torch.zeros(0).double()


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Flat views that cover the tensors in their order, grouped so that each group holds at most `PIECE` entries."""
    group: list[Tensor] = []
    for piece in (piece for tensor in tensors for piece in tensor.view(-1).split(PIECE)):
        if sum(held.numel() for held in group) + piece.numel() > PIECE:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
