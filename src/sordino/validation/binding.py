"""Whether a recipe, a dataset, a model and an optimizer belong together."""

from __future__ import annotations

import torch
from torch import nn

from sordino.accounting.ledger import Ledger
from sordino.errors import InvalidInput


def check_length(count: int, declared: int | None) -> None:
    """The declared number of records need not be exact (it is public, the true one is not), but must be about right."""
    declared = declared or count
    if abs(count - declared) > max(10, declared // 100):
        raise InvalidInput(
            f"dataset has {count} records, but the recipe was calibrated for {declared}: calibrate with records={count}"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold trainable parameters of this model, and ask for one gradient per step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("LBFGS evaluates the loss several times per step, each a release: use SGD, Adam or another")
    names = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := sum(id(p) not in names for p in held):
        raise InvalidInput(
            f"{strangers} of the optimizer's {len(held)} parameters are not in the model: "
            "build the optimizer from model.parameters() after the model is final"
        )
    if not any(p.requires_grad for p in held):
        raise InvalidInput(f"none of the optimizer's {len(held)} parameters is trainable: unfreeze some")


def check_ledger(basis: str, ledger: Ledger | None) -> None:
    """Published accounting leaves attempts out, so that no other release may be priced together with it."""
    if ledger is not None and "published" in (basis, ledger.header.get("basis")):
        raise InvalidInput(
            "ledger= cannot be shared with accounting='published', which does not charge what it rejects: "
            "leave ledger= out, or use proven accounting for both"
        )
