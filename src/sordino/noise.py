"""Where randomness comes from, and which shape noise has.

Sources are secure by default, seeded for experiments, and never torch's global generator. The plain noise is
`Independent`. Gaussian noise can only be drawn against a ledger receipt, so nothing can be released before it is
recorded (law 5), and a receipt older than the last one used is refused (law 10).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from dp_accounting import DpEvent
from numpy.typing import NDArray
from randomgen import AESCounter
from torch import Tensor

from sordino import bits
from sordino.accounting.ledger import Receipt
from sordino.bits import Normals, Tossed
from sordino.errors import InvalidInput

PIECE = 2**16
"""Entries of noise at a time: a large model needs no second copy, and they are added while they are in the cache."""
MANY = 2**20
"""With this many entries or more, several threads add noise; fewer are done before a second thread has started."""
MOST_WORKERS = 8
"""More threads than this would spend more time waiting for Python's lock than working."""
NATIVE = (torch.float32, torch.float64)
"""What numpy can add doubles to."""
STORE = 2**14
FEW = 2**12
"""Fewer normals than this come from a store, because making a few takes as long as making thousands."""
WITHOUT_DOUBLES = {"mps"}
"""Kinds of devices without double precision: single precision is used there instead, or the host."""
ZEROS = memoryview(bytes(2**18))
"""Zeros to encrypt: the result is the cipher's key stream."""

Flat = TypeVar("Flat", Tensor, NDArray[Any])
"""Numbers in a row."""


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

    def toss(self, records: int, rate: float) -> Tossed:
        """Return which of `records` join a draw, and their coins: a record joins if its coin is below `rate`."""
        ...

    def directions(self, size: int) -> NDArray[np.float32]:
        """Independent standard normals for random projections: coins like any other, not the noise of a release."""
        ...


def require_source(source: object) -> None:
    """Refuse, before anything is spent, a user's source that lacks a method that a run may call."""
    if missing := [name for name in ("uniform", "toss", "directions", "gaussian") if not hasattr(source, name)]:
        raise InvalidInput(
            f"source of type {type(source).__name__} has no {missing[0]}(): give it one, or build on Secure, which has"
        )


class Settling(ABC):
    """A source that sees every value before and after its noise and says what leaves: for audits, never for training.

    It is a class, not a method that any source might have: a coincidence of names must not change what is released.
    """

    @abstractmethod
    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        """Return what leaves in place of `value`."""
        ...


class _Stream(ABC):
    """What secure and seeded sources share: each noise belongs to a receipt, and no noise is drawn twice."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._last_receipt = 0

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            "a noise source cannot be copied or sent elsewhere: its noise would be drawn twice; make a new one"
        )

    def _require_own(self) -> None:
        """Refuse a process that was forked from the source's own process: both would draw the same noise."""
        if os.getpid() != self._process:
            raise InvalidInput(
                "a noise source was used in a forked process: its noise would be drawn twice; make a new one"
            )

    def uniform(self, size: int) -> NDArray[np.float64]:
        self._require_own()
        return self._uniform(size)

    def toss(self, records: int, rate: float) -> Tossed:
        self._require_own()
        return bits.toss(records, rate, self.uniform, self._words)

    def directions(self, size: int) -> NDArray[np.float32]:
        self._require_own()
        return self._directions(size)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self._require_paid(receipt)
        return torch.from_numpy(self._normals(size, std))

    def _require_paid(self, receipt: Receipt) -> None:
        """Refuse a receipt older than the last one used, and a forked process."""
        if receipt.sequence < self._last_receipt:
            raise InvalidInput(
                f"receipt {receipt.sequence} is older than receipt {self._last_receipt}, which was used already: "
                "charge the ledger again for another release"
            )
        self._last_receipt = receipt.sequence
        self._require_own()

    @abstractmethod
    def _uniform(self, size: int) -> NDArray[np.float64]: ...

    @abstractmethod
    def _words(self, size: int) -> NDArray[np.uint64]:
        """Return numbers of 64 random bits."""

    @abstractmethod
    def _directions(self, size: int) -> NDArray[np.float32]: ...

    @abstractmethod
    def _normals(self, size: int, std: float) -> NDArray[np.float64]: ...


class _Cipher:
    """One key stream of OpenSSL's AES-128 in counter mode, and the normals made from it; for one thread."""

    def __init__(self) -> None:
        key, start = secrets.token_bytes(16), secrets.token_bytes(16)
        self._encryptor = Cipher(algorithms.AES128(key), modes.CTR(start)).encryptor()
        self.normals = Normals(self.fill)
        self._store, self._used = np.empty(STORE), STORE

    def fill(self, drawn: NDArray[np.uint8]) -> None:
        """Overwrite bytes with the next ones of the stream: zeros, encrypted."""
        whole = drawn.data
        for start in range(0, len(whole), len(ZEROS)):
            part = whole[start : start + len(ZEROS)]
            self._encryptor.update_into(ZEROS[: len(part)], part)

    def take_few(self, size: int, std: float) -> NDArray[np.float64]:
        """Return at most `FEW` normals from a store that is filled in one go; none is given out twice."""
        if self._used + size > STORE:
            self.normals.draw(self._store)
            self._used = 0
        self._used += size
        return self._store[self._used - size : self._used] * std


