"""Shields the random numbers that a loss, a dataset or a whole trial draws from torch, NumPy and Python.

Dropout takes the masks of a batch from one stream, row after row. Anyone who knows the state of that stream (after
``torch.manual_seed(0)``, or in a new process, where torch's seed is a constant) knows the masks of all records. One
extra record then gives every record after it another mask, and the sum moves by far more than one clipped gradient.
With a secret seed all masks are equally likely with and without the record, and the sum moves by one record again.

These generators belong to the whole process. So only one thread at a time may seed them: a model that is probed in
another thread, with seeds that everybody knows, would give its numbers to a step that is taken meanwhile.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from sordino.errors import SordinoError, UnsupportedModel

PATIENCE = 600.0
"""Seconds that a thread waits for another one; a loop that was given up may hold the generators for longer."""


class _Turns:
    """Whose the generators are: one thread's at a time, which may take them again and again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None
        self._taken: set[object] = set()

    def take(self) -> object:
        """Wait for the other threads, or for them to end; what is returned is to be given back."""
        me = threading.current_thread()
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(me), PATIENCE):
                raise SordinoError(
                    f"another thread has been within a step or a loop for {PATIENCE:g} seconds, and random generators "
                    "belong to the whole process: end its loop, or train in processes of their own"
                )
            if self._owner is not me:
                self._owner, self._taken = me, set()
            self._taken.add(turn := object())
        return turn

    def _is_free(self, me: threading.Thread) -> bool:
        return self._owner is None or self._owner is me or not self._owner.is_alive()

    def give_back(self, turn: object) -> None:
        """From any thread: a loop that was given up may be closed by another one."""
        with self._changed:
            if turn in self._taken:
                self._taken.remove(turn)
                if not self._taken:
                    self._owner = None
                    self._changed.notify_all()


_turns = _Turns()


def _forget_turns() -> None:
    """In a forked process, which has the forking thread alone."""
    global _turns  # noqa: PLW0603
    _turns = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turns)


@contextmanager
def in_turn() -> Iterator[None]:
    """A block in which no other thread is in such a block, to seed the generators of torch, NumPy and Python."""
    turns = _turns
    turn = turns.take()
    try:
        yield
    finally:
        turns.give_back(turn)


@contextmanager
def shield_chance(seed: int | None) -> Iterator[None]:
    """Give a trial its own generators of torch, NumPy and Python, and leave the caller's as they were.

    The caller's generators may have been seeded by anyone. A trial's initial weights, drawn from them, would reveal how
    many trials came before it. CUDA's generators are restored if CUDA was in use before.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    start = secrets.randbits(63) if seed is None else seed % 2**63
    with in_turn():
        of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(start)
                np.random.seed(secrets.randbits(32) if seed is None else seed % 2**32)  # noqa: NPY002
                random.seed(secrets.randbits(256) if seed is None else seed)
                yield
        finally:
            np.random.set_state(of_numpy)  # noqa: NPY002
            random.setstate(of_python)


@contextmanager
def set_numpy_aside() -> Iterator[None]:
    """A block with another NumPy generator, which may be seeded freely; afterwards the old one is back.

    Use it within a block that is `in_turn`.
    """
    ours, state = get_bit_generator(), np.random.get_state()  # noqa: NPY002
    set_bit_generator(np.random.MT19937(0))
    try:
        yield
    finally:
        set_bit_generator(ours)
        np.random.set_state(state)  # noqa: NPY002 - with the normal that it has in store


class SecretChance:
    """A block in which these generators have fresh secret seeds; afterwards they are as they were.

    Entering it again inside the block changes nothing, unless somebody seeded torch meanwhile. With ``secret=False`` it
    does nothing: noise that can be repeated protects no one anyway. It costs a step about 50 µs. To stay that cheap,
    NumPy's generator is swapped as a whole, which drops one normal that it may have in store.
    """

    def __init__(self) -> None:
        self._numpy: np.random.MT19937 | None = None
        self._foreign: np.random.MT19937 | None = None
        self._depth = 0
        self._seed: int | None = None
        self._others: Sequence[torch.Generator] = ()
        self._back = ExitStack()

    @property
    def is_secret(self) -> bool:
        """Whether torch draws from the seeds that the block gave it, and nobody seeded NumPy.

        Python's generator does not tell whether it was seeded; the probe of the model sees that.
        """
        return self._has_torch and self._has_numpy

    @property
    def _has_torch(self) -> bool:
        seeds = [torch.default_generator.initial_seed(), *(each.initial_seed() for each in self._others)]
        return self._seed is not None and all(seed == self._seed for seed in seeds)

    @property
    def _has_numpy(self) -> bool:
        return self._numpy is not None and self._numpy.seed_seq is not None  # np.random.seed() leaves none

    def enter(self, device: torch.device, *, secret: bool = True) -> None:
        """Begin the block, for a model on `device`."""
        if secret and not self.is_secret:  # otherwise a loop that an error ended is still inside its block
            try:
                self._save(device)
                self._renew(device)
            except BaseException:
                self.end()
                raise
        self._depth += 1

    def _save(self, device: torch.device) -> None:
        """Note where the generators stand, once for the whole block."""
        if self._seed is not None:
            return
        self._back.enter_context(in_turn())
        self._back.callback(random.setstate, random.getstate())
        self._back.callback(set_bit_generator, get_bit_generator())
        self._back.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        if device.type not in ("cpu", "meta"):
            every = range(torch.get_device_module(device.type).device_count())
            self._back.enter_context(torch.random.fork_rng(every, device_type=device.type))

    def _renew(self, device: torch.device) -> None:
        """Seed all generators with fresh secrets, on all devices of the model's kind, as it may be on any of them."""
        if self._numpy is None or not self._has_numpy:
            self._numpy = np.random.MT19937(secrets.randbits(256))
        self._seed = secrets.randbits(63)
        torch.default_generator.manual_seed(self._seed)
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device.type)
            getattr(module, "manual_seed_all", module.manual_seed)(self._seed)
            self._others = getattr(module, "default_generators", ())
        set_bit_generator(self._numpy)
        random.seed(secrets.randbits(256))

    @contextmanager
    def renewed(self, device: torch.device) -> Iterator[None]:
        """A part of the block that reads the user's dataset; fresh secrets follow it.

        The dataset may seed NumPy or Python. A record that is made from its own seed is harmless, but numbers that the
        loss then draws from that seed are not. So NumPy has another generator meanwhile. It is seeded again for each
        part, as `np.random.seed` does, because a new generator takes 20 times as long.
        """
        ours, self._foreign = get_bit_generator(), self._foreign or np.random.MT19937(0)
        try:
            set_bit_generator(self._foreign)
            np.random.seed(np.frombuffer(secrets.token_bytes(32), np.uint32))  # noqa: NPY002
            yield
        finally:
            set_bit_generator(ours)
        self._require("torch", self._has_torch)
        self._renew(device)

    def require_secret(self) -> None:
        """Refuse numbers drawn outside a block, or in a block in which somebody else seeded a generator."""
        self._require("torch", self._has_torch)
        self._require("NumPy", self._has_numpy)

    def _require(self, name: str, secret: bool) -> None:
        if not secret:
            raise UnsupportedModel(
                f"{name} was seeded within a step, by the loss or the dataset, so that what it draws for every record "
                "is known (this draw is paid for and was not released): leave manual_seed and seed out"
            )

    def leave(self) -> None:
        """End the block; outside a block, do nothing."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.end()

    def end(self) -> None:
        """End the block, however often it was entered."""
        self._depth, self._seed = 0, None
        self._back.close()
