"""Models sharded by FSDP2: whole in every process while gradients are computed, and in shards otherwise.

Per-example norms need all of a layer's parameters, and processes whose parts of a draw differ in size cannot meet in
FSDP's own collectives, which come with every forward pass. So the shards are gathered once per step, each process works
on its own part of the draw, and the total sum is cut into shards again for the optimizer. Parameters and optimizer
state are sharded between steps; within one, every process holds the model and one gradient whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sordino.errors import UnsupportedModel


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any part of the model."""
    return bool(_units(model))


def mesh_size(model: nn.Module) -> int:
    """Over how many processes the parameters are cut."""
    shards: list[Any] = [parameter for parameter in model.parameters() if is_shard(parameter)]
    return max((shard.device_mesh.size() for shard in shards), default=1)


@contextmanager
def unshard(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Hand out the whole parameters behind `parameters`, in every process; without shards, they are unchanged.

    FSDP does nothing inside this block. Edge cases: afterwards FSDP's switches have torch's defaults, whatever they
    were before.
    """
    units = _units(model)
    if not units:
        yield _require_whole(parameters)
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _switch(units, on=False)
    for unit in units:
        unit.unshard()
    held = dict(model.named_parameters())
    try:
        yield _require_whole([held[names[id(parameter)]] for parameter in parameters])
    finally:
        _switch(units, on=True)
        reshard(model)


def _require_whole(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return `parameters`, or refuse if they are still in pieces."""
    if any(map(is_shard, parameters)):
        raise UnsupportedModel(
            "a parameter is a DTensor that fully_shard does not manage, as tensor parallelism makes them: "
            "its gradients are in pieces, and a norm needs all of them; shard with fully_shard alone"
        )
    return parameters


def reshard(model: nn.Module) -> None:
    """Cut the model into shards again; the user's own forward pass may have left it whole."""
    for unit in _units(model):
        unit.reshard()


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor cut as `parameter` is cut; each process keeps its own piece of it."""
    if not is_shard(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def gather_state(state: Any) -> Any:
    """Return a state dictionary with every shard replaced by the whole tensor; all processes must ask together."""
    return tree_map(lambda value: value.full_tensor() if is_shard(value) else value, state)


def scatter_state(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's `gather_state` state, cut as the model is cut."""
    like = model.state_dict()
    return {name: shard_like(value, like[name]) if name in like else value for name, value in state.items()}


def scatter_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's `gather_state` state; what has the shape of its parameter, such as a momentum, is cut like it."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(values: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        return {k: shard_like(v, parameter) if _shape(v) == parameter.shape else v for k, v in values.items()}

    return {**state, "state": {index: cut(values, held[index]) for index, values in state["state"].items()}}


def _units(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 manages; FSDP2 is not imported if there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _switch(units: list[Any], on: bool) -> None:
    """Let FSDP communicate during forward and backward passes, or not."""
    for unit in units:
        unit.set_requires_gradient_sync(on)
        unit.set_reshard_after_forward(on)
        unit.set_reshard_after_backward(on)


def is_shard(value: object) -> bool:
    """Whether this is a DTensor; checked by its attributes, because its module takes long to import."""
    return hasattr(value, "device_mesh") and hasattr(value, "full_tensor")


def _shape(value: object) -> object:
    return value.shape if isinstance(value, Tensor) else None
