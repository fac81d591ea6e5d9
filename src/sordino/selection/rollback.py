"""Everything that a rejected proposal changed, and how to put it back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sordino.step import Bench


class Rollback:
    """Parameters, buffers, optimizer state, learning rates and schedulers as they were.

    Guarantees: `restore` is exact, bit for bit, and keeps every tensor of the model where it is, so that whoever holds
    a reference still sees the model. State that the optimizer created with the proposal is gone afterwards.
    Edge cases: a learning-rate scheduler is known if it was given to ``private.attach``, and then steps with the
    proposal; a scheduler that the user steps in a loop of their own is the user's.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._model = _tensors(bench.objective.model)
        self._values = [tensor.detach().clone() for _, _, tensor in self._model]
        self._state = {p: _cloned(state) for p, state in bench.optimizer.state.items()}
        self._groups = [_cloned(_hyperparameters(group)) for group in bench.optimizer.param_groups]
        self._schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in bench.schedulers]

    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        self._write(self._values)
        optimizer = self._bench.optimizer
        optimizer.state.clear()
        for parameter, state in self._state.items():
            optimizer.state[parameter] = _cloned(state)
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            for key in _hyperparameters(group).keys() - before.keys():
                del group[key]
            for key, value in _cloned(before).items():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for scheduler, schedule in zip(self._bench.schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(schedule))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Work on the model as it was before the proposal; the proposal stands again afterwards."""
        proposed = [getattr(module, name).detach().clone() for module, name, _ in self._model]
        self._write(self._values)
        try:
            yield
        finally:
            self._write(proposed)

    def movement(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """Where `parameters` were, and how far the proposal moved them."""
        values = {id(tensor): value for (_, _, tensor), value in zip(self._model, self._values, strict=True)}
        start = [values[id(p)] for p in parameters]
        return start, [p.detach() - before for p, before in zip(parameters, start, strict=True)]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for (module, name, _), value in zip(self._model, values, strict=True):
            current = getattr(module, name)
            if current.shape == value.shape:
                current.copy_(value)
            else:  # a buffer that the forward pass replaced by one of another size
                setattr(module, name, value.clone())


def _tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with its place; tied ones once."""
    found: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for module in model.modules():
        own: list[tuple[str, Tensor]] = [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        for name, tensor in own:
            found.setdefault(id(tensor), (module, name, tensor))
    return list(found.values())


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _cloned(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _cloned(value) for key, value in state.items()}
    return copy.deepcopy(state)
