"""Whether all processes work on the same thing: checked before anything is spent, and again during training.

The caller gives what must agree, by name and as text; this module compares, and says what to do about a difference. At
the start, model, recipe, records and optimizer are compared in full. Later, the settings of optimizer and schedulers
and a sample of the weights are compared at public steps: a rank with another learning rate would train another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from sordino.distributed.sharding import is_shard, is_sharded, mesh_size
from sordino.distributed.team import Team
from sordino.errors import InvalidInput

SAMPLE = 16
"""How many records are compared: enough to notice another order or another file, too few to cost anything."""

EVERY = 16
"""Settings and weights are compared every so many steps, and at the first steps, which show most mistakes."""

WEIGHTS = 256
"""How many weights of each tensor are compared: a model that took another path differs nearly everywhere."""

_RECIPE, _OPTIMIZER, _SCHEDULER = "recipe's", "optimizer's", "scheduler's"
_WAYS_OUT = {
    "number of records": "give every process the whole dataset; Sordino deals out the records of each draw",
    "records": "give every process the same dataset in the same order: shuffled apart, a record would count twice",
    "owners": "give every process the same unit= in the same order: a user that has others elsewhere would count twice",
    "validate": "give validate= the same value on every process: they look at draws together",
    "parameters": "build the model after the same torch.manual_seed on every process, or load the same weights",
    "weights": "something but the released gradients changed them; go on from the last save with the same program",
    _RECIPE: "calibrate it once, or from the same arguments everywhere",
    _OPTIMIZER: "give every process the same optimizer and change its settings on all of them alike",
    _SCHEDULER: "give every process the same schedulers and step them on all of them alike",
}


def list_assumptions(team: Team) -> tuple[str, ...]:
    """List what a guarantee must say about the processes."""
    if team.size == 1:
        return ()
    return ("all processes hold the same records in the same order (a sample was compared), and trust one another",)


def require_same(team: Team, values: Callable[[], Mapping[str, str]]) -> None:
    """Refuse, on every rank alike, if one of them differs from rank 0 in a named value; empty values are ignored.

    A single process is not asked for its values.
    """
    if team.size > 1:
        _compare(team.gather(dict(values())))


def require_still(
    team: Team, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]
) -> None:
    """Refuse, on every rank alike and before the step is paid for, to continue with settings or weights that differ.

    Asked at public steps only, so that all ranks join: the first two and every sixteenth.
    """
    if team.size > 1 and (step <= 1 or step % EVERY == 0):
        weights = (tensor.flatten()[:: max(1, tensor.numel() // WEIGHTS)] for tensor in _replicas(model))
        require_same(team, lambda: {**describe_settings(optimizer, schedulers), "weights": _digest(weights)})


def require_shards(team: Team, model: nn.Module, validate: bool) -> None:
    """Refuse what a sharded model cannot do."""
    if not is_sharded(model):
        return
    if validate:
        raise InvalidInput(
            "a sharded model cannot be copied, as the probe for mixed examples must: probe it before fully_shard, by "
            "building Private on the bare model, and then give validate=False"
        )
    if (over := mesh_size(model)) != team.size:
        raise InvalidInput(
            f"model is sharded over {over} processes, but {team.size} train it: give group= the same ones"
        )


def require_shareable(team: Team, model: nn.Module, ledger_given: bool) -> None:
    """Refuse, on every rank alike, what several processes cannot do; `ledger_given`: by the user, to this process."""
    if team.size == 1:
        return
    ledgers = team.gather(ledger_given)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise InvalidInput(
            "model is wrapped in DistributedDataParallel, which averages gradients before they are weighed: "
            "give the bare model, Sordino sums over the processes itself"
        )
    if any(ledgers[1:]):
        raise InvalidInput(
            f"ledger= was given on rank {ledgers.index(True, 1)}: only rank 0 keeps one; make earlier releases there, "
            "send their values to the others with torch.distributed, and leave ledger= out everywhere else"
        )


def describe_settings(optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]) -> dict[str, str]:
    """Return the optimizer's and the schedulers' classes and plain settings, by names that an error can show."""
    found = {f"{_OPTIMIZER} class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= _plain(_OPTIMIZER, f" in group {number}", settings)
        found[f"{_OPTIMIZER} number of tensors in group {number}"] = str(len(group["params"]))
    for number, scheduler in enumerate(schedulers):
        found[f"{_SCHEDULER} class, number {number}"] = type(scheduler).__name__
        found |= _plain(_SCHEDULER, f", number {number}", scheduler.state_dict())
    return found


def digest_weights(model: nn.Module) -> str:
    """Return a digest of all parameters and buffers that every process has a copy of."""
    return _digest(_replicas(model))


def digest_records(count: int, fetch: Callable[[Tensor], Any]) -> str:
    """Return a digest of a few of `count` records, or nothing where `fetch` answers differently each time.

    Augmentation does so. Fewer records than the sample are not compared.
    """
    if count < SAMPLE:
        return ""
    places = torch.tensor([(count - 1) * place // (SAMPLE - 1) for place in range(SAMPLE)])  # floats end at 2²⁴
    first, second = (_digest(tree_leaves(fetch(places))) for _ in range(2))
    return first if first == second else ""


def _compare(everybody: list[dict[str, str]]) -> None:
    """Name the first thing in which a rank differs from rank 0, and its value on each if that can be read."""
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        values = [theirs.get(name, "none") for theirs in everybody]
        if all(values) and len(set(values)) > 1:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            way_out = _WAYS_OUT.get(name) or _WAYS_OUT.get(name.split(" ")[0], "give every process the same")
            readable = name not in ("records", "owners", "parameters", "weights")
            said = f" ({values[0]} on rank 0, {values[rank]} on rank {rank})" if readable else ""
            raise InvalidInput(f"rank {rank} differs from rank 0 in its {name}{said}: {way_out}")


def _plain(whose: str, where: str, settings: Mapping[str, Any]) -> dict[str, str]:
    plain = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in settings.items()
    }
    return {f"{whose} {key}{where}": repr(value) for key, value in plain.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Whether the text of a value is the same in every process."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _replicas(model: nn.Module) -> Iterator[Tensor]:
    """Return the tensors that every process has a copy of; a shard exists only once, so it cannot differ."""
    held = (*model.parameters(), *model.buffers())
    return (tensor.detach() for tensor in held if not is_shard(tensor))


def _digest(values: Iterable[object]) -> str:
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            total.update(repr((value.dtype, tuple(value.shape))).encode())
            total.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()
