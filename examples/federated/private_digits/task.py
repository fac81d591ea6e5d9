"""The model, the loss and the records: what both sides agree on."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.lab import data

Split = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Sixty-four pixels, 32 tanh units, ten classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def losses(model: nn.Module, batch: Split) -> Tensor:
    """One loss per record."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@cache
def digits() -> data.Data:
    """Read once per process: a simulation has many users in one."""
    return data.load("digits")


def records_of(user: int, users: int) -> Split:
    """The digits of one user: every `users`-th record, starting with the user's own."""
    x, y = digits().train
    return x[user::users], y[user::users]


def held_out() -> Split:
    """Public records, for the server."""
    return digits().test