class Secure(_Stream):
    """Cryptographic randomness under fresh keys from the operating system, the default.

    Guarantees: no one without the keys can predict or replay the stream; every process and every restart has new keys.
    Threads may draw at the same time: each has its own key stream while it draws.
    """

    assumption = "noise and sampling from an AES-128 counter stream keyed by the operating system"

    def __init__(self) -> None:
        super().__init__()
        self._idle = [_Cipher()]

    @contextmanager
    def _cipher(self) -> Iterator[_Cipher]:
        """Take a stream that no other thread is using: an idle one, or a new one under a new key."""
        try:
            cipher = self._idle.pop()  # one operation: no two threads get the same
        except IndexError:
            cipher = _Cipher()
        yield cipher
        self._idle.append(cipher)  # not after an error, which may have left it half-way: a new key takes its place

    def _uniform(self, size: int) -> NDArray[np.float64]:
        return bits.to_uniforms(self._words(size))

    def _words(self, size: int) -> NDArray[np.uint64]:
        with self._cipher() as cipher:
            return bits.draw_words(cipher.fill, size)

    def _directions(self, size: int) -> NDArray[np.float32]:
        return self._normals(size, 1.0).astype(np.float32)

    def _normals(self, size: int, std: float) -> NDArray[np.float64]:
        with self._cipher() as cipher:
            if size <= FEW:
                return cipher.take_few(size, std)
            noise = np.empty(size)
            cipher.normals.draw(noise, std)
            return noise

    def overwrite(self, receipt: Receipt, out: NDArray[np.float64], std: float) -> Tensor:
        """Do the same as `gaussian`, in the caller's memory."""
        self._require_paid(receipt)
        with self._cipher() as cipher:
            cipher.normals.draw(out, std)
        return torch.from_numpy(out)


class Seeded(_Stream):
    """Repeatable randomness for experiments: anyone who knows the seed can remove the noise.

    `incarnation` counts how often the run was opened, and `begun` how many events its ledger held then, so neither
    resuming nor a second run on one ledger replays a stream (law 10). `stream` counts the runs of one opening: it is
    the only difference between two runs that were built before either charged anything.
    """

    def __init__(self, seed: int, incarnation: int = 1, begun: int = 0, stream: int = 0) -> None:
        text = (
            f"sordino/{seed}/{incarnation}"
            + (f"/{begun}" if begun or stream else "")
            + (f"/{stream}" if stream else "")
        )
        digest = hashlib.sha256(text.encode()).digest()
        super().__init__()
        self._generator = np.random.Generator(AESCounter(key=int.from_bytes(digest[:16], "big")))
        self.assumption = f"noise is SEEDED (seed {seed}): an experiment, no protection against whoever knows the seed"

    def _uniform(self, size: int) -> NDArray[np.float64]:
        return self._generator.random(size)

    def _words(self, size: int) -> NDArray[np.uint64]:
        return self._generator.integers(2**64, size=size, dtype=np.uint64)

    def _directions(self, size: int) -> NDArray[np.float32]:
        return self._generator.standard_normal(size, dtype=np.float32)

    def _normals(self, size: int, std: float) -> NDArray[np.float64]:
        noise = self._generator.standard_normal(size)
        noise *= std
        return noise


class Noise(Protocol):
    """The noise of a recipe: its shape over the entries of a sum and over the steps of a run, and what that costs.

    A step passes it the exact sums and the receipt; only the result of `add` is released.
    """

    def start(self) -> Any:
        """Return what it remembers from step to step; a resumed run gets a fresh state (law 10)."""
        return None

    def for_steps(self, steps: int, momentum: float = 0.0) -> Noise:
        """Return this noise, prepared for this many steps of an optimizer with `momentum`; most noise is unchanged."""
        return self

    def event(self, answer: DpEvent) -> DpEvent:
        """Return the price of an answer that would cost `answer` with independent noise of the same deviation."""
        ...

    def add(self, source: Source, receipt: Receipt, sums: list[Tensor], std: float, state: Any) -> None:
        """Add noise of deviation `std` to every entry of the sums: in place, or in their place in the list."""
        ...


@dataclass(frozen=True)
class Independent(Noise):
    """One independent normal on every entry, fresh at every step: the Gaussian mechanism."""

    def event(self, answer: DpEvent) -> DpEvent:
        return answer

    def add(self, source: Source, receipt: Receipt, sums: list[Tensor], std: float, state: Any) -> None:
        perturb(source, receipt, sums, std)


def widen(value: Tensor) -> Tensor:
    """Return the value in double precision; on the host where the device has none."""
    return (value.cpu() if value.device.type in WITHOUT_DOUBLES else value).double()


def add_noise(source: Gaussians, receipt: Receipt, value: Tensor, std: float) -> Tensor:
    """Add one independent normal of deviation `std` to every entry of `value`, in float64; on the host if necessary."""
    exact = widen(value)
    noise = source.gaussian(receipt, value.numel(), std).to(exact.device)
    return settle(source, receipt, exact, exact + noise.view(value.shape))


