"""Optimizers around optimizers: they change a noisy gradient before the proposal, or average the iterates after it.

A released gradient is public. Anything computed from it, from earlier gradients and from the resulting models is
post-processing and costs nothing (docs/proofs/post-processing.md). So these are torch optimizers like any other: pass
one to `Private` in place of the bare optimizer. They nest, and a checkpoint holds what they remember, because they keep
it in the state of the optimizer that they wrap.

    optimizer = LowPass(torch.optim.SGD(model.parameters(), lr=0.5))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.optimizers import run_closure


class NoiseAware(ABC):
    """An optimizer that uses the amount of noise in a gradient."""

    @abstractmethod
    def hear(self, deviation: float) -> None:
        """Hear the deviation of the noise on every entry of the next gradient: a public number."""
        ...


def tell_noise(optimizer: torch.optim.Optimizer, deviation: float) -> None:
    """Tell an optimizer that wants to know how much noise its next gradient has."""
    if isinstance(optimizer, NoiseAware):
        optimizer.hear(deviation)


def finish(optimizer: torch.optim.Optimizer) -> None:
    """Put the model to be returned in place of the one that was trained, if there are two."""
    if isinstance(optimizer, Proposer):
        optimizer.finish()


@contextmanager
def hold_final(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the model to be returned in place for a while, if there are two: to try it, or to save it."""
    with optimizer.final() if isinstance(optimizer, Proposer) else nullcontext():
        yield


class Proposer(torch.optim.Optimizer, NoiseAware):
    """An optimizer around `inner`, with its parameters, its settings and its state.

    A subclass changes gradients before the step of `inner` (`refine`), or the parameters after it (`follow`). What it
    remembers is in the state of `inner` beside `inner`'s own, so anything that saves, restores, rolls back or shards
    one does it to both.

    Guarantees: reads gradients and parameters, no record. A step that fails changes nothing that is remembered.
    """

    inner: torch.optim.Optimizer
    moves: ClassVar[bool] = False
    """Whether it trains a different model from the one it returns."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        held: object = inner
        while isinstance(held, Proposer):
            if type(held) is type(self):
                raise InvalidInput(f"{type(self).__name__} stands around another one: give one of them its settings")
            held = held.inner
        if not isinstance(held, torch.optim.Optimizer) or isinstance(held, torch.optim.LBFGS):
            raise InvalidInput(
                f"{type(self).__name__} was given a {type(held).__name__}: it stands around an optimizer of torch that "
                "asks for one gradient per step, such as torch.optim.SGD(model.parameters(), lr=0.5)"
            )
        self._bound = False
        super().__init__(inner.param_groups, {})
        self.inner, self._bound = inner, True
        self.defaults = inner.defaults
        self.state, self.param_groups = inner.state, inner.param_groups

    # -- what a subclass does ------------------------------------------------------------------------------------

    def refine(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> dict[str, Any]:
        """Change the gradient of `parameter`, or the parameter, before the inner step; returns what to remember."""
        return {}

    def follow(self, parameter: nn.Parameter, remembered: dict[str, Any]) -> None:
        """Change the parameter or what is remembered after the inner step."""
        return

    def gain(self, steps: int) -> float:
        """Return the noise in a changed gradient over that in the released one, as deviations, after some steps."""
        return 1.0

    def give(self, parameter: nn.Parameter) -> Tensor:
        """Return what is to be returned in place of `parameter`."""
        return self.inner.give(parameter) if isinstance(self.inner, Proposer) else parameter.detach()

    @property
    def holds_two(self) -> bool:
        """Whether this optimizer or `inner` trains a different model from the one to be returned."""
        return self.moves or (isinstance(self.inner, Proposer) and self.inner.holds_two)

    # -- what an optimizer does ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of `inner`, on the changed gradients."""
        result = run_closure(closure)
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Reading must not make entries: some optimizers take an empty state for the beginning.
        notes = [self.refine(p, self.state.get(p, {})) for p in held]
        self.inner.step()
        for parameter, note in zip(held, notes, strict=True):
            self.state[parameter].update(note)
            self.follow(parameter, self.state[parameter])
        return result

    def hear(self, deviation: float) -> None:
        taken = max((int(entry.get(self._count, 0)) for entry in self.state.values()), default=0)
        tell_noise(self.inner, deviation * self.gain(taken))

    @contextmanager
    def final(self) -> Iterator[None]:
        """Put the model to be returned in place of the one that is trained for a while, to try it or to save it."""
        held = [p for group in self.param_groups for p in group["params"]]
        trained = [p.detach().clone() for p in held]
        self.finish()
        try:
            yield
        finally:
            _write(held, trained)

    def finish(self) -> None:
        """Put the model to be returned in place permanently; `Private` does this after the last step."""
        held = [p for group in self.param_groups for p in group["params"]]
        _write(held, [self.give(p) for p in held])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._bound:
            self.inner.add_param_group(param_group)  # the list of groups is one
        else:
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Do what torch does for a copy or a loaded state; `inner` continues with the same state."""
        super().__setstate__(state)
        self.inner.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    @property
    def _count(self) -> str:
        """Return the name under which the number of steps is remembered."""
        return f"{type(self).__name__.lower()}_steps"


@torch.no_grad()
def _write(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        if value is not parameter:
            parameter.copy_(value)
