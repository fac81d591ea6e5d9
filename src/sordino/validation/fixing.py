"""Replace layers that mix examples or remember data with their closest private equivalents."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sordino.errors import UnsupportedModel
from sordino.validation.probing import copy_module

logger = logging.getLogger(__name__)

MAX_GROUPS = 32
"""Wu & He 2018, Sec. 4.1: 32 groups do well over a wide range of widths."""

CHANNELS_WITHOUT_SPACE = 8
"""The least channels per group if a group may hold only its channels: a single value normalises to zero."""


@dataclass(frozen=True)
class Change:
    """One layer that `fix` replaces, by its name in the model."""

    where: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.where or 'model'}: {self.before} -> {self.after}"


def fix(model: nn.Module) -> nn.Module:
    """Return a copy of `model` without layers that mix examples; the model itself is unchanged.

    BatchNorm becomes GroupNorm with the same affine weights (the running statistics are dropped: a pretrained network
    needs fine-tuning); an activation that is fused with it stays. InstanceNorm stops tracking running statistics. A
    layer in eval mode inside a model in train mode is frozen on purpose, does not mix, and stays. Each change is logged
    in one line.
    """
    fixed, changes = _fix(model)
    for change in changes:
        logger.info("%s", change)
    return fixed


def plan(model: nn.Module) -> list[Change]:
    """Return what `fix` would change."""
    return _fix(model)[1]


def _fix(model: nn.Module) -> tuple[nn.Module, list[Change]]:
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm | _InstanceNorm) and layer.num_features == 0:
            raise UnsupportedModel(f"{type(layer).__name__} '{name}' has no width yet: run the model once before fix()")
    fixed = copy_module(model)
    replaced: dict[nn.Module, nn.Module] = {}
    changes = []
    for name, layer in list(fixed.named_modules()):
        if not isinstance(layer, _BatchNorm | _InstanceNorm) or not _breaks_privacy(layer, fixed):
            continue
        before = str(layer)
        replaced[layer] = _make_group_norm(name, layer) if isinstance(layer, _BatchNorm) else _untrack(layer)
        changes.append(Change(name, before, str(replaced[layer])))
    for parent in list(fixed.modules()):
        for child_name, child in parent._modules.items():
            if child in replaced:
                parent._modules[child_name] = replaced[child]
    return replaced.get(fixed, fixed), changes


def _breaks_privacy(layer: _BatchNorm | _InstanceNorm, model: nn.Module) -> bool:
    if model.training and not layer.training and layer.track_running_stats:
        return False
    return isinstance(layer, _BatchNorm) or layer.track_running_stats


def choose_groups(layer: _BatchNorm) -> int:
    """Choose the largest divisor of the channels up to 32, with enough channels per group if there may be no space."""
    channels = layer.num_features
    spatial = isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d)
    most = min(MAX_GROUPS, channels if spatial else max(1, channels // CHANNELS_WITHOUT_SPACE))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def _make_group_norm(name: str, layer: _BatchNorm) -> nn.GroupNorm:
    if layer.num_features == 1 and not isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d):
        kind = type(layer).__name__
        raise UnsupportedModel(f"{kind} '{name}' has 1 channel, a GroupNorm of it may be all zero: remove the layer")
    make = nn.GroupNorm if _runs_alone(layer) else GroupNormThen
    norm: nn.GroupNorm = make(choose_groups(layer), layer.num_features, eps=layer.eps, affine=layer.affine)
    if isinstance(norm, GroupNormThen):
        norm.follow(name, layer)
    # The same Parameter objects, so that dtype, device, requires_grad and ties survive.
    norm.weight, norm.bias = layer.weight, layer.bias
    return norm.train(layer.training)


def _runs_alone(layer: _BatchNorm) -> bool:
    """Whether a layer has torch's own forward pass, without an activation after it as in fused layers."""
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _count_space(layer: _BatchNorm) -> int:
    """Count the dimensions besides examples and channels."""
    return 2 if isinstance(layer, nn.BatchNorm2d) else 3 if isinstance(layer, nn.BatchNorm3d) else 1


class GroupNormThen(nn.GroupNorm):
    """GroupNorm, then what a fused layer did after its BatchNorm: the modules that it held, one after the other."""

    def follow(self, name: str, layer: _BatchNorm) -> None:
        """Take over the layer's modules, if it applies them and nothing else after normalising."""
        for child_name, child in layer.named_children():
            self.add_module(child_name, child)
        trial = copy.deepcopy(layer).eval()
        shape = (2, layer.num_features, *[3] * _count_space(layer))
        x = torch.linspace(-2, 2, math.prod(shape)).reshape(shape)
        x = x.to(next((tensor for tensor in (trial.weight, trial.running_mean) if tensor is not None), x))
        with torch.no_grad():
            statistics = trial.running_mean, trial.running_var
            bare = nn.functional.batch_norm(
                x, *statistics, trial.weight, trial.bias, training=trial.running_mean is None, eps=trial.eps
            )
            same = torch.allclose(trial(x), self._then(bare, trial), rtol=1e-3, atol=1e-5)
        if not same:
            raise UnsupportedModel(
                f"{type(layer).__name__} '{name}' does more than BatchNorm: replace it by GroupNorm and what follows it"
            )

    def forward(self, input: Tensor) -> Tensor:
        return self._then(super().forward(input), self)

    @staticmethod
    def _then(x: Tensor, held: nn.Module) -> Tensor:
        for child in held.children():
            x = child(x)
        return x


def _untrack(layer: _InstanceNorm) -> _InstanceNorm:
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        layer.register_buffer(name, None)
    layer.track_running_stats = False
    return layer