def perturb(source: Source, receipt: Receipt, tensors: Iterable[Tensor], std: float) -> None:
    """Add one independent normal of deviation `std` to every entry of contiguous tensors, in place.

    They are added in double precision; only the noised entry is rounded to the precision of its tensor.
    """
    held = list(tensors)
    before = _flat(held) if isinstance(source, Settling) else None

    if isinstance(source, Secure) and _are_simple(source, held):
        arrays = [tensor.view(-1).numpy() for tensor in held]  # numpy adds mixed precisions without a copy of either
        if (size := sum(map(len, arrays))) <= FEW:
            _add_all(arrays, source.gaussian(receipt, size, std).numpy())
        else:
            _perturb_arrays(source, receipt, arrays, std, count_workers(source, held))
    else:
        for pieces in _groups([tensor.view(-1) for tensor in held]):
            sizes = [len(piece) for piece in pieces]
            noise = source.gaussian(receipt, sum(sizes), std)
            if all(piece.device == pieces[0].device for piece in pieces):
                noise = _send(noise, pieces[0].device)
            for piece, drawn in zip(pieces, noise.split(sizes), strict=True):
                _add(piece, drawn)
    if before is not None:
        released = settle(source, receipt, before, _flat(held))
        for tensor, piece in zip(held, released.split([tensor.numel() for tensor in held]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _perturb_arrays(source: Secure, receipt: Receipt, arrays: list[NDArray[Any]], std: float, workers: int) -> None:
    """Add noise to flat arrays with so many threads, including this one; one thread takes each group of pieces.

    Every thread has its own key stream, and memory that it uses again: getting new memory takes as long as the noise.
    """
    groups, longest = list(_groups(arrays)), min(PIECE, sum(map(len, arrays)))

    def work() -> None:
        scratch = np.empty(longest)
        while True:
            try:
                pieces = groups.pop()  # one operation: no two threads get the same
            except IndexError:
                return
            noise = scratch[: sum(map(len, pieces))]
            source.overwrite(receipt, noise, std)
            _add_all(pieces, noise)

    if workers == 1:
        work()
        return
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work) for _ in range(workers - 1)]
        work()
    for each in others:
        each.result()  # raises what it raised


def _add_all(pieces: list[NDArray[Any]], noise: NDArray[np.float64]) -> None:
    """Do ``pieces += noise`` in double precision; only the result is rounded."""
    start = 0
    for piece in pieces:
        end = start + len(piece)
        np.add(noise[start:end], piece, out=piece, casting="same_kind", dtype=np.float64)
        start = end


def count_workers(source: Source, tensors: list[Tensor]) -> int:
    """How many threads add noise at once: as many as torch has, for many entries on the host and a secure source.

    A seeded source has one stream, whose order must not depend on threads. A user's own source may not be safe to use
    from several threads.
    """
    several = _are_simple(source, tensors) and sum(t.numel() for t in tensors) >= MANY
    return min(MOST_WORKERS, torch.get_num_threads()) if several else 1


def _are_simple(source: Source, tensors: list[Tensor]) -> bool:
    """Whether the noise of a secure source is added on the host, by numpy alone."""
    return type(source) is Secure and all(t.device.type == "cpu" and t.dtype in NATIVE for t in tensors)


def _add(piece: Tensor, drawn: Tensor) -> None:
    """Do ``piece += drawn`` in double precision; only the result is rounded."""
    if piece.device.type == "cpu" and piece.dtype in NATIVE:
        _add_all([piece.numpy()], drawn.numpy())
    elif piece.device.type in WITHOUT_DOUBLES:
        piece += drawn.to(device=piece.device, dtype=piece.dtype)
    else:
        piece.copy_(drawn.to(piece.device) + piece)


def _send(noise: Tensor, device: torch.device) -> Tensor:
    """Copy the host's noise to the device of the sum in one go; with pinned memory the host need not wait."""
    if device.type == "cuda":
        return noise.pin_memory().to(device, non_blocking=True)
    return noise.to(device, torch.float32 if device.type in WITHOUT_DOUBLES else noise.dtype)


def settle(source: Gaussians, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
    """Return what is released in place of `value`; all code that adds noise passes its result through here.

    A `Settling` source sees both and decides: `sordino.audit.conformance` records the releases of one run and uses them
    in place of those of another.
    """
    return source.settle(receipt, value, released) if isinstance(source, Settling) else released


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([widen(tensor.reshape(-1)) for tensor in tensors]) if tensors else torch.zeros(0).double()


def _groups(flats: Iterable[Flat]) -> Iterator[list[Flat]]:
    """Cut flat tensors or arrays into views, in order, and group them so that a group has at most `PIECE` entries."""
    group: list[Flat] = []
    size = 0
    for piece in (flat[i : i + PIECE] for flat in flats for i in range(0, len(flat), PIECE)):
        if size + len(piece) > PIECE:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    if group:
        yield group
